"""Transport ``copy_engine``: copies to peers' memory on a stream, which copy engines do; a kernel of a few threads signals behind them.

No SM works at the copies, and one goes at 370 to 390 GB/s on an H200, one stream at a time (more of them are slower). A signal costs a launch, not the 15 to
20 us of a value written by the stream itself, and takes its value from device memory, so that nothing is baked into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from overlap_inductor.kernels.transfer import give_signals
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.transfer import Send
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.workspace import Launch


class CopyEngine:
    def prepare(self, launch: Launch, transfer: Transfer, bounds: Sequence[int], source: torch.Tensor) -> Send:
        """As ``Transport.prepare``; receivers are told at the bounds only."""
        slot, world_size = launch.slot, launch.world_size
        groups = []
        for first, last in pairwise(bounds):
            copies = []
            for number in range(first, last):
                piece = transfer.piece(number, launch.rank, world_size)
                row_bytes = transfer.width * source.element_size()
                target = slot.data.peers[piece.peer][piece.target * row_bytes : (piece.target + piece.rows) * row_bytes].view(source.dtype)
                whole = piece.rows == len(source)
                copies.append((target.view(piece.rows, transfer.width), None if whole else slice(piece.source, piece.source + piece.rows)))
            fixed = (slot.flags.pointers, slot.calls, launch.faults.stop, launch.rank, transfer.index, first, slot.signals, world_size, transfer.parts, transfer.direction)
            groups.append((copies, PreparedKernel(give_signals, last - first, (), fixed, num_warps=1)))

        def send(source: torch.Tensor) -> None:
            for copies, signal in groups:
                for target, rows in copies:
                    target.copy_(source if rows is None else source[rows], non_blocking=True)
                signal()

        return send
