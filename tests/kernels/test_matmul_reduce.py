"""``matmul_reduce`` between processes over shared memory, block after block in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.kernels.matmul_reduce import QUEUES
from overlap_inductor.kernels.matmul_reduce import give_credits
from overlap_inductor.kernels.matmul_reduce import matmul_reduce
from overlap_inductor.kernels.signals import FAULT_WORDS
from tests.kernels.ranks import addresses
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared

BLOCK = 16


@dataclass(frozen=True)
class Case:
    world_size: int
    rows: int
    columns: int
    inner: int
    part_rows: int
    lag: int
    blocks: int
    broadcast: bool = False
    scale: float = 1.0

    @property
    def parts(self) -> int:
        return -(-self.rows // self.part_rows)


def _rank(rank: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, peer_out: torch.Tensor, staging: torch.Tensor, flags: torch.Tensor, fault: torch.Tensor, case: Case) -> None:
    queues, calls = torch.zeros(QUEUES, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    signals = addresses(flags)
    for call in range(2):
        result = peer_out[rank] if case.broadcast else out[call, rank]
        matmul_reduce[(case.blocks,)](
            TensorDescriptor.from_tensor(a[call, rank], [BLOCK, BLOCK]),
            TensorDescriptor.from_tensor(b[rank], [BLOCK, BLOCK]),
            result, staging[rank], addresses(staging), addresses(peer_out), signals, flags[rank], queues, calls, fault[rank], 1_000_000_000,
            rank, case.rows, case.columns, case.inner, case.part_rows, case.scale,
            case.world_size, case.parts, case.lag, case.broadcast, BLOCK, BLOCK, BLOCK, 2,
        )  # fmt: skip
        assert queues.tolist() == [0] * QUEUES and calls.tolist() == [call + 1]
        if case.broadcast:
            out[call, rank] = result
            give_credits[(1,)](signals, calls, rank, case.world_size)


CASES = {
    "scatter, one band": Case(2, 32, 32, 32, 32, 1, 1),
    "scatter, three ranks, bands": Case(3, 48, 24, 32, 16, 3, 2),
    "scatter, rows and columns no multiple of a tile, average": Case(2, 40, 24, 32, 32, 2, 3, scale=0.5),
    "all-reduce": Case(2, 32, 32, 32, 16, 1, 1, broadcast=True),
    "all-reduce, three ranks": Case(3, 40, 24, 32, 16, 1, 2, broadcast=True),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_fp64(name: str) -> None:
    case = CASES[name]
    w, all_rows = case.world_size, case.world_size * case.rows
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(2, w, all_rows, case.inner, generator=generator).half().share_memory_()
    b = torch.randn(w, case.columns, case.inner, generator=generator).half().share_memory_()
    nan = {"dtype": torch.float16, "fill": float("nan")}
    out = shared(2, w, all_rows if case.broadcast else case.rows, case.columns, **nan)
    peer_out, staging = shared(w, all_rows, case.columns, **nan), shared(w, w, case.rows, case.columns, **nan)
    flags, fault = shared(w, (w * (1 + case.parts) + w) * 32), shared(w, FAULT_WORDS)
    run_ranks(w, _rank, a, b, out, peer_out, staging, flags, fault, case)
    for call in range(2):
        exact = torch.stack([a[call, r].double() @ b[r].double().t() for r in range(w)]).sum(0) * case.scale
        for rank in range(w):
            wanted = exact if case.broadcast else exact[rank * case.rows : (rank + 1) * case.rows]
            assert torch.allclose(out[call, rank].double(), wanted, rtol=2e-2, atol=5e-2), (call, rank)
