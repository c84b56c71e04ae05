# SPDX-License-Identifier: Apache-2.0
"""Runs the fused kernels on processes that share memory. Triton's interpreter runs a kernel's blocks one after the
other."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import pytest
import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.lowerings.fused import calls as fused
from overlap_inductor.lowerings.fused.parameters import NEVER
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import at_rest
from tests.kernels.ranks import exact
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared
from tests.support.shared_memory import SMALL_TILES

CALLS = 3


@dataclass(frozen=True)
class Case:
    """``CALLS`` calls in one part (slot) of the workspace. Each call has one band and one piece more than the call
    before. ``parts`` 0 stands for as many bands in a shard as there are ranks. So the calls of such a case have W bands
    (the number of ranks), 1 band and 2 bands in a shard. Sites with different numbers of bands may share a slot, so a
    slot's flags must serve calls with any number of bands.

    Attributes:
        rows: rows of a shard.
        in_rows: the right operand is row-major, not transposed.
        keep: the gathered tensor is read after the kernel.
    """

    pattern: str
    world_size: int
    rows: int
    columns: int
    inner: int
    parts: int = 1
    blocks: int = 1
    pushers: int = 1
    pieces: int = 1
    average: bool = False
    bias: bool = False
    in_rows: bool = False
    keep: bool = False
    copies_from: int = NEVER
    slices: int = 1
    unit: int = 4

    def parameters(self, call: int) -> FusedParameters:
        return FusedParameters(
            self.blocks,
            copies_from=self.copies_from,
            slices=self.slices,
            slices_tiles=2**20,
            slices_pushers=self.pushers,
            parts=self.parts + call,
            pieces=self.pieces + call,
            pushers=self.pushers,
            unit=self.unit,
            **SMALL_TILES,
        )


CASES = {
    "gather, one block": Case("all_gather_matmul", 2, 32, 32, 32),
    "gather, three ranks, bands": Case("all_gather_matmul", 3, 48, 40, 48, parts=3, blocks=2, pieces=2),
    "gather, no multiples of a tile": Case("all_gather_matmul", 2, 40, 24, 32, blocks=3, pushers=2, pieces=3),
    "gather with bias, the right operand in rows": Case(
        "all_gather_matmul", 2, 24, 24, 40, blocks=2, bias=True, in_rows=True
    ),
    "gather, kept": Case("all_gather_matmul", 3, 24, 16, 32, parts=2, blocks=2, pieces=2, keep=True),
    "gather, no block pushes first": Case("all_gather_matmul", 2, 32, 16, 32, parts=2, blocks=2, pushers=0, pieces=2),
    "gather by copies": Case("all_gather_matmul", 3, 40, 24, 32, parts=3, blocks=2, copies_from=0),
    "gather by copies, kept": Case("all_gather_matmul", 2, 24, 16, 32, blocks=2, copies_from=0, keep=True),
    "gather along K": Case("all_gather_matmul", 2, 24, 32, 72, parts=2, blocks=2, pieces=2, slices=3),
    "gather along K, three ranks, bias, in rows, kept": Case(
        "all_gather_matmul", 3, 40, 24, 40, blocks=2, pieces=3, slices=2, bias=True, in_rows=True, keep=True
    ),
    "gather along K, more slices than blocks of K, one block": Case("all_gather_matmul", 2, 16, 16, 24, slices=4),
    "scatter, one block": Case("matmul_reduce_scatter", 2, 32, 32, 32),
    "scatter, three ranks, bands": Case("matmul_reduce_scatter", 3, 48, 24, 32, parts=2, blocks=2),
    "scatter, no multiples of a tile, average": Case(
        "matmul_reduce_scatter", 2, 40, 24, 32, parts=2, blocks=3, average=True
    ),
    "scatter with bias, the right operand in rows": Case(
        "matmul_reduce_scatter", 2, 24, 24, 40, blocks=2, bias=True, in_rows=True
    ),
    "all-reduce with bias": Case("matmul_all_reduce", 2, 32, 16, 32, bias=True),
    "all-reduce, average": Case("matmul_all_reduce", 2, 32, 32, 32, parts=2, average=True),
    "all-reduce, three ranks, three bands at first": Case(
        "matmul_all_reduce", 3, 56, 24, 32, parts=0, blocks=2, pushers=0
    ),
    "all-reduce, tiles pushed in twos, the right operand in rows": Case(
        "matmul_all_reduce", 2, 24, 40, 32, parts=2, blocks=2, pushers=2, unit=2, in_rows=True
    ),
    "all-reduce, tiles pushed in threes by all blocks": Case(
        "matmul_all_reduce", 3, 40, 24, 32, parts=2, blocks=2, pushers=2, unit=3, bias=True
    ),
}


def _rank(
    rank: int, workspace: SharedWorkspace, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, case: Case
) -> None:
    launch = workspace.launch(rank)
    keywords: dict[str, Any] = {"average": True} if case.average else {"keep": True} if case.keep else {}
    right = b[rank].t().contiguous() if case.in_rows else b[rank].t()
    bias = b[rank, :, 0].contiguous() if case.bias else None
    for call in range(CALLS):
        left = a[call, rank].contiguous()
        out[call, rank] = getattr(fused, case.pattern)(left, right, launch, case.parameters(call), bias, **keywords)
        if case.keep:
            assert launch.slot.calls.tolist() == [call] and torch.equal(
                fused.gathered(left, launch), a[call].flatten(0, 1)
            )
            fused.end(launch)
        assert at_rest(launch.slot) and launch.slot.calls.tolist() == [call + 1]
        launch.faults.check()


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_fp64(name: str) -> None:
    case = CASES[name]
    w, gathers = case.world_size, case.pattern == "all_gather_matmul"
    all_rows = w * case.rows
    generator = torch.Generator().manual_seed(1)
    a = (
        torch.randn(CALLS, w, case.rows if gathers else all_rows, case.inner, generator=generator)
        .half()
        .share_memory_()
    )
    b = torch.randn(w, case.columns, case.inner, generator=generator).half().share_memory_()
    out = shared(
        CALLS,
        w,
        case.rows if case.pattern == "matmul_reduce_scatter" else all_rows,
        case.columns,
        dtype=torch.float16,
        fill=float("nan"),
    )
    workspace = SharedWorkspace.of(
        w, 6 * all_rows * max(case.columns, case.inner), 2 * (case.parts + CALLS) * case.slices
    )
    run_ranks(w, _rank, workspace, a, b, out, case)
    for call in range(CALLS):
        for rank, expected in enumerate(exact(case.pattern, a[call], b, case.bias, case.average, case.rows)):
            assert torch.allclose(out[call, rank].double(), expected, rtol=2e-2, atol=5e-2), (call, rank)


@pytest.mark.parametrize(
    ("pattern", "what", "slices", "pushers"),
    [
        ("all_gather_matmul", "rows", 1, 1),
        ("all_gather_matmul", "rows", 2, 1),
        ("matmul_reduce_scatter", "partial sums", 1, 1),
        ("matmul_all_reduce", "partial sums", 1, 1),
        ("matmul_all_reduce", "partial sums", 1, 0),
    ],
)
def test_a_peer_that_never_comes(pattern: str, what: str, slices: int, pushers: int) -> None:
    """All blocks of the kernel end. The next call raises an error that names the site and the peer, and runs
    nothing."""
    launch = SharedWorkspace.of(3, 20_000, 4).launch(0, patience_ns=20_000)
    a, b, p = (
        torch.zeros(48, 32).half(),
        torch.zeros(16, 32).half().t(),
        FusedParameters(2, pieces=1, pushers=pushers, slices=slices, slices_tiles=99, **SMALL_TILES),
    )
    function = getattr(fused, pattern)
    function(a, b, launch, p)
    with pytest.raises(
        TransferError,
        match=f"site site_7 of group 'tp' timed out waiting for {what} from rank 1: expected call 1, saw call 0",
    ):
        function(a, b, launch, p)
    assert launch.slot.calls.tolist() == [1]


@pytest.mark.parametrize("pattern", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_nothing_is_written_without_a_credit(pattern: str) -> None:
    """A peer is still in its previous call, so it has given no credit. This rank must not write into the peer's
    workspace, even if it has all signals for which its call waits."""
    workspace = SharedWorkspace.of(2, 20_000, 4)
    launch = workspace.launch(0, patience_ns=20_000)
    launch.slot.calls.fill_(1)
    workspace.flags[0, 2 * FLAG_WORDS :] = 2
    function = getattr(fused, pattern)
    a, b, p = (
        torch.zeros(32, 32).half(),
        torch.zeros(16, 32).half().t(),
        FusedParameters(2, pieces=1, pushers=1, **SMALL_TILES),
    )
    function(a, b, launch, p)
    with pytest.raises(
        TransferError,
        match="timed out waiting for permission to write into the workspace of rank 1: expected call 1, saw call 0",
    ):
        function(a, b, launch, p)
    assert (workspace.data[1] == 0x7E).all() and not workspace.flags[1, 2 * FLAG_WORDS :].any(), (
        "rows were written, or signalled"
    )


def test_a_call_raises_after_the_group_was_aborted() -> None:
    launch = SharedWorkspace.of(2, 20_000, 4).launch(0)
    launch.faults.abort()
    with pytest.raises(TransferError, match="was aborted"):
        fused.all_gather_matmul(
            torch.zeros(32, 32).half(), torch.zeros(16, 32).half().t(), launch, CASES["gather, one block"].parameters(0)
        )


def test_unsupported_operands_are_refused() -> None:
    launch = SharedWorkspace.of(2, 4096, 2).launch(0)
    a, b, p = torch.zeros(32, 32).half(), torch.zeros(16, 32).half().t(), CASES["gather, one block"].parameters(0)
    with pytest.raises(UnsupportedError, match="fp16 or bf16"):
        fused.all_gather_matmul(a.float(), b.float(), launch, p)
    with pytest.raises(UnsupportedError, match="each of which begins at a multiple of 16 bytes"):
        fused.all_gather_matmul(a, torch.zeros(16, 64).half().t()[::2], launch, p)
    with pytest.raises(UnsupportedError, match="of 32 and of 12 elements"):
        fused.all_gather_matmul(a, b[:, :12], launch, p)
    with pytest.raises(UnsupportedError, match="expected a contiguous row of 16 elements"):
        fused.all_gather_matmul(a, b, launch, p, torch.zeros(4).half())
    with pytest.raises(UnsupportedError, match="expected it contiguous and aligned to 16 bytes"):
        fused.all_gather_matmul(a.t(), b, launch, p)
    with pytest.raises(UnsupportedError, match="its slot has 4096 and 2"):
        fused.all_gather_matmul(torch.zeros(64, 32).half(), b, launch, replace(p, parts=4))
    with pytest.raises(UnsupportedError, match="3 rows cannot be cut"):
        fused.matmul_reduce_scatter(a[:3], b, launch, p)
    with pytest.raises(UnsupportedError, match="the product has 2 tiles, but the slot has words for only 1"):
        fused.matmul_all_reduce(a, b, replace(launch, slot=replace(launch.slot, tiles=launch.slot.tiles[:1])), p)
    with pytest.raises(UnsupportedError, match="64 ranks; expected at most 63"):
        fused.matmul_reduce_scatter(torch.zeros(64, 32).half(), b, replace(launch, world_size=64), p)
