# SPDX-License-Identifier: Apache-2.0
"""Runs ranks as processes that share memory, with kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from overlap_inductor.kernels.layout import ANNOUNCED
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.layout import QUEUE_WORDS
from overlap_inductor.kernels.layout import STOP_WORDS
from overlap_inductor.runtime.arena import Slot
from overlap_inductor.runtime.board import Board
from overlap_inductor.runtime.board import board_words
from overlap_inductor.runtime.faults import FaultRecord
from overlap_inductor.runtime.faults import stop_words
from overlap_inductor.runtime.workspace import Launch


def run_ranks(
    world_size: int, function: Callable[..., None], *args: Any, seconds: float = 200, ends: Sequence[int] = ()
) -> None:
    """Run ``function(rank, *args)`` in one forked process for each rank.

    Fails if a rank does not end in time, or if the ranks' exit statuses are not ``ends``. By default, all statuses must
    be 0. A status ``-n`` means signal ``n``.
    """
    # With several threads, a rank's matmul would wait forever for the parent's thread pool: the threads are not forked.
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=function, args=(r, *args)) for r in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(seconds)
    hung = [process.is_alive() for process in ranks]
    for process in ranks:
        process.kill()
    assert not any(hung), f"ranks that did not end in time: {[r for r, h in enumerate(hung) if h]}"
    assert [p.exitcode for p in ranks] == (list(ends) or [0] * world_size)


def shared(*shape: int, dtype: torch.dtype = torch.int32, fill: float | None = None) -> torch.Tensor:
    made = torch.zeros(shape, dtype=dtype) if fill is None else torch.full(shape, fill, dtype=dtype)
    return made.share_memory_()


@dataclass(frozen=True)
class SharedBuffer:
    """Symmetric memory whose peers are processes of one machine."""

    everyone: torch.Tensor
    rank: int

    @property
    def local(self) -> torch.Tensor:
        return self.everyone[self.rank]

    @property
    def peers(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.everyone)

    @property
    def pointers(self) -> torch.Tensor:
        return torch.tensor([t.data_ptr() for t in self.everyone])


@dataclass(frozen=True)
class SharedWorkspace:
    """The shared memory of one part (slot) of the workspace, for all ranks. ``data`` is filled with bytes that are NaN
    in fp16. Ranks write their faults to ``board``."""

    data: torch.Tensor
    flags: torch.Tensor
    board: torch.Tensor
    stop: torch.Tensor
    signals: int

    @classmethod
    def of(cls, world_size: int, nbytes: int, signals: int) -> SharedWorkspace:
        flags = shared(world_size, world_size * (1 + signals) * FLAG_WORDS)
        board = shared(board_words(world_size))
        board[1] = 1
        data = shared(world_size, nbytes, dtype=torch.uint8, fill=0x7E)
        return cls(data, flags, board, shared(world_size, STOP_WORDS), signals)

    def faults(self, rank: int) -> FaultRecord:
        board, table = Board(self.board, self.board.data_ptr()), torch.tensor([t.data_ptr() for t in self.stop])
        self.stop[rank, 1:] = stop_words(rank, board, table)
        return FaultRecord("tp", range(len(self.stop)), rank, board, self.stop[rank], table, table.tolist())

    def launch(self, rank: int, patience_ns: int = 1_000_000_000) -> Launch:
        world_size = self.data.shape[0]
        calls, queues = (
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(QUEUE_WORDS + world_size * self.signals, dtype=torch.int32),
        )
        slot = Slot(
            self.data.shape[1],
            self.signals,
            SharedBuffer(self.data, rank),
            SharedBuffer(self.flags, rank),
            calls,
            queues,
            torch.zeros(self.data.shape[1] // 256, dtype=torch.int32),
        )
        faults = self.faults(rank)
        return Launch(rank, world_size, slot, faults, faults.number("site_7"), patience_ns)


def exact(pattern: str, a: torch.Tensor, b: torch.Tensor, bias: bool, average: bool, rows: int) -> list[torch.Tensor]:
    """The result of each rank, in fp64.

    Args:
        a: left operands of all ranks, ``[W, rows, K]`` for a gather, else ``[W, all rows, K]``.
        b: right operands of all ranks, transposed: ``[W, N, K]``.
        bias: add the first column of each rank's ``b``.
        average: divide the sum over ranks by their number.
        rows: rows of a shard.
    """
    world_size = len(a)
    products = [
        (a.flatten(0, 1) if pattern == "all_gather_matmul" else a[r]).double() @ b[r].double().t()
        + bias * b[r, :, 0].double()
        for r in range(world_size)
    ]
    if pattern == "all_gather_matmul":
        return products
    total = torch.stack(products).sum(0) / (world_size if average else 1)
    return [
        total[r * rows : (r + 1) * rows] if pattern == "matmul_reduce_scatter" else total for r in range(world_size)
    ]


def at_rest(slot: Slot) -> bool:
    """Whether the kernels' counters are zero, as between calls. The word ``ANNOUNCED`` may have any value."""
    counted = slot.queues.clone()
    counted[ANNOUNCED] = 0
    return not counted.any() and not slot.tiles.any()
