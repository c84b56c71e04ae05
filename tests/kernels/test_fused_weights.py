# SPDX-License-Identifier: Apache-2.0
"""One launch multiplies a gathered tensor by several weights. Ranks are processes that share memory, and kernels run in
Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.lowerings.fused import calls as fused
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.parameters import in_one_launch
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared
from tests.support.shared_memory import SMALL_TILES

CALLS = 2


@dataclass(frozen=True)
class Case:
    """Calls with one set of weights.

    Attributes:
        widths: columns of each weight.
        biases: one character for each weight: ``b`` if it has a bias, else ``-``.
        rows: rows of a shard.
        in_rows: the weights are row-major, not transposed.
        keep: the gathered tensor is read after the kernel, so the kernel does not end the call.
    """

    world_size: int
    widths: tuple[int, ...]
    biases: str
    rows: int = 24
    inner: int = 32
    in_rows: bool = False
    keep: bool = False


CASES = {
    "two, gate and up": Case(2, (32, 32), "--"),
    "three of different widths, no multiples of a tile": Case(3, (40, 8, 24), "-b-"),
    "four, all with bias, in rows": Case(2, (16, 24, 8, 40), "bbbb", in_rows=True),
    "two, rows that are no multiple of a tile, gathered tensor read": Case(
        2, (8, 24), "b-", rows=20, inner=40, keep=True
    ),
}


def _rank(
    rank: int, workspace: SharedWorkspace, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, case: Case
) -> None:
    launch, parameters = workspace.launch(rank), FusedParameters(2, parts=2, pieces=2, pushers=1, **SMALL_TILES)
    weights = [w.contiguous().t() for w in b[rank].split(case.widths)]
    biases = [w[0].contiguous() if letter == "b" else None for w, letter in zip(weights, case.biases, strict=True)]
    weights = [w.contiguous() for w in weights] if case.in_rows else weights
    for call in range(CALLS):
        found = fused.all_gather_matmuls(a[call, rank], weights, launch, parameters, biases, case.keep)
        assert [tuple(f.shape) for f in found] == [(case.world_size * case.rows, width) for width in case.widths]
        out[call, rank] = torch.cat(found, 1)
        if case.keep:
            assert torch.equal(fused.gathered(a[call, rank], launch), a[call].flatten(0, 1))
            fused.end(launch)
        assert not launch.slot.queues.any() and launch.slot.calls.tolist() == [call + 1]
        launch.faults.check()


@pytest.mark.parametrize("name", CASES)
def test_each_weight_agrees_with_fp64(name: str) -> None:
    case = CASES[name]
    w, columns = case.world_size, sum(case.widths)
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(CALLS, w, case.rows, case.inner, generator=generator).half().share_memory_()
    b = torch.randn(w, columns, case.inner, generator=generator).half().share_memory_()
    out = shared(CALLS, w, w * case.rows, columns, dtype=torch.float16, fill=float("nan"))
    run_ranks(w, _rank, SharedWorkspace.of(w, 2 * w * case.rows * case.inner, 2), a, b, out, case)
    biased = torch.cat([torch.full((width,), letter == "b") for width, letter in zip(case.widths, case.biases)])
    for call in range(CALLS):
        for rank in range(w):
            expected = a[call].flatten(0, 1).double() @ b[rank].double().t() + biased * b[rank, :, 0].double()
            assert torch.allclose(out[call, rank].double(), expected, rtol=2e-2, atol=5e-2), (call, rank)


def test_mixed_layouts_and_too_many_or_no_weights_are_refused() -> None:
    launch = SharedWorkspace.of(2, 4096, 2).launch(0)
    a, b, p = torch.zeros(32, 32).half(), torch.zeros(16, 32).half().t(), FusedParameters(1, **SMALL_TILES)
    for weights in ([b, b.contiguous()], [b] * 5, []):
        with pytest.raises(UnsupportedError, match="1 to 4 weights of one layout"):
            fused.all_gather_matmuls(a, weights, launch, p, [None] * len(weights))


def test_the_widest_weights_of_one_layout_share_a_launch() -> None:
    def weights(*widths: int) -> list[torch.Tensor]:
        """A weight for each width. A negative width means a transposed weight."""
        return [torch.empty(16, n) if n > 0 else torch.empty(-n, 16).t() for n in widths]

    assert in_one_launch(weights(64)) == [0]
    assert in_one_launch(weights(-64, -8, -8)) == [0, 1, 2]
    assert in_one_launch(weights(64, -40, -32)) == [1, 2]
    assert in_one_launch(weights(8, 16, 24, 32, 40)) == [1, 2, 3, 4]
