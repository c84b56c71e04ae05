# SPDX-License-Identifier: Apache-2.0
"""All-to-alls of uneven parts beside matmuls on gloo ranks, compared with fp64. Parts have random sizes and may be
empty. Their sizes are known at run time only, or are constants of each rank's graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.publish import all_reports
from overlap_inductor.report.report import OverlapReport
from tests.support import uneven_exchanges
from tests.support.drawn import drawn
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted

SENT, RECEIVED = "matmul_all_to_all", "all_to_all_matmul"


def _inputs(rank: int, rows: int, k: int, n: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """The inputs of a layer in ``dtype``, and the same inputs in fp64."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(rows, k), (k, n), (n, k), (n,)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [[i.to(t, copy=True).requires_grad_() for i in inputs] for t in (dtype, torch.float64)]


def _errors(name: str, compiled: Any, counts: Any, mine: list[torch.Tensor], exact: list[torch.Tensor]) -> list[str]:
    """What differs from fp64 in output and gradients."""
    found = compiled(name, counts, *mine)
    expected = uneven_exchanges.layer(name, counts, *exact)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    tolerance = 1e-4 if mine[0].dtype == torch.float32 else 1e-1
    pairs = [
        ("output", found, expected),
        *((f"gradient {i}", a.grad, b.grad) for i, (a, b) in enumerate(zip(mine, exact))),
    ]
    problems = []
    for what, a, b in pairs:
        a, b = (x if x is None else x.detach() for x in (a, b))
        if (a is None) != (b is None) or (a is not None and a.shape != b.shape):
            problems.append(f"{what} is {a}, expected {b}")
        elif a is not None and a.numel() and (a.double() - b).abs().max() > tolerance * max(1.0, float(b.abs().max())):
            problems.append(f"{what} is off by {(a.double() - b).abs().max():.3g} of {b.abs().max():.3g}")
    return problems


def _draws(rank: int, world_size: int, examples: int) -> tuple[int, list[str]]:
    """``(number of examples, problems)`` of this rank."""
    torch._dynamo.config.capture_scalar_outputs = True
    problems: list[str] = []
    count = 0
    part = st.one_of(st.just(0), st.integers(0, 6))

    @drawn(
        examples,
        name=st.sampled_from(sorted(uneven_exchanges.LAYERS)),
        parts=st.lists(part, min_size=world_size**2, max_size=world_size**2),
        constant=st.booleans(),
        k=st.integers(2, 9),
        n=st.integers(2, 5),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        sub_chunks=st.integers(1, 4),
    )
    def check(name: str, parts: list[int], constant: bool, k: int, n: int, dtype: torch.dtype, sub_chunks: int) -> None:
        nonlocal count
        count += 1
        sent, received = parts[rank * world_size : (rank + 1) * world_size], parts[rank::world_size]
        counts = (sent, received) if constant else torch.tensor(sent)
        reports: list[OverlapReport] = []
        torch._dynamo.reset()
        config = OverlapConfig(schedule="ring", sequence_parallel="off", sub_chunks=sub_chunks)
        backend = interpreted(config, reports, compared=True)
        compiled = torch.compile(uneven_exchanges.layer, backend=backend, dynamic=False)
        what = f"{name} {parts} {constant} {k} {n} {dtype} {sub_chunks}"
        found = _errors(name, compiled, counts, *_inputs(rank, sum(sent), k, n, dtype))
        problems.extend(f"{what}: {text}" for text in found)
        problems.extend(f"{what}: {text}" for r in reports for text in waste(r))
        # Some graphs rightly run without overlap. If sizes are constants and only one rank's parts are all of one size,
        # the plan of this rank differs. If a rank has fewer than two rows, torch computes its product without a matmul.
        if constant or min(sum(parts[r * world_size : (r + 1) * world_size]) for r in range(world_size)) < 2:
            return
        problems.extend(f"{what}: {text}" for r in reports for text in r.notices)
        # An exchange before a matmul in forward comes after a matmul in backward, and the reverse. So every layer has
        # both patterns.
        sites = {s.facts.pattern for r in reports for s in r.sites if s.decision.status == "overlapped"}
        if sites != {SENT, RECEIVED}:
            problems.append(f"{what}: {sites} {[m.reason.text for r in reports for m in r.near_misses]}")

    check()
    return count, problems


@pytest.mark.parametrize(
    ("world_size", "examples"),
    [
        pytest.param(2, 12, marks=pytest.mark.thorough),
        (3, 4),
        pytest.param(3, 12, marks=pytest.mark.thorough),
        pytest.param(4, 4, marks=pytest.mark.thorough),
    ],
)
def test_drawn_parts(world_size: int, examples: int) -> None:
    """Rows must reach the right rank and place. No rank may wait for an empty piece. Plans must agree if only the sizes
    of uneven parts differ."""
    results = run_ranks(world_size, _draws, examples, timeout=500)
    assert {count for count, _ in results} == {examples}
    for rank, (_, problems) in enumerate(results):
        assert not problems, f"rank {rank}: {problems}"


def _constants(rank: int, world_size: int, parts: list[list[int]]) -> tuple[list[str], list[str], list[str]]:
    """``(problems, exchange plan of the forward graph, status of its sites)``."""
    reports: list[OverlapReport] = []
    backend = interpreted(OverlapConfig(schedule="ring", sequence_parallel="off"), reports, compared=True)
    compiled = torch.compile(uneven_exchanges.layer, backend=backend, dynamic=False)
    counts = (parts[rank], [row[rank] for row in parts])
    problems = _errors("received", compiled, counts, *_inputs(rank, sum(parts[rank]), 8, 4, torch.float32))
    steps = [s for r in reports[:1] for s in r.exchange.split('"') if s.startswith("g0: ")]
    return problems, steps, [s.decision.status for s in reports[0].sites]


@pytest.mark.parametrize("parts", [[[1, 4], [0, 2]], [[2, 2], [2, 3]]])
def test_constant_parts(parts: list[list[int]]) -> None:
    """Ranks agree although the constants in their graphs differ. If the parts of one rank happen to be all of one size,
    this rank's plan differs. Then all ranks still compile the site as overlapped, but run the plain program."""
    results = run_ranks(2, _constants, parts, timeout=300)
    assert [problems for problems, _, _ in results] == [[], []]
    assert [status for _, _, status in results] == [["overlapped"]] * 2
    plans = [steps for _, steps, _ in results]
    assert (plans[0] == plans[1]) == (parts[0] != [2, 2])
    assert plans[1] == [
        "g0: all_to_all float32 [uneven, 8] in all_to_all_matmul by ring/p2p (route=direct, sub_chunks=4)"
    ]


def _generated(rank: int, world_size: int) -> tuple[list[str], list[list[str]]]:
    """``(problems of two calls with different counts, overlapped patterns of each graph)`` in generated code."""
    compile_anew(kernels=False)
    torch._dynamo.config.capture_scalar_outputs = True
    options = {"schedule": "ring", "sequence_parallel": "off", "mode": "strict", "sub_chunks": 2}
    compiled = torch.compile(uneven_exchanges.layer, backend="overlap_inductor", options=options, dynamic=True)
    problems = []
    for parts in ([[3, 0], [5, 4]], [[0, 7], [3, 2]]):
        counts = torch.tensor(parts[rank])
        problems += _errors("there and back", compiled, counts, *_inputs(rank, sum(parts[rank]), 16, 6, torch.float32))
    reports = all_reports()
    problems += [text for r in reports for text in (*waste(r), *r.notices)]
    return problems, [[s.facts.pattern for s in r.sites if s.decision.status == "overlapped"] for r in reports]


def test_generated_code_serves_all_counts() -> None:
    """The sizes are symbols. Generated code must compute each of them. Other counts must not make it compile again."""
    for rank, (problems, patterns) in enumerate(run_ranks(2, _generated, timeout=400)):
        assert problems == [], f"rank {rank}"
        assert patterns == [[RECEIVED, SENT], [RECEIVED, SENT]]
