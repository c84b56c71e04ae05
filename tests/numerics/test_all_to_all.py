# SPDX-License-Identifier: Apache-2.0
"""All-to-alls beside matmuls on gloo ranks. Every way to write such a site (``SPELLINGS``) is compared with fp64, and
so are layers of random shapes. Some layers are compared bit for bit with their matmuls run slice by slice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support import exchange_spellings
from tests.support.drawn import drawn
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted

SPELLINGS = exchange_spellings.SPELLINGS
LAYERS = ("rows", "columns", "experts", "sum", "arriving rows", "arriving columns", "arriving experts", "both")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def _compiled(function: Any, config: OverlapConfig, reports: list[OverlapReport], **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=interpreted(config, reports), **{"dynamic": False, **options})


def _problems(
    what: str, pairs: list[tuple[str, Any, Any]], tolerance: float, reports: list[OverlapReport]
) -> list[str]:
    found = [f"{what}: {text}" for r in reports for text in (*waste(r), *r.notices)]
    for name, a, b in pairs:
        if a is None or a.shape != b.shape or (a.double() - b).abs().max() > tolerance * max(1.0, float(b.abs().max())):
            found.append(f"{what}: {name} is {a if a is None else a.double() - b} off")
    return found


def _every_spelling(rank: int, world_size: int, budget: int) -> list[str]:
    problems = []
    config = OverlapConfig(schedule="ring", sub_chunks=2, step_node_budget=budget)
    for name, (function, makes, (pattern, *_)) in SPELLINGS.items():
        if budget == 1 and name in exchange_spellings.WITHOUT_LOOPING_OP:
            continue
        torch.manual_seed(rank)
        inputs = [make(world_size) for make in makes]
        reports: list[OverlapReport] = []
        with torch.no_grad():
            found = _compiled(function, config, reports)(*inputs)
            exact = function(*[i.double() for i in inputs])
        problems += _problems(name, [("output", found, exact)], 1e-5, reports)
        sites = [(s.facts.pattern, s.decision.status) for r in reports for s in r.sites]
        if sites != [(pattern, "overlapped")]:
            problems.append(f"{name}: {sites} {[s.decision.reasons for r in reports for s in r.sites]}")
    return problems


@pytest.mark.parametrize(
    ("world_size", "budget"),
    [
        (2, 4000),
        (2, 1),
        pytest.param(3, 4000, marks=pytest.mark.thorough),
        pytest.param(4, 1, marks=pytest.mark.thorough),
    ],
)
def test_every_spelling(world_size: int, budget: int) -> None:
    """Slices must be computed, sent and placed in the right order. With a budget of one node, looping ops run, and
    spellings without a looping op are left out."""
    for rank, problems in enumerate(run_ranks(world_size, _every_spelling, budget, timeout=500)):
        assert not problems, f"rank {rank}: {problems}"


def _layer(kind: str, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A layer of ``x [t, k]``, ``w [k, n]`` and ``v [n, k]``. In a layer of experts, they have a leading dim ``e``.
    ``t``, ``n`` and ``e`` are multiples of the number of ranks."""
    ranks, exchange = dist.get_world_size(), exchange_spellings.exchange
    if kind in ("rows", "experts"):
        return exchange(x @ w)
    if kind == "columns":
        return exchange((x @ w).unflatten(1, (ranks, -1)).transpose(0, 1).contiguous())
    if kind == "sum":
        return exchange(x @ w + x.relu() @ (v.t() * 2))
    if kind == "arriving columns":
        return exchange((x @ w).tanh()).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1) @ _tall(v, ranks)
    arrived = exchange(x.tanh())
    return exchange(arrived @ w) @ v if kind == "both" else arrived @ w


def _tall(v: torch.Tensor, ranks: int) -> torch.Tensor:
    return torch.cat([v * (i + 1) for i in range(ranks)])


def _draws(rank: int, world_size: int, examples: int) -> tuple[int, list[str]]:
    """``(number of examples, problems)`` of this rank."""
    problems: list[str] = []
    count = 0

    @drawn(
        examples,
        layer=st.sampled_from(LAYERS),
        tokens=st.integers(0, 6),
        k=st.integers(1, 9),
        n=st.integers(1, 5),
        e=st.integers(1, 2),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        sub_chunks=st.integers(1, 4),
        step_node_budget=st.sampled_from([8000, 1]),
    )
    def check(layer: str, tokens: int, k: int, n: int, e: int, dtype: torch.dtype, **fields: Any) -> None:
        nonlocal count
        count += 1
        shapes: list[tuple[int, ...]] = [(tokens * world_size, k), (k, n * world_size), (n * world_size, k)]
        if "experts" in layer:
            shapes = [(e * world_size, *shape) for shape in shapes]
        generator = torch.Generator().manual_seed(rank)
        inputs = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
        given_, exact_ = ([i.to(t, copy=True).requires_grad_() for i in inputs] for t in (dtype, torch.float64))
        reports: list[OverlapReport] = []
        config = OverlapConfig(schedule="ring", sequence_parallel="off", **fields)
        found = _compiled(_layer, config, reports)(layer, *given_)
        exact = _layer(layer, *exact_)
        found.backward(torch.ones_like(found))
        exact.backward(torch.ones_like(exact))
        pairs = [("output", found, exact)]
        pairs += [
            (f"gradient {i}", a.grad, b.grad) for i, (a, b) in enumerate(zip(given_, exact_)) if b.grad is not None
        ]
        what = f"{layer} {shapes} {dtype} {fields}"
        if tokens:
            problems.extend(_problems(what, pairs, TOLERANCE[dtype], reports))
        looped = fields["step_node_budget"] == 1 and "experts" in layer
        overlapped = sum(s.decision.status == "overlapped" for r in reports for s in r.sites)
        # A matrix of one row or column may be computed without a matmul.
        if not overlapped and not looped and min(tokens * world_size, k, n) > 1:
            reasons = [m.reason.text for r in reports for m in r.near_misses]
            problems.append(f"{what}: nothing is overlapped; {reasons}")

    check()
    return count, problems


@pytest.mark.parametrize(
    ("world_size", "examples"),
    [
        pytest.param(2, 16, marks=pytest.mark.thorough),
        (3, 4),
        pytest.param(3, 12, marks=pytest.mark.thorough),
        pytest.param(4, 4, marks=pytest.mark.thorough),
    ],
)
def test_drawn_layers(world_size: int, examples: int) -> None:
    """Catches a shape, dtype or switch at which a slice is wrong, in forward or backward. Layers without tokens must
    run, but are not compared."""
    results = run_ranks(world_size, _draws, examples, timeout=500)
    assert {count for count, _ in results} == {examples}
    for rank, (_, problems) in enumerate(results):
        assert not problems, f"rank {rank}: {problems}"


def _bit_for_bit(rank: int, world_size: int, budget: int) -> list[str]:
    """The names of the layers whose result differs in any bit from the expected one. Matmuls that run slice by slice,
    and one collective, give the expected result."""
    config = OverlapConfig(schedule="ring", sub_chunks=1, step_node_budget=budget)
    torch.manual_seed(rank)
    x, w = torch.randn(24 * world_size, 16), torch.randn(16, 16 * world_size)

    def run(function: Any) -> torch.Tensor:
        with torch.no_grad():
            return _compiled(function, config, [])(x, w)

    def moved(slices: list[torch.Tensor]) -> torch.Tensor:
        out = torch.empty_like(torch.stack(slices))
        dist.all_to_all_single(out, torch.stack(slices))
        return out

    rows = [part @ w for part in x.chunk(world_size)]
    columns = [x @ part for part in w.chunk(world_size, 1)]
    arrived = moved(list(x.chunk(world_size)))
    parts = w.t().chunk(world_size)
    total = arrived[rank] @ parts[rank]
    for r in ((rank - i) % world_size for i in range(1, world_size)):
        total = torch.addmm(total, arrived[r], parts[r])
    exchange = exchange_spellings.exchange
    expected = {
        "rows": (lambda x, w: exchange(x @ w), moved(rows).flatten(0, 1)),
        "columns": (lambda x, w: _layer("columns", x, w, w), moved(columns)),
        "arriving rows": (lambda x, w: exchange(x) @ w, torch.cat([part @ w for part in arrived])),
        "arriving columns": (
            lambda x, w: exchange(x).unflatten(0, (world_size, -1)).transpose(0, 1).flatten(1) @ w.t(),
            total,
        ),
    }
    return [name for name, (function, exact) in expected.items() if not torch.equal(run(function), exact)]


@pytest.mark.parametrize("budget", [4000, pytest.param(1, marks=pytest.mark.thorough)])
def test_equal_bit_for_bit_to_the_same_matmuls_slice_by_slice(budget: int) -> None:
    """A slice must be computed by a matmul of its own shape. Products must be added in the order in which slices
    arrive."""
    assert run_ranks(3, _bit_for_bit, budget, timeout=300) == [[]] * 3
