"""Ranks of one group that hold more and less of a dim, a bias or none: they run one plan, and their results are those
of the plain computation in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.fake_group import all_gather
from tests.fake_group import reduce_scatter
from tests.graph_text import waste
from tests.numerics.interpreted import interpreted
from tests.numerics.ranks import compile_anew
from tests.numerics.ranks import run_ranks


def _padded(x: torch.Tensor, dim: int, size: int, value: float = 0.0) -> torch.Tensor:
    """As DTensor does: nothing where the rank has all of it."""
    return x if x.shape[dim] == size else F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, size - x.shape[dim]], value=value)


def _cases(rank: int, world_size: int) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    """``name: (function, input shapes, sites that must be overlapped)``, each as ``rank`` has it: ``mine`` of ``total``
    rows or columns, in shards of ``chunk``."""
    g, w = dist.group.WORLD, world_size
    chunk, total = 5, 5 * w - 2
    mine = total - chunk * (w - 1) if rank == w - 1 else chunk
    tokens = 2 * (w + 1)

    def gathered(x: torch.Tensor, dim: int, value: float = 0.0) -> torch.Tensor:
        return all_gather(_padded(x, dim, chunk, value), dim, g).narrow(dim, 0, total)

    def joined(y: torch.Tensor, dim: int) -> torch.Tensor:
        return gathered(y, dim)

    def scattered(y: torch.Tensor, dim: int, op: str = "sum") -> torch.Tensor:
        # (A rank's own rows of the padded result.)
        pieces = [_padded(p, dim, chunk) for p in y.split(chunk, dim)]
        return reduce_scatter(torch.cat(pieces, dim), op, dim, g).narrow(dim, 0, mine)

    def biased(x: torch.Tensor, a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.addmm(c, x, a) if rank == 0 else x @ a

    return {
        "head": (lambda x, a: joined(x @ a, 1), [(tokens, 8), (8, mine)], 1),
        "head of a batch, with bias and activation": (
            lambda x, a, c: joined(F.gelu(F.linear(x, a, c)), 2) + 1,
            [(2, 3, 8), (mine, 8), (mine,)],
            1,
        ),
        "head of uneven rows": (lambda x, a: joined(x @ a, 0), [(mine, 8), (8, 6)], 1),
        "head of uneven rows of a batch": (lambda x, a: joined(x @ a, 1), [(2, mine, 8), (8, 6)], 1),
        "uneven K, a bias on one rank": (
            lambda x, a, c: funcol.all_reduce(biased(x, a, c), "sum", g),
            [(tokens + 1, mine), (mine, 6), (6,)],
            1,
        ),
        "uneven K, a bias of rows on one rank": (
            lambda x, a, c: funcol.all_reduce(biased(x, a, c), "sum", g),
            [(tokens, mine), (mine, 6), (tokens, 6)],
            1,
        ),
        "uneven K, a bias added on one rank": (
            lambda x, a, c: funcol.all_reduce(
                ((x @ a).view(2, -1, 6) + c if rank == 0 else (x @ a).view(2, -1, 6)), "sum", g
            ),
            [(tokens, mine), (mine, 6), (6,)],
            1,
        ),
        "uneven K, scattered": (
            lambda x, a, c: reduce_scatter(biased(x, a, c), "avg", 0, g),
            [(4 * w, mine), (mine, 6), (6,)],
            1,
        ),
        "uneven K into a column-wise gradient": (
            lambda x, y, a, b: funcol.all_reduce(x @ a + y @ b, "sum", g),
            [(tokens, mine), (tokens, mine), (mine, 6), (mine, 6)],
            1,
        ),
        "gather uneven rows, multiply and contract": (
            lambda x, y, a: (lambda z: (z @ a, z.t() @ y, y.t() @ z))(gathered(x, 0)),
            [(mine, 8), (total, 6), (8, 4 + rank)],
            1,
        ),
        "gather an uneven sequence, multiply and contract": (
            lambda x, y, a: (lambda z: (z @ a, z.t() @ y))(gathered(x, 1).reshape(-1, 8)),
            [(2, mine, 8), (2 * total, 6), (8, 4)],
            1,
        ),
        "gather uneven rows that are not numbers behind the last one": (
            lambda x, y, a: (lambda z: (z @ a, z.t() @ y))(gathered(x, 0, float("nan"))),
            [(mine, 8), (total, 6), (8, 4)],
            1,
        ),
        "gather uneven rows, a bias for each": (
            lambda x, a, c: torch.addmm(c, gathered(x, 0), a),
            [(mine, 8), (8, 4), (total, 4)],
            1,
        ),
        "gather uneven columns and contract": (lambda x, a: gathered(x, 1) @ a, [(6, mine), (total, 4)], 1),
        "gather uneven columns of the right": (lambda x, a: a @ gathered(x * 3, 0).t(), [(mine, 8), (6, 8)], 1),
        "bmm of uneven rows": (lambda x, a: torch.bmm(gathered(x, 1), a), [(3, mine, 8), (3, 8, 4)], 1),
        "bmm of an uneven contraction": (lambda x, a: torch.bmm(gathered(x, 2), a), [(3, 6, mine), (3, total, 4)], 1),
        "activation of uneven rows": (lambda x, a: F.silu(gathered(x, 1) + 1) @ a, [(2, mine, 8), (8, 4)], 1),
        "scatter a sum of matmuls to uneven rows": (
            lambda x, a, b: scattered(x @ a + (x * 2) @ b, 0),
            [(total, 8), (8, 6), (8, 6)],
            1,
        ),
        "scatter a sum of matmuls to an uneven sequence": (
            lambda x, a, b: scattered((x @ a + (x * 2) @ b).to(torch.float64), 1, "avg"),
            [(2, total, 8), (8, 6), (8, 6)],
            1,
        ),
    }


WITHOUT_LOOPING_OP = {
    "head of a batch, with bias and activation",
    "gather uneven rows, multiply and contract",
    "gather an uneven sequence, multiply and contract",
    "gather uneven rows that are not numbers behind the last one",
    "gather uneven rows, a bias for each",
    "gather uneven columns and contract",
    "bmm of uneven rows",
    "bmm of an uneven contraction",
}
GENERATED = [
    "head",
    "head of a batch, with bias and activation",
    "head of uneven rows of a batch",
    "uneven K, a bias on one rank",
    "gather an uneven sequence, multiply and contract",
    "gather uneven rows that are not numbers behind the last one",
    "scatter a sum of matmuls to uneven rows",
]


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _check(rank: int, world_size: int, fields: dict[str, Any], names: list[str] | None, generated: bool) -> list[str]:
    """Problems found on this rank; ``generated`` runs Inductor's code, else the rewritten graph is interpreted."""
    import overlap_inductor

    problems = []
    compile_anew()
    cases = _cases(rank, world_size)
    for name in names or cases:
        torch._dynamo.reset()
        function, shapes, expected = cases[name]
        generator = torch.Generator().manual_seed(7 + rank)
        inputs = [torch.randn(s, generator=generator, dtype=torch.float64).float() for s in shapes]
        exact = _tuple(function(*(i.double() for i in inputs)))
        reports: list[OverlapReport] = []
        if generated:
            with overlap_inductor.overlap(schedule="ring", **fields):
                found = _tuple(torch.compile(function)(*inputs))
            reports = [r for r in [overlap_inductor.last_report()] if r is not None]
        else:
            found = _tuple(
                torch.compile(
                    function, backend=interpreted(OverlapConfig(schedule="ring", **fields), reports), dynamic=False
                )(*inputs)
            )
        for e, f in zip(exact, found, strict=True):
            if f.shape != e.shape or not torch.allclose(f.double(), e, rtol=1e-4, atol=4e-4):
                problems.append(f"{name}: off by {(f.double() - e).abs().max():.3g}")
        problems += [f"{name}: {text}" for r in reports for text in waste(r)]
        if "step_node_budget" in fields and name in WITHOUT_LOOPING_OP:
            expected = 0
        if reports[0].counters()["sites_overlapped"] != expected:
            said = [f"{n.reason.code}: {n.reason.text}" for n in reports[0].near_misses] + [
                r.text for s in reports[0].sites for r in s.decision.reasons
            ]
            problems.append(f"{name}: {dict(reports[0].counters())}, expected {expected} sites; {said}")
    return problems


@pytest.mark.parametrize(
    "world_size, fields, names, generated",
    [
        (2, {}, None, False),
        (2, {"sub_chunks": 2}, GENERATED, True),
        (3, {"ring_direction": "bidirectional", "sub_chunks": 3}, None, False),
        (3, {"step_node_budget": 1}, None, False),
    ],
    ids=["2 ranks", "2 ranks, generated code", "3 ranks", "3 ranks, looping ops"],
)
def test_uneven_shards_are_overlapped(
    world_size: int, fields: dict[str, Any], names: list[str] | None, generated: bool
) -> None:
    """Catches ranks that find other sites or cut them otherwise, rows of one shard taken for another's, and padding
    that is summed."""
    for rank, problems in enumerate(run_ranks(world_size, _check, fields, names, generated, timeout=400)):
        assert not problems, f"rank {rank}: " + "\n".join(problems)
