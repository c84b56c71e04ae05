# SPDX-License-Identifier: Apache-2.0
"""Transport ``copy_engine``: copy engines copy rows to the peers' memory. A second copy then sets the receiver's flag.

The copies occupy no SM. On an H200, they move 379 GB/s, with 3 us between two copies. Setting the flag delays the next
copy. The delay depends on what sets the flag:

===================  ===========
a copy               2 us
a kernel             12 us
a write by a stream  15 to 20 us
===================  ===========

CUDA graphs. A graph's copies are the same in every replay. So the copy that sets a flag reads the call's number from a
word in memory. ``transports.credits.credit_kernel`` writes this word in each call.

Ordering. The copies of a stream run one after the other. A copy begins when everything that the previous copy has
written is visible. So a reader that acquires the flag sees the rows (``tests.gpu.check_litmus``, "copy engine, copied
flag").

Without a credit. A peer's credit allows this rank to write into that peer's workspace. A wait for credits also ends if
it times out, or if the group is aborted. Then kernels do not store (``kernels.signals.may_store``), but queued copies
still run. These copies do no harm:

* No rank takes the copied rows for valid rows. Their flag gets a number for which no rank waits (``announce``).
* A slow peer may still be in the previous call and read the copied rows. Then its results become NaN:

  1. If the wait for credits ends without a credit, the waiting kernel sets every rank's abort word before it ends. So
     the words are set before the next copy starts.
  2. After its last read of the workspace, the peer's call looks at its abort word. If the word is set, the call sets
     its results to NaN (``kernels.transfer.spoil``).

  This is the order of a sequence lock. The writer (the rank without a credit) sets the abort words, then writes. The
  reader (the slow peer) reads, then looks at its abort word. A rank also
  looks before it signals sums to other ranks.
* A later call does not start, because its host checks first (``FaultRecord.check``).

Steps 1 and 2 run in kernels. So they also run when a CUDA graph is replayed.

What is sent may also depend on waits after the wait for credits (``guarded``). Then ``announce`` writes the word
with the call's number again after these waits. If the group has been aborted by then, for example because one of these
waits timed out, ``announce`` writes a number for which no rank waits.

Turns. While the ranks are in step, no two of them send to the same rank. If two ranks do, each gets half a link. So a
late rank becomes later and disturbs the next rank, too. In the end, each rank sends as if it chose its receivers at
random. Such sends reach 58.6 % of a link (Karol, Hluchyj and Morgan, IEEE Trans. Comm. 35, 1987, section III).

So a large piece waits for its turn (``kernels.transfer.wait_for_turn``): until its receiver has got the piece that
another rank sends there one turn earlier. Then a late rank does not become later (bench/results/turns.jsonl). A piece
does not wait in these cases:

* It is the first piece of a send, or the previous piece goes to the same receiver.
* A piece of the send has fewer than ``Share.turns_from`` bytes. A wait costs 5 us, and small pieces gain less.
* ``Share.turns_from`` is ``None``, because the schedule's own kernel occupies every SM. A wait needs room on an SM.
* The process has fewer than ``QUEUES_FOR_TURNS`` hardware queues. A wait could then hold back the matmuls.
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
from overlap_inductor.transports.transport import Reads
from overlap_inductor.transports.transport import Send
from overlap_inductor.transports.transport import Share

if TYPE_CHECKING:
    from overlap_inductor.torch_compat.triton_launch import PreparedKernel

QUEUES_FOR_TURNS = 3
"""Copies, waits for turns, and waits for peers each need a hardware queue of their own. In a shared queue, a kernel
that waits could block later work of another stream."""


class CopyEngine:
    """Implements ``transports.transport.PeerCopies`` and ``PeerReads``."""

    name = "copy_engine"
    moved_by = "copy engines, over symmetric memory"
    needs_sms = False
    fastest_from = 2 << 20
    """For pieces of at least this many bytes, copy engines are faster than transport ``sm_push``. This was measured on
    2 H200s, which played groups of 4 and 8 ranks (``bench.mirrored``)."""

    def prepare(
        self,
        launch: Launch,
        transfer: Transfer,
        numbers: Sequence[int],
        source: torch.Tensor,
        share: Share,
        guarded: bool = False,
    ) -> Send:
        """As ``PeerCopies.prepare``."""
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

    def prepare_reads(self, launch: Launch, transfer: Transfer, example: torch.Tensor) -> Reads:
        """As ``PeerReads.prepare_reads``."""
        from overlap_inductor.transports.peer_reads import prepared

        return prepared(launch, transfer, example)


@dataclass(frozen=True)
class _Copy:
    """A copy to a peer, and the copy of the flag that follows it.

    Attributes:
        target, flag: addresses in the receiver's memory.
        source: offset in the tensor that is sent, in bytes.
        memory: the receiver's data and flags, kept alive.
    """

    target: int
    source: int
    nbytes: int
    flag: int
    memory: tuple[torch.Tensor, torch.Tensor]


def _copy(launch: Launch, transfer: Transfer, number: int, itemsize: int) -> _Copy:
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
    """A kernel that waits for the turn of piece ``number``, which this rank sends right after piece ``before``. While
    this rank sends piece ``before``, another rank sends a piece to the receiver of piece ``number``. The kernel waits
    until that receiver has got the other rank's piece. ``None`` if both pieces of this rank go to one receiver."""
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
