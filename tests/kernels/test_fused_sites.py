"""Schedules ``fused`` and ``chunked`` from the model to the kernels: the rewritten graph between processes, its kernels
in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.fake_group import all_gather
from tests.fake_group import reduce_scatter
from tests.kernels.shared_memory import use_shared_memory
from tests.numerics.interpreted import interpreted
from tests.numerics.ranks import run_ranks
from tests.numerics.test_agreement import _evened
from tests.numerics.test_agreement import _tuple

all_reduce = funcol.all_reduce
CALLS = 2


def cases(w: int, factor: int = 1) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    """``name: (function, input shapes, sites that a fused kernel must serve)``; ``factor`` makes all sizes larger."""
    return _larger(_cases(w), factor)


def _larger(
    found: dict[str, tuple[Any, list[tuple[int, ...]], int]], factor: int
) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    return {
        name: (function, [tuple(n * factor if n > 2 else n for n in shape) for shape in shapes], sites)
        for name, (function, shapes, sites) in found.items()
    }


def _cases(w: int) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    g, s = dist.group.WORLD, 24
    return {
        "gather rows": (lambda x, a: torch.relu(all_gather(x, 0, g) @ a), [(s, 16), (16, 24)], 1),
        "gather rows, two matmuls, one with bias, gathered used": (
            lambda x, a, b, c: (lambda y: (y @ a.t(), torch.addmm(c, y, b), y + 1))(all_gather(x, 0, g)),
            [(s, 16), (24, 16), (16, 8), (8,)],
            1,
        ),
        "gather rows, six weights, five that lie alike": (
            lambda x, a, b, c: (
                lambda y: (y @ a.t(), y @ b.t(), y @ (a + 1).t(), y @ (b + 1).t(), y @ (b + 2).t(), y @ c)
            )(all_gather(x, 0, g)),
            [(s, 16), (24, 16), (8, 16), (16, 40)],
            1,
        ),
        "gather rows, and a weight's gradient": (
            lambda x, a, h: (lambda y: (y @ a, y.t() @ h, torch.mm(h.t(), y)))(all_gather(x, 0, g)),
            [(s, 16), (16, 24), (s * w, 8)],
            1,
        ),
        "gather sequence, batch 2, and a weight's gradient": (
            lambda x, a, h: (lambda y: (torch.relu(y @ a), y.flatten(0, 1).t() @ h))(all_gather(x, 1, g)),
            [(2, s, 16), (16, 24), (2 * s * w, 8)],
            1,
        ),
        "gather sequence, batch 1": (lambda x, a: all_gather(x, 1, g) @ a, [(1, s, 16), (16, 24)], 1),
        "gather sequence, batch 2": (lambda x, a: all_gather(x, 1, g) @ a, [(2, s, 16), (16, 24)], 1),
        "gather an uneven sequence, batch 2": (
            lambda x, a: torch.relu(all_gather(x, 1, g)[:, : s * w - 3].reshape(-1, 16) @ a),
            [(2, s, 16), (16, 24)],
            1,
        ),
        "gather columns on the right": (lambda x, a: (a * 2) @ all_gather(x * 3, 0, g).t(), [(s, 16), (8, 16)], 1),
        "scatter rows": (lambda x, a: reduce_scatter(x @ a, "sum", 0, g), [(s * w, 16), (16, 24)], 1),
        "scatter an average with bias": (
            lambda x, a, b: reduce_scatter(torch.addmm(b, x, a.t()), "avg", 0, g),
            [(s * w, 16), (24, 16), (24,)],
            1,
        ),
        "scatter sequence, batch 2": (lambda x, a: reduce_scatter(x @ a, "sum", 1, g), [(2, s * w, 16), (16, 8)], 1),
        "scatter the last dim": (lambda x, a: reduce_scatter(x @ a, "sum", 1, g), [(8, 16), (16, s * w)], 1),
        "scatter uneven rows": (
            lambda x, a: reduce_scatter(_evened(x @ a, 0, w), "sum", 0, g),
            [(s * w - 1, 16), (16, 8)],
            1,
        ),
        "all-reduce": (lambda x, a: all_reduce(x @ a, "sum", g) + 1, [(s * w, 16), (16, 24)], 1),
        "all-reduce, batch 1, with bias": (
            lambda x, a, b: all_reduce(torch.nn.functional.linear(x, a, b), "sum", g),
            [(1, s * w, 16), (8, 16), (8,)],
            1,
        ),
        "all-reduce of rows that do not fall evenly": (
            lambda x, a: all_reduce(x @ a, "sum", g),
            [(s * w - 1, 16), (16, 24)],
            1,
        ),
        "operands that begin in the middle of 16 bytes": (
            lambda x, a: all_gather(x.view(-1)[4 : 4 - x.shape[1]].view(-1, x.shape[1]), 0, g) @ a[:, 4:-4],
            [(s + 1, 16), (16, 32)],
            1,
        ),
        "a bias with gaps, a bias of one element": (
            lambda x, a, b: (lambda y: (torch.addmm(b[::2], y, a), torch.addmm(b[1:2], y, a + 1)))(all_gather(x, 0, g)),
            [(s, 16), (16, 24), (48,)],
            1,
        ),
        "all-reduce with a row, a residual and an activation": (
            lambda x, a, b, r: torch.sigmoid(r + all_reduce(x @ a, "sum", g) * b),
            [(2, s, 16), (16, 24), (24,), (2, s, 24)],
            1,
        ),
        "an MLP, gathered and scattered": (
            lambda x, a, b: x + reduce_scatter(torch.relu(all_gather(x, 0, g) @ a.t()) @ b.t(), "sum", 0, g),
            [(s, 16), (24, 16), (16, 24)],
            2,
        ),
    }


def sums(w: int, factor: int = 1) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    """As ``cases``: sums of matmuls, which are chunks' only. (Of matrices, without a batch, Inductor makes one matmul
    that is the other's bias.)"""
    g, s = dist.group.WORLD, 24
    linear = torch.nn.functional.linear
    pair = [(1, s * w, 16), (16, 24), (1, s * w, 40), (40, 24)]
    triple = [(1, s * w, 16), (16, 24), (1, s * w, 40), (24, 40), (1, s * w, 8), (8, 24)]
    return _larger(
        {
            "scatter a sum of two matrices": (
                lambda x, a, y, b: reduce_scatter(x @ a + y @ b, "sum", 0, g),
                [(s * w, 16), (16, 24), (s * w, 40), (40, 24)],
                1,
            ),
            "all-reduce a sum of three matrices, one with bias, rows that do not fall evenly": (
                lambda x, a, y, b, z, c, d: all_reduce(x @ a + torch.addmm(d, y, b) + z @ c, "avg", g),
                [(s * w - 1, 16), (16, 24), (s * w - 1, 40), (40, 24), (s * w - 1, 8), (8, 24), (24,)],
                1,
            ),
            "scatter a sum of two": (lambda x, a, y, b: reduce_scatter(x @ a + y @ b, "sum", 1, g), pair, 1),
            "scatter an average of three, one with bias": (
                lambda x, a, y, b, z, c, d: reduce_scatter(x @ a + linear(y, b, d) + z @ c, "avg", 1, g),
                [*triple, (24,)],
                1,
            ),
            "scatter a sum along the sequence, batch 2": (
                lambda x, a, y, b: reduce_scatter(x @ a + y @ b, "sum", 1, g),
                [(2, s * w, 16), (16, 8), (2, s * w, 24), (24, 8)],
                1,
            ),
            "scatter the last dim of a sum": (
                lambda x, a, y, b: reduce_scatter(x @ a + y @ b, "sum", 2, g),
                [(2, 8, 16), (16, s * w), (2, 8, 24), (24, s * w)],
                1,
            ),
            "all-reduce a sum of three": (
                lambda x, a, y, b, z, c: all_reduce(x @ a + y @ b.t() + z @ c, "sum", g),
                triple,
                1,
            ),
            "all-reduces that are added": (
                lambda x, a, y, b: all_reduce(x @ a, "sum", g) + all_reduce(y @ b, "sum", g),
                pair,
                1,
            ),
            "all-reduce a sum of rows that do not fall evenly": (
                lambda x, a, y, b: all_reduce(x @ a + y @ b, "sum", g),
                [(1, s * w - 1, 16), (16, 24), (1, s * w - 1, 40), (40, 24)],
                1,
            ),
        },
        factor,
    )


def _check(rank: int, world_size: int, folder: str, names: list[str] | None, schedule: str = "fused") -> list[str]:
    """Problems found on this rank."""
    use_shared_memory(folder)
    problems = []
    config = OverlapConfig(schedule=schedule, mode="strict")
    known = cases(world_size) | (sums(world_size) if schedule == "chunked" else {})
    for name in names or known:
        torch._dynamo.reset()
        function, shapes, expected = known[name]
        reports: list[OverlapReport] = []
        compiled = torch.compile(function, backend=interpreted(config, reports), dynamic=False)
        for call in range(CALLS):
            generator = torch.Generator().manual_seed(7 + rank + 100 * call)
            inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).half() for shape in shapes]
            exact = _tuple(function(*(i.double() for i in inputs)))
            found = _tuple(compiled(*inputs))
            for e, f in zip(exact, found, strict=True):
                if (
                    f.dtype != torch.float16
                    or f.shape != e.shape
                    or not torch.allclose(f.double(), e, rtol=2e-2, atol=5e-2)
                ):
                    problems.append(f"{name} call {call}: {tuple(f.shape)} off by {(f.double() - e).abs().max():.3g}")
        schedules = [p.schedule for r in reports for s in r.sites for p in s.decision.plan]
        if schedules != [schedule] * expected:
            problems.append(f"{name}: {schedules}, {[s.decision.reasons for r in reports for s in r.sites]}")
    return problems


def _check_token_counts(rank: int, world_size: int, folder: str) -> list[str]:
    use_shared_memory(folder)
    problems = []
    for name in ("gather rows", "scatter rows", "all-reduce"):
        torch._dynamo.reset()
        function, (left, right), _ = cases(world_size)[name]
        reports: list[OverlapReport] = []
        compiled = torch.compile(
            function, backend=interpreted(OverlapConfig(schedule="fused", mode="strict", max_tokens=100), reports)
        )
        b = torch.randn(right, generator=torch.Generator().manual_seed(rank)).half()
        # Fewer rows than a tile, than ranks, none, and more than were planned for, which run as they stood.
        for rows in (24, 7, 1, 0, 60):
            rows *= 1 if name == "gather rows" else world_size
            rows += name == "all-reduce" and rows > 0
            a = torch.randn(rows, left[1], generator=torch.Generator().manual_seed(7 * rank + rows)).half()
            torch._dynamo.mark_dynamic(a, 0) if rows > 1 else torch._dynamo.maybe_mark_dynamic(a, 0)
            exact, found = function(a.double(), b.double()), compiled(a, b)
            if found.shape != exact.shape or not torch.allclose(found.double(), exact, rtol=2e-2, atol=5e-2):
                problems.append(
                    f"{name} of {rows} rows: {tuple(found.shape)} off by"
                    f" {(found.double() - exact).abs().max() if found.shape == exact.shape else '?'}"
                )
        plans = [s.decision.moving for r in reports for s in r.sites]
        if (
            not any("max_tokens" in p.parameters for p in plans)
            or any(p.schedule != "fused" for p in plans)
            or len(plans) > 3
        ):
            problems.append(f"{name}: {plans}")
    return problems


def test_a_token_count_that_changes(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check_token_counts, str(tmp_path), timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


def test_every_pattern_agrees_with_fp64(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check, str(tmp_path), None, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


def test_three_ranks(tmp_path: Path) -> None:
    names = [
        "gather rows, two matmuls, one with bias, gathered used",
        "gather an uneven sequence, batch 2",
        "scatter uneven rows",
        "all-reduce",
    ]
    for rank, problems in enumerate(run_ranks(3, _check, str(tmp_path), names, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


def test_schedule_chunked(tmp_path: Path) -> None:
    """Sites of every layout, by another schedule of one op a site."""
    names = [
        "gather rows, two matmuls, one with bias, gathered used",
        "gather rows, and a weight's gradient",
        "gather sequence, batch 2, and a weight's gradient",
        "gather sequence, batch 2",
        "gather an uneven sequence, batch 2",
        "scatter uneven rows",
        "scatter the last dim",
        "all-reduce of rows that do not fall evenly",
        "an MLP, gathered and scattered",
    ]
    for rank, problems in enumerate(run_ranks(2, _check, str(tmp_path), names, "chunked", timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


def test_chunks_of_a_sum_of_matmuls(tmp_path: Path) -> None:
    """Backward of layers that read one tensor. A product of another chunk's rows, one left out, one added twice."""
    names = list(sums(2))
    for world_size, tried in ((2, names), (3, [names[1], names[3], names[6]])):
        (tmp_path / str(world_size)).mkdir()
        for rank, problems in enumerate(
            run_ranks(world_size, _check, str(tmp_path / str(world_size)), tried, "chunked", timeout=400)
        ):
            assert not problems, f"rank {rank} of {world_size}: {problems}"
