"""Every schedule against the plain computation in fp64, by gloo in several processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.fake_group import all_gather
from tests.fake_group import reduce_scatter
from tests.numerics.interpreted import interpreted
from tests.numerics.ranks import compile_anew
from tests.numerics.ranks import run_ranks

all_reduce = funcol.all_reduce


def _evened(x: torch.Tensor, dim: int, world_size: int) -> torch.Tensor:
    """Zeros appended to make ``world_size`` chunks of ``dim``, as DTensor does: each short chunk is padded alone."""
    chunk = -(-x.shape[dim] // world_size)
    if x.shape[dim] == world_size * chunk:
        return x
    pieces = list(x.split(chunk, dim))
    pieces += [x.narrow(dim, 0, 0)] * (world_size - len(pieces))
    behind = [0, 0] * (x.dim() - 1 - dim)
    return torch.cat(
        [torch.nn.functional.pad(p, [*behind, 0, chunk - p.shape[dim]]) if p.shape[dim] < chunk else p for p in pieces],
        dim,
    )


def _cases(world_size: int, size: int) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    """``name: (function, input shapes, sites that must be overlapped)``; ``size`` is a shard's row count."""
    g = dist.group.WORLD
    w, s = world_size, size
    return {
        "gather rows": (lambda x, a: torch.relu(all_gather(x, 0, g) @ a), [(s, 16), (16, 12)], 1),
        "gather rows, two matmuls, one with bias, gathered used": (
            lambda x, a, b, c: (lambda y: (y @ a, torch.addmm(c, y, b), y + 1))(all_gather(x, 0, g)),
            [(s, 16), (16, 12), (16, 6), (6,)],
            1,
        ),
        "gather sequence, batch 1": (lambda x, a: all_gather(x, 1, g) @ a, [(1, s, 16), (16, 12)], 1),
        "gather sequence, batch 2": (lambda x, a: all_gather(x, 1, g) @ a, [(2, s, 16), (16, 12)], 1),
        "gather the contracted dim": (lambda x, a: all_gather(x, 1, g) @ a, [(s, 8), (8 * w, 12)], 1),
        "dgrad and wgrad on one gather": (
            lambda x, y, a: (lambda z: (z @ a, z.t() @ y))(all_gather(x, 0, g)),
            [(s, 8), (s * w, 9), (8, 4)],
            1,
        ),
        "dgrad and wgrads of either side, batch 2": (
            lambda x, y, a: (lambda z: (z @ a, z.t() @ y, y.t() @ z))(all_gather(x, 1, g).reshape(-1, 8)),
            [(2, s, 8), (2 * s * w, 9), (8, 4)],
            1,
        ),
        "the contracted dim of either side, with bias": (
            lambda x, a, b, c: (lambda z: (torch.addmm(c, z, a), b @ z.t()))(all_gather(x * 3, 1, g)),
            [(s, 8), (8 * w, 12), (5, 8 * w), (12,)],
            1,
        ),
        "gathered columns as rows, and contracted": (
            lambda x, y, a: (lambda z: (z.t() @ y, z @ a))(all_gather(x, 1, g)),
            [(s, 8), (s, 9), (8 * w, 5)],
            1,
        ),
        "a gathered column on the left, and contracted": (
            lambda x, a, b: (lambda z: (a @ z, z @ b))(all_gather(x * 3, 0, g)),
            [(s, 1), (5, s * w), (1, 40)],
            1,
        ),
        "a gather of what is gathered, and of its shards beside each other": (
            lambda x, a, b: (lambda p, c: (p, c @ b, c.relu()))(
                *(lambda z: (a @ all_gather(z, 0, g), torch.cat(z.chunk(w), 1)))(all_gather(x, 0, g))
            ),
            [(s, 3), (5, s * w * w), (3 * w, 6)],
            2,
        ),
        "gather columns on the right": (lambda x, a: (a * 2) @ all_gather(x * 3, 0, g).t(), [(s, 8), (5, 8)], 1),
        "cast and activation behind the gather": (
            lambda x, a: torch.nn.functional.silu(all_gather(x, 0, g) * 2) @ a,
            [(s, 8), (8, 5)],
            1,
        ),
        "bmm": (lambda x, a: torch.bmm(all_gather(x, 1, g), a), [(3, s, 8), (3, 8, 5)], 1),
        "baddbmm of gathered rows": (
            lambda x, a, c: torch.baddbmm(c, all_gather(x, 1, g), a),
            [(3, s, 8), (3, 8, 5), (3, 1, 5)],
            1,
        ),
        "baddbmm of a gathered contracted dim": (
            lambda x, a, c: torch.baddbmm(c, all_gather(x, 2, g), a),
            [(3, s, 8), (3, 8 * w, 5), (3, s, 5)],
            1,
        ),
        "gated MLP, piece by piece": (
            lambda x, a, b, c: (lambda z: torch.nn.functional.silu(torch.addmm(c, z, a)) * (z @ b))(
                all_gather(x, 0, g)
            ),
            [(s, 8), (8, 5), (8, 5), (5,)],
            1,
        ),
        "gated MLP of a sequence, its halves kept": (
            lambda x, a, b: (lambda p, q: (p, q.double(), torch.nn.functional.gelu(p) * q))(
                *(lambda z: (z @ a, z @ b))(all_gather(x, 1, g))
            ),
            [(2, s, 8), (8, 5), (8, 5)],
            1,
        ),
        "scatter rows": (lambda x, a: reduce_scatter(x @ a, "sum", 0, g), [(s * w, 8), (8, 5)], 1),
        "scatter sequence, batch 2": (lambda x, a: reduce_scatter(x @ a, "sum", 1, g), [(2, s * w, 8), (8, 5)], 1),
        "scatter a sum of matmuls with bias": (
            lambda x, a, b, c: reduce_scatter(torch.addmm(c, x, a) + x @ b, "sum", 0, g),
            [(s * w, 8), (8, 5), (8, 5), (5,)],
            1,
        ),
        "scatter a sum of matmuls over a sequence, in fp64": (
            lambda x, a, b: reduce_scatter((x @ a + x @ b).double(), "sum", 1, g),
            [(2, s * w, 8), (8, 5), (8, 5)],
            1,
        ),
        "all-reduce in fp64 of rows that are no multiple of the ranks": (
            lambda x, a: all_reduce((x @ a).double(), "avg", g),
            [(s * w + 1, 8), (8, 5)],
            1,
        ),
        "all-reduce a sum of three matmuls, rows no multiple of the ranks": (
            lambda x, a, b, c: all_reduce(torch.addmm(c, x, a) + (x * 2) @ b + x.relu() @ a, "avg", g),
            [(s * w + 1, 8), (8, 5), (8, 5), (5,)],
            1,
        ),
        "scatter columns of a sum of matmuls": (
            lambda x, a, b: reduce_scatter(x @ a + x.relu() @ b, "sum", 1, g),
            [(7, 8), (8, s * w), (8, s * w)],
            1,
        ),
        "scatter the last dim": (lambda x, a: reduce_scatter(x @ a, "sum", 1, g), [(7, 8), (8, s * w)], 1),
        "all-reduce": (lambda x, a: all_reduce(x @ a, "sum", g) + 1, [(s * w, 8), (8, 5)], 1),
        "all-reduce of a result plus one": (lambda x, a: all_reduce(x @ a + 1, "sum", g), [(s * w, 8), (8, 5)], 1),
        "scatter a baddbmm's rows": (
            lambda x, a, c: reduce_scatter(torch.baddbmm(c, x, a), "sum", 1, g),
            [(3, s * w, 8), (3, 8, 5), (3, s * w, 5)],
            1,
        ),
        "all-reduce of a baddbmm": (
            lambda x, a, c: all_reduce(torch.baddbmm(c, x, a), "sum", g),
            [(3, s * w, 8), (3, 8, 5), (3, 1, 5)],
            1,
        ),
        "scatter an average over a sequence": (
            lambda x, a: reduce_scatter(x @ a, "avg", 1, g),
            [(2, s * w, 8), (8, 5)],
            1,
        ),
        "all-reduce, rows no multiple of the ranks": (
            lambda x, a: all_reduce(x @ a, "sum", g) + 1,
            [(1, s * w + 1, 8), (8, 5)],
            1,
        ),
        "two all-reduces added": (
            lambda x, a, b: all_reduce(x @ a, "sum", g) + all_reduce(x @ b, "sum", g),
            [(s, 8), (8, 5), (8, 5)],
            1,
        ),
        "three all-reduces added": (
            lambda x, a, b: (
                all_reduce(x @ a, "sum", g) + all_reduce(x @ b, "sum", g) + all_reduce(x @ (a * b), "sum", g)
            ),
            [(s, 8), (8, 5), (8, 5)],
            1,
        ),
        "scatter uneven rows": (
            lambda x, a: reduce_scatter(_evened(x @ a, 0, w), "sum", 0, g),
            [(max(s * w - 1, 2), 8), (8, 5)],
            1,
        ),
        "scatter an uneven sequence, batch 2, shards empty": (
            lambda x, a: reduce_scatter(_evened(x @ a, 1, w), "avg", 1, g),
            [(2, w + 1, 8), (8, 5)],
            1,
        ),
        "scatter uneven columns": (
            lambda x, a: reduce_scatter(_evened(x @ a, 1, w), "sum", 1, g),
            [(7, 8), (8, max(s * w - 1, 2))],
            1,
        ),
        "scatter uneven blocks of rows": (
            lambda x, a: reduce_scatter(_evened((x @ a).view(-1, 3, 5), 0, w), "sum", 0, g),
            [(3 * max(s * w - 1, 2), 8), (8, 5)],
            1,
        ),
        "gathered output": (lambda x, a: all_gather(x @ a, 1, g), [(s, 8), (8, 5)], 1),
    }


STATIC_ONLY = {
    "scatter uneven rows",
    "scatter an uneven sequence, batch 2, shards empty",
    "scatter uneven columns",
    "scatter uneven blocks of rows",
}
WITHOUT_LOOPING_OP = {
    "bmm",
    "baddbmm of gathered rows",
    "baddbmm of a gathered contracted dim",
    "scatter a baddbmm's rows",
    "all-reduce of a baddbmm",
    "all-reduce of a result plus one",
}


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _check(
    rank: int, world_size: int, fields: dict[str, Any], dtype: torch.dtype, names: list[str] | None, generated: bool
) -> list[str]:
    """Problems found on this rank; ``generated`` runs Inductor's code, else the rewritten graph is interpreted."""
    import overlap_inductor

    problems = []
    config = OverlapConfig(schedule="ring", **fields)
    compile_anew()
    for name in names or _cases(world_size, 4):
        reports: list[OverlapReport] = []
        # (Shards of one row cost as much time as any; one of the settings sees them.)
        for size in (6, 1) if not fields and world_size == 2 else (6,):
            torch._dynamo.reset()
            function, shapes, expected = _cases(world_size, size)[name]
            generator = torch.Generator().manual_seed(7 + rank)
            inputs = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
            exact = _tuple(function(*(i.double() for i in inputs)))
            if generated:
                with overlap_inductor.overlap(schedule="ring", **fields):
                    found = _tuple(torch.compile(function)(*inputs))
                reports = [r for r in [overlap_inductor.last_report()] if r is not None]
            else:
                reports.clear()
                found = _tuple(torch.compile(function, backend=interpreted(config, reports), dynamic=False)(*inputs))
            tolerance = 1e-4 if dtype == torch.float32 else 6e-2
            for e, f in zip(exact, found, strict=True):
                if (
                    f.dtype not in (dtype, torch.float64)
                    or f.shape != e.shape
                    or not torch.allclose(f.double(), e, rtol=tolerance, atol=tolerance * 4)
                ):
                    problems.append(f"{name} size {size}: off by {(f.double() - e).abs().max():.3g}")
            counts = reports[0].counters()
            if "step_node_budget" in fields and name in WITHOUT_LOOPING_OP:
                expected = 0
            if counts["sites_overlapped"] != expected:
                problems.append(f"{name} size {size}: {dict(counts)}, expected {expected} sites")
            if generated:
                break
    return problems


GENERATED = [
    "gather rows, two matmuls, one with bias, gathered used",
    "gather sequence, batch 1",
    "gather the contracted dim",
    "dgrad and wgrad on one gather",
    "bmm",
    "baddbmm of gathered rows",
    "gated MLP of a sequence, its halves kept",
    "scatter sequence, batch 2",
    "scatter a sum of matmuls with bias",
    "all-reduce of a baddbmm",
    "scatter an average over a sequence",
    "all-reduce, rows no multiple of the ranks",
    "two all-reduces added",
    "scatter uneven columns",
    "gathered output",
]


LOOPING_GATHERS = [
    "gather rows, two matmuls, one with bias, gathered used",
    "gather the contracted dim",
    "dgrad and wgrads of either side, batch 2",
    "the contracted dim of either side, with bias",
    "gathered columns as rows, and contracted",
    "a gathered column on the left, and contracted",
    "a gather of what is gathered, and of its shards beside each other",
    "gather columns on the right",
    "cast and activation behind the gather",
]


EVEN_RING = [
    "gather rows, two matmuls, one with bias, gathered used",
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
    "all-reduce, rows no multiple of the ranks",
    "gathered output",
]
"""What four ranks may do otherwise than three: in a ring of even length, both directions meet at one rank."""


@pytest.mark.parametrize(
    "world_size, fields, dtype, names, generated",
    [
        (2, {}, torch.float32, None, False),
        (2, {}, torch.float32, GENERATED, True),
        (3, {}, torch.bfloat16, None, False),
        (
            3,
            {"numerics": "allow_hop_rounding", "ring_direction": "bidirectional", "sub_chunks": 2},
            torch.float32,
            None,
            False,
        ),
        (3, {"step_node_budget": 1}, torch.float32, None, False),
        (2, {"step_node_budget": 1}, torch.bfloat16, LOOPING_GATHERS, True),
        (4, {"step_node_budget": 1, "ring_direction": "bidirectional"}, torch.bfloat16, LOOPING_GATHERS, False),
        (4, {"ring_direction": "bidirectional", "sub_chunks": 3}, torch.bfloat16, EVEN_RING, False),
    ],
    ids=[
        "2 ranks",
        "2 ranks, generated code",
        "3 ranks, bf16",
        "3 ranks, hop rounding, bidirectional",
        "3 ranks, looping ops",
        "2 ranks, looping gathers, generated code",
        "4 ranks, looping gathers, bf16",
        "4 ranks",
    ],
)
def test_every_pattern_agrees_with_fp64(
    world_size: int, fields: dict[str, Any], dtype: torch.dtype, names: list[str] | None, generated: bool
) -> None:
    """Catches a wrong slice, a lost remainder, a piece in a wrong place, a sum in the wrong dtype."""
    for rank, problems in enumerate(run_ranks(world_size, _check, fields, dtype, names, generated, timeout=500)):
        assert not problems, f"rank {rank}: {problems}"


def _dynamic(rank: int, world_size: int, fields: dict[str, Any], generated: bool) -> list[str]:
    """One compile of a site serves every token count; zero and one token are torch's own specialisations."""
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
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        reports: list[OverlapReport] = []
        with overlap_inductor.overlap(**dataclasses.asdict(config)) if generated else contextlib.nullcontext():
            compiled = (
                torch.compile(function) if generated else torch.compile(function, backend=interpreted(config, reports))
            )
            # The first count cuts every chunk to one row: a shape that must not be baked in.
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
    ("world_size", "fields", "generated"),
    [
        (2, {}, True),
        (3, {}, False),
        (3, {"numerics": "allow_hop_rounding", "ring_direction": "bidirectional", "sub_chunks": 3}, False),
    ],
    ids=["generated code", "3 ranks", "3 ranks, hop rounding, bidirectional"],
)
def test_dynamic_token_counts_share_one_compile(world_size: int, fields: dict[str, Any], generated: bool) -> None:
    """Catches a guard added by the pass, and a remainder lost where the token count is no multiple of the ranks."""
    for rank, problems in enumerate(run_ranks(world_size, _dynamic, fields, generated, timeout=500)):
        assert not problems, f"rank {rank}: {problems}"
