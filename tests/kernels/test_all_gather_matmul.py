"""``all_gather_matmul`` between processes over shared memory, block after block in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as multiprocessing
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.kernels.all_gather_matmul import QUEUES
from overlap_inductor.kernels.all_gather_matmul import all_gather_matmul
from overlap_inductor.kernels.signals import FAULT_WORDS

BLOCK_M, BLOCK_N, BLOCK_K = 16, 16, 16


def _rank(rank: int, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, workspace: torch.Tensor, flags: torch.Tensor, fault: torch.Tensor, shape: tuple[int, ...]) -> None:
    world_size, rows, columns, inner, part_rows, pieces, pushers, blocks = shape
    parts = -(-rows // part_rows)
    queues, calls = torch.zeros(QUEUES, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    data = torch.tensor([w.data_ptr() for w in workspace])
    signals = torch.tensor([f.data_ptr() for f in flags])
    # Two calls: counters, queues and credits of the first must serve the second.
    for call in range(2):
        mine = a[call, rank].contiguous()
        all_gather_matmul[(blocks,)](
            TensorDescriptor.from_tensor(mine, [BLOCK_M, BLOCK_K]),
            TensorDescriptor.from_tensor(workspace[rank].view(torch.float16).view(world_size * rows, inner), [BLOCK_M, BLOCK_K]),
            TensorDescriptor.from_tensor(b[rank], [BLOCK_N, BLOCK_K]),
            c[call, rank], mine.view(torch.int32), data, signals, flags[rank], queues, calls, fault[rank], 1_000_000_000,
            rank, rows, columns, inner, rows * inner // 2, part_rows, part_rows * inner // 2,
            world_size, parts, pieces, pushers, BLOCK_M, BLOCK_N, BLOCK_K, 2, 64,
        )  # fmt: skip
        assert queues.tolist() == [0] * QUEUES and calls.tolist() == [call + 1]


@pytest.mark.parametrize(
    ("world_size", "rows", "columns", "inner", "part_rows", "pieces", "pushers", "blocks"),
    [
        pytest.param(2, 32, 32, 32, 32, 1, 1, 1, id="one block, one part"),
        pytest.param(3, 48, 40, 48, 16, 2, 1, 2, id="three ranks, three parts"),
        pytest.param(2, 40, 24, 32, 32, 3, 2, 3, id="rows and columns no multiple of a tile"),
        pytest.param(2, 32, 16, 32, 16, 2, 0, 2, id="nobody pushes first"),
    ],
)
def test_agrees_with_fp64(world_size: int, rows: int, columns: int, inner: int, part_rows: int, pieces: int, pushers: int, blocks: int) -> None:
    context = multiprocessing.get_context("spawn")
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(2, world_size, rows, inner, generator=generator).half().share_memory_()
    b = torch.randn(world_size, columns, inner, generator=generator).half().share_memory_()
    c = torch.full((2, world_size, world_size * rows, columns), float("nan"), dtype=torch.float16).share_memory_()
    workspace = torch.full((world_size, world_size * rows * inner // 2), 0x7E007E00, dtype=torch.int32).share_memory_()
    parts = -(-rows // part_rows)
    flags = torch.zeros(world_size, world_size * (1 + parts) * 32, dtype=torch.int32).share_memory_()
    fault = torch.zeros(world_size, FAULT_WORDS, dtype=torch.int32).share_memory_()
    shape = (world_size, rows, columns, inner, part_rows, pieces, pushers, blocks)
    ranks = [context.Process(target=_rank, args=(r, a, b, c, workspace, flags, fault, shape)) for r in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
    hung = [process.is_alive() for process in ranks]
    for process in ranks:
        process.kill()
    assert not any(hung) and [p.exitcode for p in ranks] == [0] * world_size
    for call in range(2):
        for rank in range(world_size):
            exact = a[call].double().flatten(0, 1) @ b[rank].double().t()
            assert torch.allclose(c[call, rank].double(), exact, rtol=1e-2, atol=1e-2), (call, rank)
