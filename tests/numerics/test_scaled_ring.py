# SPDX-License-Identifier: Apache-2.0
"""fp8 sites (``_scaled_mm``) with schedule ``ring`` on gloo ranks, compared with fp64 matmuls of the dequantised
operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support import scaled_sites
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.ring_cases import as_tuple
from tests.support.scaled_sites import Input
from tests.support.scaled_sites import gather_bytes
from tests.support.scaled_sites import multiply

Case = tuple[Callable[..., Any], list[Input], int]


def _cases(world_size: int) -> dict[str, Case]:
    """``{name: (function, inputs, number of sites that must be overlapped)}``: the cases of ``scaled_sites``, and sites
    of several matmuls, each with its own scales."""
    g, w, s = dist.group.WORLD, world_size, 24
    one, columns = ("scale", ()), ("scale", (1, 48))
    several: dict[str, Case] = {
        "gather rows, two matmuls, tensor-wise": (
            lambda x, v, a, b, u, c, d: (lambda y: (multiply(y, v.t(), a, b), multiply(y, u.t(), c, d)))(
                gather_bytes(x, 0, g)
            ),
            [("fp8", (s, 32)), ("fp8", (48, 32)), one, one, ("fp8", (16, 32)), one, one],
            1,
        ),
        "gather rows, two matmuls, row-wise": (
            lambda x, v, a, b, u, c, d: (lambda y: (multiply(y, v.t(), a, b), multiply(y, u.t(), c, d)))(
                gather_bytes(x, 0, g)
            ),
            [
                ("fp8", (s, 32)),
                ("fp8", (48, 32)),
                ("scale", (s * w, 1)),
                columns,
                ("fp8", (16, 32)),
                ("scale", (s * w, 1)),
                ("scale", (1, 16)),
            ],
            1,
        ),
        "scatter a sum of matmuls, one row-wise": (
            lambda x, v, a, b, y, u, c, d: reduce_scatter(
                multiply(x, v.t(), a, b) + multiply(y, u.t(), c, d), "sum", 0, g
            ),
            [
                ("fp8", (s * w, 32)),
                ("fp8", (48, 32)),
                one,
                one,
                ("fp8", (s * w, 16)),
                ("fp8", (48, 16)),
                ("scale", (s * w, 1)),
                columns,
            ],
            1,
        ),
    }
    return scaled_sites.cases(world_size) | several


def _check(rank: int, world_size: int, fields: dict[str, Any], names: list[str] | None, generated: bool) -> list[str]:
    """Run the cases in ``names``, or all of them. Returns the problems on this rank.

    ``generated``: run Inductor's code. Otherwise the rewritten graph is interpreted.
    """
    compile_anew(kernels=False)
    problems = []
    for name in names or _cases(world_size):
        torch._dynamo.reset()
        function, inputs, expected = _cases(world_size)[name]
        tensors = scaled_sites.made(inputs, torch.Generator().manual_seed(7 + rank))
        exact = as_tuple(function(*(t.double() for t in tensors)))
        reports: list[OverlapReport] = []
        if generated:
            with overlap_inductor.overlap(schedule="ring", **fields):
                found = as_tuple(torch.compile(function)(*tensors))
            reports = [r for r in [overlap_inductor.last_report()] if r is not None]
        else:
            found = as_tuple(
                torch.compile(
                    function, backend=interpreted(OverlapConfig(schedule="ring", **fields), reports), dynamic=False
                )(*tensors)
            )
        for e, f in zip(exact, found, strict=True):
            # Rounding to fp8 and bf16 causes errors below this limit. A wrong scale causes errors above it.
            if f.shape != e.shape or not (f.double() - e).abs().max() <= 2e-2 * e.abs().max():
                problems.append(f"{name}: off by {(f.double() - e).abs().max():.3g} of {e.abs().max():.3g}")
        schedules = [p.schedule for r in reports for site in r.sites for p in site.decision.plan]
        if schedules != ["ring"] * expected:
            problems.append(
                f"{name}: {schedules}, {[(m.reason.code, m.reason.text) for r in reports for m in r.near_misses]}"
            )
    return problems


HOPS = {"numerics": "allow_hop_rounding", "ring_direction": "bidirectional", "sub_chunks": 2}
SAMPLE = [
    "gather rows and scales, row-wise",
    "gather rows, two matmuls, one with bias, gathered tensor read",
    "gather columns on the right, row-wise",
    "scatter an average with bias, tensor-wise",
    "scatter a sum of matmuls, one row-wise",
    "all-reduce of rows whose number W does not divide, row-wise",
    "an MLP, gathered and scattered, row-wise",
]
"""Cases of gathers, reduce-scatters and all-reduces, with scales of each kind."""
GENERATED = ["gather rows, two matmuls, row-wise", "scatter a sum of matmuls, one row-wise", "all-reduce, tensor-wise"]


@pytest.mark.parametrize(
    ("world_size", "fields", "names", "generated"),
    [
        pytest.param(2, {}, None, False, marks=pytest.mark.thorough),
        (2, {"sub_chunks": 2}, GENERATED, True),
        (3, HOPS, SAMPLE, False),
        pytest.param(3, HOPS, None, False, marks=pytest.mark.thorough),
    ],
    ids=[
        "2 ranks",
        "2 ranks, generated code",
        "3 ranks, hop rounding, bidirectional",
        "3 ranks, hop rounding, bidirectional, all cases",
    ],
)
def test_cases_agree_with_fp64(
    world_size: int, fields: dict[str, Any], names: list[str] | None, generated: bool
) -> None:
    """Row-wise scales must be cut with the rows, and each matmul must use its own scale."""
    for rank, problems in enumerate(run_ranks(world_size, _check, fields, names, generated, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"
