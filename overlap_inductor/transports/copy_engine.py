# SPDX-License-Identifier: Apache-2.0
"""Transport ``copy_engine``: copies rows to the peers' memory on a stream. Copy engines run the copies. After each copy
of rows, a second copy sets the receiver's flag.

The copies occupy no SM. A copy engine moves 379 GB/s on an H200, with 3 us between two copies, on one stream or on
several. The flag is copied from a word that holds the number of the call. This takes 2 us. A kernel that signals would
delay the next copy by 12 us. A value written by the stream itself would delay the next copy by 15 to 20 us.

The copies of a CUDA graph are the same in every call, so they read the number from memory. In each call,
``transports.credits.credit_kernel`` writes the number to the word, after its wait for the credits of all peers. A
peer's credit allows this rank to write into that peer's workspace.

Ordering. The copies of a stream run one after the other. A copy begins only when everything that the copy before it has
written is visible. So a reader that acquires the flag sees the rows (``tests.gpu.check_litmus``, "copy engine, copied
flag").

Without a credit. A kernel that stores first checks whether it is allowed to store (``kernels.signals.may_store``). A
queued copy cannot check. The wait for a credit ends without a credit if the wait times out, or if the group was
aborted. (An abort ends every wait at once.) Then the copy runs, and the copies of all other calls that are queued by
then run, too. Three things hold in that case:

* No rank takes the copied rows for valid rows. Their flag is copied from a word that holds no call's number
  (``announce``).
* A peer may still be in the previous call, because it is slow or was paused after its last wait. This peer may then
  read the copied rows in place of that call's rows. None of the copied rows reaches the peer's program:

  1. The wait that ends without a credit sets every rank's abort word before its kernel ends. So the words are set
     before any later copy on the stream starts.
  2. After its last read of the workspace, the peer's call looks at its abort word. If the word is set, the call sets
     its results to NaN (``kernels.transfer.spoil``), before any later work on its stream can read them.

  This is the order of a sequence lock: the writer announces the write, then writes; the reader reads, then looks. Sums
  that the peer computes for other ranks are signalled only after such a look.
* A call that starts later writes nothing, because its host checks first (``FaultRecord.check``).

These three things hold for calls that are launched one by one, for graphs of calls, and for graphs that a program
captures. In each case, a kernel of the call looks at the abort word. The look costs nothing if the call's last kernel
does it. Alternatives considered:

* A wait that never ends without a credit would hold back every copy. It would also hold back every later kernel of this
  rank, so a program that was told of the fault could not even save its weights.
* Conditional nodes of CUDA graphs would serve graphs only.
* Two regions of workspace that calls use in turn would not help, because more than one call may be queued. The second
  queued call would write into the region that a slow peer still reads.

What is sent may also depend on waits that come after the wait for credits (``guarded``). Then ``announce`` writes the
word again after those waits. If one of them timed out, the word becomes a number that no rank waits for.

Turns. Each rank sends to the next rank, then to the one after that, and so on. (A gather sends to the previous rank
first, and goes on in that direction.) While all ranks are in step, no two of them send to the same rank. If two ranks
do, each gets half a link, so a late rank's delay is paid twice. The late rank then collides with the next rank, too. In
the end, the ranks send as if each chose its receivers at random and waited for them. Such sends reach 58.6 % of a link
(Karol, Hluchyj and Morgan, IEEE Trans. Comm. 35, 1987, section III).

In a round, each rank sends one piece. Without turns, each of eight H200s delivered 186 GB/s in 21 rounds with pieces of
4 MiB, 226 GB/s with 8 MiB, and 250 GB/s with 16 MiB. With pieces of 32 MiB, each delivered 343 GB/s. But the
measurement with 32 MiB had only 14 rounds, and it ended before the ranks fell out of step. On several streams at once,
each delivered only 180 to 200 GB/s with pieces of 8 and of 32 MiB.

So if all pieces of a send are large, a piece may wait for its turn (``kernels.transfer.wait_for_turn``). A piece waits
if its receiver differs from the receiver of the piece before it. The wait ends when this receiver has got the piece
that another rank sends to it one turn earlier. The first piece of a send does not wait. A late rank then stays as late
as it was (bench/results/turns.jsonl). A wait costs some 5 us, and small pieces do not gain this time back. A wait also
needs room on an SM, for one warp and no shared memory. So a schedule whose kernel occupies every SM while it waits for
the copies, such as ``fused``, allows no turns (``Share.turns_from``). No piece waits if the process has fewer than
``QUEUES_FOR_TURNS`` hardware queues, because a wait could then hold back the matmuls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from overlap_inductor.runtime.driver import copier
from overlap_inductor.runtime.side_stream import waiting_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports.call_arguments import call_arguments
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import Send
from overlap_inductor.transports.transport import Share

if TYPE_CHECKING:
    from overlap_inductor.torch_compat.triton_launch import PreparedKernel

QUEUES_FOR_TURNS = 3
"""Hardware queues that turns need: one for copies, one for waits for turns, and one for waits for peers. In a shared
queue, a kernel that waits could block later work that does not depend on this kernel."""


class CopyEngine:
    """Implements ``transports.transport.PeerCopies``."""

    name = "copy_engine"
    moved_by = "copy engines, over symmetric memory"
    needs_sms = False
    fastest_from = 2 << 20
    """In bytes. Measured on 2 H200s against transport ``sm_push``, which takes SMs from the matmul. The groups had 2
    ranks, or 4 and 8 ranks as ``bench.mirrored`` plays them."""

    def prepare(
        self,
        launch: Launch,
        transfer: Transfer,
        numbers: Sequence[int],
        source: torch.Tensor,
        share: Share,
        guarded: bool = False,
    ) -> Send:
        """As ``PeerCopies.prepare``. After each part, a second copy sets its flag."""
        from overlap_inductor.kernels.transfer import announce
        from overlap_inductor.torch_compat.triton_launch import PreparedKernel
        from overlap_inductor.transports.credits import announced

        send = _copies_with_flags(launch, transfer, numbers, source, announced(launch), share.turns_from)
        if not guarded:
            return send
        fixed = {**call_arguments(announce, launch), "announced": announced(launch)}
        announces = PreparedKernel(announce, 1, {}, fixed, num_warps=1)

        def announced_send(source: torch.Tensor) -> None:
            announces()
            send(source)

        return announced_send


@dataclass(frozen=True)
class _Copy:
    """A copy of ``nbytes`` bytes to a peer, and the copy of the flag that follows it.

    Attributes:
        target: address in the receiver's memory.
        source: offset in the tensor that is sent, in bytes.
        flag: address of the receiver's flag.
        memory: the receiver's data and flags, kept alive.
    """

    target: int
    source: int
    nbytes: int
    flag: int
    memory: tuple[torch.Tensor, torch.Tensor]


def _copy(launch: Launch, transfer: Transfer, number: int, itemsize: int) -> _Copy:
    """The copy of part ``number``. ``itemsize``: bytes per element."""
    slot, row_bytes = launch.slot, transfer.width * itemsize
    piece = transfer.piece(number, launch.rank, launch.world_size)
    at = transfer.flag(number, launch.rank, launch.world_size, slot.signals)
    data, flags = slot.data.peers[piece.peer], slot.flags.peers[piece.peer]
    flag = flags.data_ptr() + at * flags.element_size()
    return _Copy(
        data.data_ptr() + piece.target * row_bytes,
        piece.source * row_bytes,
        piece.rows * row_bytes,
        flag,
        (data, flags),
    )


def _copies_with_flags(
    launch: Launch,
    transfer: Transfer,
    numbers: Sequence[int],
    source: torch.Tensor,
    word: torch.Tensor,
    turns_from: int | None,
) -> Send:
    """A function that starts the copies of parts ``numbers``, each followed by the copy of ``word`` to its flag."""
    start = copier(source.device.type)
    copies = [_copy(launch, transfer, number, source.element_size()) for number in numbers]
    takes_turns = (
        turns_from is not None
        and symmetric.hardware_queues() >= QUEUES_FOR_TURNS
        and min(copy.nbytes for copy in copies) >= turns_from
    )
    turns = [_turn(launch, transfer, *pair) if takes_turns else None for pair in pairwise(numbers)]
    number_of_call, word_bytes = word.data_ptr(), word.element_size()
    waiting = waiting_stream(source.device) if any(turns) else None

    def send(source: torch.Tensor) -> None:
        stream, base = symmetric.stream_number(source.device), source.data_ptr()
        if waiting is not None:
            waiting.follow()
        for copy, turn in zip(copies, [None, *turns], strict=True):
            if waiting is not None and turn is not None:
                waiting.before(turn)
            start(copy.target, base + copy.source, copy.nbytes, stream)
            start(copy.flag, number_of_call, word_bytes, stream)

    return send


def _turn(launch: Launch, transfer: Transfer, before: int, number: int) -> PreparedKernel | None:
    """A kernel that waits for the turn of part ``number``. Another rank sends to the same receiver one turn earlier;
    the kernel waits until the receiver has got part ``before`` from that rank. ``None`` if that rank is this rank."""
    from overlap_inductor.kernels.transfer import wait_for_turn
    from overlap_inductor.torch_compat.triton_launch import PreparedKernel

    world_size = launch.world_size
    receiver = transfer.piece(number, launch.rank, world_size).peer
    sender = (launch.rank + receiver - transfer.piece(before, launch.rank, world_size).peer) % world_size
    if sender == launch.rank:
        return None
    fixed = {
        **call_arguments(wait_for_turn, launch),
        "receiver": receiver,
        "sender": sender,
        "index": transfer.index + before % transfer.parts,
    }
    return PreparedKernel(wait_for_turn, 1, {}, fixed, num_warps=1)
