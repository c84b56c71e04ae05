# SPDX-License-Identifier: Apache-2.0
"""Transport ``copy_engine``: copies to the peers' memory on a stream, which copy engines run. Each copy of rows is
followed by the copy of a flag.

No SM works at the copies. A copy engine moves 379 GB/s on an H200, with 3 us between two copies, on one stream as on
several. The flag is one more copy, of a word that holds the number of the call. It takes 2 us; a kernel that signals
would keep the next copy waiting for 12 us, a value written by the stream itself for 15 to 20 us. Nothing of the call is
baked into a CUDA graph: ``transports.credits.credit_kernel`` has written the word before, when all peers gave leave.

Ordering. The copies of a stream run one after the other, and a copy begins when what the one before has written is
visible. So a reader that acquires the flag sees the rows (``tests.gpu.check_litmus``, "copy engine, copied flag").

Without leave. A kernel that stores checks whether it may (``kernels.signals.may_store``); a copy that is queued cannot.
If the wait for leave ends without leave (its patience is over, or the group was aborted, after which every wait ends at
once), the copy runs, and so do the copies of all calls that are queued by then. Three things then hold:

* No rank takes the copied rows for valid ones: their flag is copied from a word that holds the number of no call
  (``announce``).
* A peer that is still in the call before may read the copied rows in place of its own: it is slow, or was paused behind
  its last wait. It hands none of them out. The wait that ends without leave sets every rank's abort word before its
  kernel ends, so before any copy behind it starts. The peer's call looks at its abort word behind its last read of the
  workspace, and sets its results to NaN if the word is set (``kernels.transfer.spoil``), before anything behind the
  call on its stream can read them. This is the order of a sequence lock: the writer says that it writes, then writes;
  the reader reads, then looks. What the peer sums for others it signals only behind such a look.
* A call that starts later writes nothing: its host checks first (``FaultRecord.check``).

This holds for calls that are launched one by one, for graphs of calls and for graphs that a program captures alike. The
look is a kernel of the call, and costs nothing if the call's last kernel does it. Alternatives considered: a wait that
never ends without leave would hold back every copy, but also every later kernel of this rank, so a program that was
told of the fault could not even save its weights; conditional nodes of CUDA graphs would serve graphs alone; a second
region for every other call does not help, since more than one call may be queued.

If what is sent also rests on later waits (``guarded``), the word is written anew behind them. If one of them was given
up, it becomes a number that no rank waits for, as after the wait for leave.

Turns. Each rank sends to the rank next to it, then to the one after, and so on. As long as all ranks are in step, no
two send to the same rank. Two that do get half a link each, so a late rank's delay is paid twice, and it then meets the
next rank, until ranks send as if they chose receivers at random and waited for them. That is 58.6 % of a link (Karol,
Hluchyj and Morgan, IEEE Trans. Comm. 35, 1987, section III): in 21 rounds eight H200s delivered 186 GB/s each in pieces
of 4 MiB, 226 in pieces of 8 MiB and 250 in pieces of 16 MiB, some 200 on several streams at once; only 14 rounds of 32
MiB ended before the ranks fell out of step (343). So each large piece of a send but the first waits until its receiver
has got what comes before it in the order of all ranks (``kernels.transfer.wait_for_turn``). A late rank then stays as
late as it was (bench/results/turns.jsonl). A wait costs some 5 us, which small pieces do not gain back. It also needs
room on an SM, for one warp and no shared memory. So a schedule allows no turns (``Share``) if its kernel occupies every
SM while it waits for the copies, as schedule ``fused`` does. With one hardware queue a wait would hold back the
matmuls, so no piece waits.
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
"""Hardware queues that turns need: for copies, for waits for turns, and for waits for peers. In a CUDA graph only edges
order these, and a kernel that waits may hold up its queue."""


class CopyEngine:
    """Implements ``transports.transport.PeerCopies``."""

    name = "copy_engine"
    moved_by = "copy engines, over symmetric memory"
    needs_sms = False
    fastest_from = 2 << 20
    """Against SMs that push, which are missing from the matmul (2 H200s, also as one of 4 and of 8 ranks)."""

    def prepare(
        self,
        launch: Launch,
        transfer: Transfer,
        numbers: Sequence[int],
        source: torch.Tensor,
        share: Share,
        guarded: bool = False,
    ) -> Send:
        """As ``PeerCopies.prepare``. Receivers are told of every part."""
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
    """``nbytes`` bytes from byte ``source`` of what is sent to address ``target``.

    Attributes:
        flag: address of the receiver's flag.
        memory: the receiver's data and flags, kept alive.
    """

    target: int
    source: int
    nbytes: int
    flag: int
    memory: tuple[torch.Tensor, torch.Tensor]


def _copy(launch: Launch, transfer: Transfer, number: int, itemsize: int) -> _Copy:
    """The copy of part ``number``; ``itemsize``: bytes of an element."""
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
    """What starts the copies of parts ``numbers``, each followed by the copy of ``word`` to its flag."""
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
    """Waits until the receiver of part ``number`` has got what another rank sends it as part ``before``. ``None`` if
    that rank is this one."""
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
