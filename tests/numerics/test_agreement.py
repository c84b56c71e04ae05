# SPDX-License-Identifier: Apache-2.0
"""Compares schedule ``ring`` with the plain computation in fp64, on several gloo processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.padded_matmuls import padded_matmuls
from tests.support.ring_cases import WITHOUT_LOOPING_OP
from tests.support.ring_cases import as_tuple
from tests.support.ring_cases import cases
from tests.support.together import batches
from tests.support.together import run_together


def _check(
    rank: int, world_size: int, fields: dict[str, Any], dtype: torch.dtype, names: list[str] | None, generated: bool
) -> list[str]:
    """Run the cases in ``names``, or all cases if ``names`` is ``None``. Returns the problems on this rank.

    ``generated``: run Inductor's code. Otherwise the rewritten graph is interpreted.
    """
    problems = []
    compile_anew()
    # With ``step_node_budget``, sites without a looping op are refused. Only the first case with such a site runs.
    refused = sorted(WITHOUT_LOOPING_OP)[1:] if "step_node_budget" in fields else []
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    sizes = {name: [6] for name in names or cases(world_size, 4) if name not in refused}
    if not fields and world_size == 2 and not generated:
        # Shards of one row take as much time as larger shards. So they run in one setting only, for a sample of the
        # cases.
        sizes = {name: [6, 1] if name in SAMPLE else [6] for name in sizes}
    for size in (6, 1):
        for batch in batches(name for name in sizes if size in sizes[name]):
            made = [cases(world_size, size)[name] for name in batch]
            generator = torch.Generator().manual_seed(7 + rank)
            inputs = [
                [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
                for _, shapes, _ in made
            ]
            functions = [function for function, _, _ in made]
            results, report = run_together(functions, inputs, generated, **fields)
            for name, function, own, found in zip(batch, functions, inputs, results, strict=True):
                for e, f in zip(as_tuple(function(*(i.double() for i in own))), as_tuple(found), strict=True):
                    if (
                        f.dtype not in (dtype, torch.float64)
                        or f.shape != e.shape
                        or not torch.allclose(f.double(), e, rtol=tolerance, atol=tolerance * 4)
                    ):
                        problems.append(f"{name} size {size}: off by {(f.double() - e).abs().max():.3g}")
            kept = WITHOUT_LOOPING_OP if "step_node_budget" in fields else ()
            expected = sum(sites for name, (_, _, sites) in zip(batch, made, strict=True) if name not in kept)
            counts = report.counters()
            if counts["sites_overlapped"] != expected:
                problems.append(f"{batch} size {size}: {dict(counts)}, expected {expected} sites")
    return problems


ROWS_LEFT = "all-reduce, rows no multiple of the ranks"
GENERATED = [
    "gather rows, two matmuls, one with bias, gathered tensor read",
    "gather the contracted dim",
    "bmm",
    "gated MLP of a sequence, its halves kept",
    "scatter a sum of matmuls with bias",
    ROWS_LEFT,
    "scatter uneven columns",
    "gathered output",
]
MORE_GENERATED = [
    "dgrad and wgrad on one gather",
    "scatter sequence, batch 2",
    "all-reduce of a baddbmm",
    "scatter an average over a sequence",
    "two all-reduces added",
]


LOOPING_GATHERS = [
    "gather rows, two matmuls, one with bias, gathered tensor read",
    "gather the contracted dim",
    "dgrad and wgrads of either side, batch 2",
    "the contracted dim of either side, with bias",
    "gathered columns as rows, and contracted",
    "a gathered column on the left, and contracted",
    "a gather of a gathered tensor, and its shards side by side",
    "gather columns on the right",
    "cast and activation behind the gather",
]


SAMPLE = [
    "gather rows, two matmuls, one with bias, gathered tensor read",
    "gather sequence, batch 2",
    "gather the contracted dim",
    "dgrad and wgrad on one gather",
    "dgrad and wgrads of either side, batch 2",
    "the contracted dim of either side, with bias",
    "gather columns on the right",
    "bmm",
    "baddbmm of a gathered contracted dim",
    "all-reduce of a baddbmm",
    "scatter sequence, batch 2",
    "scatter the last dim",
    "scatter an uneven sequence, batch 2, shards empty",
    ROWS_LEFT,
    "gathered output",
]
"""Some of the cases of ``ring_cases``. They run in settings for which a sample is enough, for example bf16, padding, or
an even number of ranks. (In a ring of an even number of ranks, both directions meet at one rank.)"""


@pytest.mark.parametrize(
    "world_size, fields, dtype, names, generated",
    [
        pytest.param(2, {}, torch.float32, None, False, marks=pytest.mark.thorough),
        (2, {"sub_chunks": 2}, torch.float32, GENERATED, True),
        pytest.param(2, {}, torch.float32, MORE_GENERATED, True, marks=pytest.mark.thorough),
        pytest.param(3, {}, torch.bfloat16, SAMPLE, False, marks=pytest.mark.thorough),
        (
            3,
            {"numerics": "allow_hop_rounding", "ring_direction": "bidirectional", "sub_chunks": 2},
            torch.float32,
            SAMPLE,
            False,
        ),
        pytest.param(
            3,
            {"numerics": "allow_hop_rounding", "ring_direction": "bidirectional", "sub_chunks": 2},
            torch.float32,
            None,
            False,
            marks=pytest.mark.thorough,
        ),
        (2, {"step_node_budget": 1}, torch.float32, None, False),
        pytest.param(3, {"step_node_budget": 1}, torch.float32, None, False, marks=pytest.mark.thorough),
        pytest.param(2, {"step_node_budget": 1}, torch.bfloat16, LOOPING_GATHERS, True, marks=pytest.mark.thorough),
        pytest.param(
            *(
                4,
                {"step_node_budget": 1, "ring_direction": "bidirectional"},
                torch.bfloat16,
                LOOPING_GATHERS[::2],
                False,
            ),
            marks=pytest.mark.thorough,
        ),
        (4, {"ring_direction": "bidirectional", "sub_chunks": 2}, torch.bfloat16, [*SAMPLE[::5], ROWS_LEFT], False),
    ],
    ids=[
        "2 ranks",
        "2 ranks, generated code",
        "2 ranks, generated code, more cases",
        "3 ranks, bf16",
        "3 ranks, hop rounding, bidirectional",
        "3 ranks, hop rounding, bidirectional, all cases",
        "2 ranks, looping ops",
        "3 ranks, looping ops",
        "2 ranks, looping gathers, generated code",
        "4 ranks, looping gathers, bf16",
        "4 ranks",
    ],
)
def test_cases_agree_with_fp64(
    world_size: int, fields: dict[str, Any], dtype: torch.dtype, names: list[str] | None, generated: bool
) -> None:
    """Catches a wrong slice, lost rows, a piece in a wrong place, and a sum in a wrong dtype."""
    for rank, problems in enumerate(run_ranks(world_size, _check, fields, dtype, names, generated, timeout=500)):
        assert not problems, f"rank {rank}: {problems}"


DYNAMIC_GENERATED = {
    "gather",
    "all-reduce of what has a bias",
    "gathered output",
    "gather the contracted dim",
    "scatter sequence, batch 2",
}


HOPS = {"numerics": "allow_hop_rounding", "ring_direction": "bidirectional", "sub_chunks": 2}


def _is_generated(name: str) -> bool:
    return name in DYNAMIC_GENERATED


def _is_not_generated(name: str) -> bool:
    return name not in DYNAMIC_GENERATED


def _dynamic(
    rank: int, world_size: int, fields: dict[str, Any], generated: bool, which: Callable[[str], bool]
) -> list[str]:
    """Compile once each function whose name ``which`` accepts, and call it with several token counts. Returns the
    problems on this rank. (No call has zero tokens or one token, because torch itself compiles again for these.)"""
    import overlap_inductor

    g = dist.group.WORLD
    compile_anew()
    problems = []
    config = OverlapConfig(schedule="ring", **fields)
    functions: dict[str, Callable[..., Any]] = {
        "gather": lambda x, a, b: all_gather(x, 0, g) @ a,
        "all-reduce": lambda x, a, b: all_reduce(x @ a, "sum", g),
        "all-reduce of what has a bias": lambda x, a, b: all_reduce(torch.addmm(b, x, a), "sum", g),
        "gathered output": lambda x, a, b: all_gather(x @ a, 1, g),
        "scatter": lambda x, a, b: reduce_scatter(x.repeat(g.size(), 1) @ a, "sum", 0, g),
        "gather the contracted dim": lambda x, a, b: all_gather(x, 1, g) @ a.repeat(g.size(), 1),
        "gather columns on the right": lambda x, a, b: a.t() @ all_gather(x * 3, 0, g).t(),
        "gather sequence, batch 2": lambda x, a, b: all_gather(torch.stack([x, x + 1]), 1, g) @ a,
        "scatter sequence, batch 2": lambda x, a, b: reduce_scatter(
            torch.stack([x, x + 1]).repeat(1, g.size(), 1) @ a, "sum", 1, g
        ),
        "scatter the last dim": lambda x, a, b: reduce_scatter(x @ a.repeat(1, g.size()), "sum", 1, g),
    }
    generator = torch.Generator().manual_seed(rank)
    weight, bias = torch.randn(16, 8, generator=generator), torch.randn(8, generator=generator)
    for name, function in functions.items():
        if not which(name):
            continue
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        reports: list[OverlapReport] = []
        with overlap_inductor.overlap(**dataclasses.asdict(config)) if generated else contextlib.nullcontext():
            compiled = (
                torch.compile(function) if generated else torch.compile(function, backend=interpreted(config, reports))
            )
            # At the first token count, pieces may have one row. The graph must not fix this size.
            for tokens in (8, 7, 12, 2, 33, 100):
                x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(rank + tokens))
                torch._dynamo.mark_dynamic(x, 0)
                exact = function(x.double(), weight.double(), bias.double())
                error = (compiled(x, weight, bias).double() - exact).abs().max().item()
                if error > 1e-3:
                    problems.append(f"{name} {tokens} tokens: off by {error}")
            reports = reports or [r for r in [overlap_inductor.last_report()] if r is not None]
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        overlapped = [r.counters()["sites_overlapped"] for r in reports]
        if graphs != 1 or overlapped != [1]:
            problems.append(f"{name}: {graphs} graphs, {overlapped} sites overlapped; {[r.notices for r in reports]}")
    return problems


@pytest.mark.parametrize(
    ("world_size", "fields", "generated", "which"),
    [
        (2, {"sub_chunks": 2}, True, _is_generated),
        (3, HOPS, False, _is_not_generated),
        pytest.param(3, HOPS, False, _is_generated, marks=pytest.mark.thorough),
    ],
    ids=["generated code", "3 ranks, hop rounding, bidirectional", "3 ranks, functions of the generated code"],
)
def test_dynamic_token_counts_share_one_compile(
    world_size: int, fields: dict[str, Any], generated: bool, which: Callable[[str], bool]
) -> None:
    """The pass must add no guard. No rows may be lost if the ranks do not divide the token count."""
    for rank, problems in enumerate(run_ranks(world_size, _dynamic, fields, generated, which, timeout=500)):
        assert not problems, f"rank {rank}: {problems}"


def _first_rank_pads(rank: int, world_size: int) -> list[str]:
    with padded_matmuls(rank == 0):
        return _check(rank, world_size, {"sub_chunks": 2}, torch.float32, SAMPLE[::3], False)


def test_one_rank_pads_its_matmuls() -> None:
    """Inductor measures on each rank whether padded matmuls are faster, so it may pad on one rank only. Plans and sites
    must not depend on this."""
    for rank, problems in enumerate(run_ranks(2, _first_rank_pads, timeout=300)):
        assert not problems, f"rank {rank}: {problems}"
