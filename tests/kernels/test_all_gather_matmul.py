"""``all_gather_matmul`` between processes over shared memory, block after block in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.kernels.all_gather_matmul import QUEUES
from overlap_inductor.kernels.all_gather_matmul import all_gather_matmul
from overlap_inductor.kernels.signals import FAULT_WORDS
from tests.kernels.ranks import addresses
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared

BLOCK_M, BLOCK_N, BLOCK_K = 16, 16, 16


def _rank(rank: int, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, workspace: torch.Tensor, flags: torch.Tensor, fault: torch.Tensor, shape: tuple[int, ...]) -> None:
    world_size, rows, columns, inner, part_rows, pieces, pushers, blocks = shape
    parts = -(-rows // part_rows)
    queues, calls = torch.zeros(QUEUES, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    data, signals = addresses(workspace), addresses(flags)
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
    generator = torch.Generator().manual_seed(1)
    parts = -(-rows // part_rows)
    a = torch.randn(2, world_size, rows, inner, generator=generator).half().share_memory_()
    b = torch.randn(world_size, columns, inner, generator=generator).half().share_memory_()
    c = shared(2, world_size, world_size * rows, columns, dtype=torch.float16, fill=float("nan"))
    workspace = shared(world_size, world_size * rows * inner // 2, fill=0x7E007E00)
    flags = shared(world_size, world_size * (1 + parts) * 32)
    fault = shared(world_size, FAULT_WORDS)
    shape = (world_size, rows, columns, inner, part_rows, pieces, pushers, blocks)
    run_ranks(world_size, _rank, a, b, c, workspace, flags, fault, shape)
    for call in range(2):
        for rank in range(world_size):
            exact = a[call].double().flatten(0, 1) @ b[rank].double().t()
            assert torch.allclose(c[call, rank].double(), exact, rtol=1e-2, atol=1e-2), (call, rank)
