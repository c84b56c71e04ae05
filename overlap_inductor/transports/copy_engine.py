"""Transport ``copy_engine``: copies to peers' memory on a stream, which copy engines do; a kernel of a few threads signals behind them, or one more copy.

No SM works at the copies, and one goes at 370 to 390 GB/s on an H200, one stream at a time (more of them are slower). A signal costs a launch, not the 15 to
20 us of a value written by the stream itself, and takes its value from device memory, so that nothing is baked into a CUDA graph.

Nothing holds back a copy where the wait for leave before it was given up (a kernel's stores are masked then, ``kernels.signals.may_store``): only its signal is not given.
So a peer that was stopped in the middle of a call for longer than the group's timeout may find other rows there; its next call raises the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.transfer import give_signals
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.credits import announced
from overlap_inductor.transports.transfer import Send
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.workspace import Launch

Copy = tuple[torch.Tensor, slice | None]
"""Where to, in a peer's workspace, and which rows of the source (``None``: all)."""


def _copy(launch: Launch, transfer: Transfer, number: int, source: torch.Tensor) -> Copy:
    """Of part ``number``."""
    piece = transfer.piece(number, launch.rank, launch.world_size)
    row_bytes = transfer.width * source.element_size()
    target = launch.slot.data.peers[piece.peer][piece.target * row_bytes : (piece.target + piece.rows) * row_bytes].view(source.dtype)
    rows = None if piece.rows == len(source) else slice(piece.source, piece.source + piece.rows)
    return target.view(piece.rows, transfer.width), rows


class CopyEngine:
    def prepare(self, launch: Launch, transfer: Transfer, bounds: Sequence[int], source: torch.Tensor) -> Send:
        """As ``Transport.prepare``; receivers are told at the bounds only."""
        slot, world_size = launch.slot, launch.world_size
        groups = []
        for first, last in pairwise(bounds):
            copies = [_copy(launch, transfer, number, source) for number in range(first, last)]
            fixed = (slot.flags.pointers, slot.calls, launch.faults.stop, launch.rank, transfer.index, first, slot.signals, world_size, transfer.parts, transfer.direction)
            groups.append((copies, PreparedKernel(give_signals, last - first, (), fixed, num_warps=1)))

        def send(source: torch.Tensor) -> None:
            for copies, signal in groups:
                for target, rows in copies:
                    target.copy_(source if rows is None else source[rows], non_blocking=True)
                signal()

        return send


def prepare_without_kernels(launch: Launch, transfer: Transfer, source: torch.Tensor) -> Send:
    """As ``Transport.prepare`` for all parts, the first of every shard first; flags are copied, too, from the word that
    ``transports.credits.credit_kernel`` has written before. So nothing here needs room on an SM, which a kernel that waits for a peer's copies may not leave.

    Ordering: copies of a stream run one after the other, and the next begins when what the one before has written is visible; a reader that acquires the
    flag sees it (``tests.gpu.check_litmus``, "copy engine, copied flag").
    """
    slot, world_size, parts = launch.slot, launch.world_size, transfer.parts
    word, sends = announced(launch), []
    for number in (step * parts + part for part in range(parts) for step in range(world_size - 1)):
        at = (world_size + launch.rank * slot.signals + transfer.index + number % parts) * FLAG_WORDS
        flag = slot.flags.peers[transfer.piece(number, launch.rank, world_size).peer][at : at + 1]
        sends.append((*_copy(launch, transfer, number, source), flag))

    def send(source: torch.Tensor) -> None:
        for target, rows, flag in sends:
            target.copy_(source if rows is None else source[rows], non_blocking=True)
            flag.copy_(word, non_blocking=True)

    return send
