# SPDX-License-Identifier: Apache-2.0
"""Checks the sites of a Ulysses attention block on gloo ranks, and compares its output and gradients with fp64. The
block is written as in diffusers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.publish import all_reports
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted
from tests.support.ulysses import UlyssesAttention
from tests.support.ulysses import whole

SENT, RECEIVED = "matmul_all_to_all", "all_to_all_matmul"
FORWARD = [SENT, SENT, SENT, RECEIVED]
BACKWARD = [SENT, RECEIVED, RECEIVED, RECEIVED]


def _run(
    rank: int, world_size: int, batch: int, trained: bool, plain: bool, options: dict[str, Any], generated: bool = True
) -> tuple[list[list[str]], dict[str, float], list[str]]:
    """``(patterns of each graph's overlapped sites, {what: relative error against fp64}, problems)``.

    The patterns also hold the status of other sites, and reasons of near misses. If ``plain``, the attention is written
    as matmuls and a softmax. C++ kernels are built only then. Without ``generated``, the rewritten graphs are
    interpreted.
    """
    compile_anew(kernels=plain)
    torch.manual_seed(0)
    hidden, own = 8 * world_size, 6
    block = UlyssesAttention(hidden, 2 * world_size, dist.group.WORLD, plain=plain)
    exact = UlyssesAttention(hidden, 2 * world_size, dist.group.WORLD).double()
    exact.load_state_dict(block.state_dict())
    tokens = torch.randn(batch, own * world_size, hidden)
    weights = torch.randn_like(tokens)
    mine = slice(rank * own, (rank + 1) * own)
    x, y = tokens[:, mine].clone().requires_grad_(trained), tokens.double().requires_grad_(trained)
    options = {"schedule": "ring", "sequence_parallel": "off", **options}
    with torch.set_grad_enabled(trained):
        compiled, reports = _compiled(block, options, generated)
        found = compiled(x)
        expected = whole(exact, y)
    errors = {"output": _error(found, expected[:, mine])}
    if trained:
        (found * weights[:, mine]).sum().backward()
        (expected * weights).sum().backward()
        errors["input"] = _error(x.grad, y.grad[:, mine])
        for (name, parameter), other in zip(block.named_parameters(), exact.parameters(), strict=True):
            # Each rank's gradient is a sum over its own tokens.
            dist.all_reduce(parameter.grad)
            errors[name] = _error(parameter.grad, other.grad)
    reports = all_reports() if generated else reports
    patterns = [
        [s.facts.pattern if s.decision.status == "overlapped" else s.decision.status for s in r.sites]
        + [m.reason.text for m in r.near_misses]
        for r in reports
    ]
    problems = [text for r in reports for text in (*waste(r), *r.notices)]
    return patterns, errors, problems


def _compiled(block: Any, options: dict[str, Any], generated: bool) -> tuple[Any, list[OverlapReport]]:
    """The compiled block, and the reports of its interpreted graphs."""
    reports: list[OverlapReport] = []
    if generated:
        return torch.compile(block, backend="overlap_inductor", options=options), reports
    return torch.compile(block, backend=interpreted(OverlapConfig(**options), reports)), reports


def _error(found: Any, expected: Any) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1))


def _check(world_size: int, *arguments: Any, patterns: list[list[str]]) -> None:
    for found, errors, problems in run_ranks(world_size, _run, *arguments, timeout=500):
        assert found == patterns and problems == []
        assert {what: error for what, error in errors.items() if error > 1e-5} == {}


@pytest.mark.parametrize(("world_size", "batch"), [(2, 2), (4, 1)])
def test_inference(world_size: int, batch: int) -> None:
    """Each projection's exchange must be hidden, and slices must keep their order."""
    _check(world_size, batch, False, False, {}, patterns=[FORWARD])


@pytest.mark.parametrize(
    ("world_size", "generated"), [(2, False), (4, False), pytest.param(3, True, marks=pytest.mark.thorough)]
)
def test_training(world_size: int, generated: bool) -> None:
    """Gradients must be right. The backward's exchanges of gradients must be inside sites."""
    _check(world_size, 2, True, False, {"sub_chunks": 2}, generated, patterns=[FORWARD, BACKWARD])


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [1, 100])
def test_looping_ops(budget: int) -> None:
    """Looping ops must compute what unrolled steps compute. With 100 nodes, some sites are unrolled, and some of their
    waits come after a looping op of the same group."""
    _check(2, 2, True, False, {"step_node_budget": budget}, patterns=[FORWARD, BACKWARD])


def test_attention_of_plain_matmuls() -> None:
    """A site must not take a matmul of the attention in place of a projection."""
    _check(2, 1, False, True, {"sub_chunks": 2}, patterns=[FORWARD])


def _lengths(rank: int, world_size: int, options: dict[str, Any], generated: bool) -> tuple[int, dict[str, float]]:
    """``(number of compiled graphs, {tokens of each rank: relative error})`` of calls with three sequence lengths."""
    compile_anew(kernels=False)
    torch.manual_seed(0)
    block = UlyssesAttention(16, 4, dist.group.WORLD)
    exact = UlyssesAttention(16, 4, dist.group.WORLD).double()
    exact.load_state_dict(block.state_dict())
    compiled, reports = _compiled(block, {"schedule": "ring", **options}, generated)
    errors = {}
    with torch.no_grad():
        for own in (5, 2, 9):
            tokens = torch.randn(2, own * world_size, 16)
            x = tokens[:, rank * own : (rank + 1) * own].contiguous()
            torch._dynamo.mark_dynamic(x, 1)
            expected = whole(exact, tokens.double())[:, rank * own : (rank + 1) * own]
            errors[f"{own} tokens"] = _error(compiled(x), expected)
    (report,) = all_reports() if generated else reports
    assert [s.decision.status for s in report.sites] == ["overlapped"] * 4, report.sites
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], errors


@pytest.mark.parametrize(
    ("options", "generated"),
    [
        ({"sub_chunks": 2}, False),
        pytest.param({}, True, marks=pytest.mark.thorough),
        pytest.param({"step_node_budget": 1}, True, marks=pytest.mark.thorough),
    ],
    ids=["unrolled", "unrolled, generated code", "looping"],
)
def test_a_dynamic_sequence(options: dict[str, Any], generated: bool) -> None:
    """In later calls, the graph must not cut tensors by the sizes of the first call."""
    for graphs, errors in run_ranks(2, _lengths, options, generated, timeout=300):
        assert graphs == 1 and {what: error for what, error in errors.items() if error > 1e-5} == {}


def _normed(
    rank: int, world_size: int, batch: int, trained: bool, norm: str, rotary: str, generated: bool
) -> tuple[list[list[str]], dict[str, float], list[str]]:
    """``_run`` for a block that norms and rotates q and k before it exchanges them."""
    compile_anew(kernels=False)
    torch.manual_seed(0)
    hidden, own, group = 8 * world_size, 6, dist.group.WORLD
    block = UlyssesAttention(hidden, 2 * world_size, group, norm=norm, rotary=rotary)
    exact = UlyssesAttention(hidden, 2 * world_size, group, norm=norm, rotary=rotary).double()
    exact.load_state_dict(block.state_dict())
    tokens, places = torch.randn(batch, own * world_size, hidden), torch.arange(own * world_size)
    mine = slice(rank * own, (rank + 1) * own)
    x, y = tokens[:, mine].clone().requires_grad_(trained), tokens.double().requires_grad_(trained)
    options = {"schedule": "ring", "sequence_parallel": "off", "sub_chunks": 3}
    with torch.set_grad_enabled(trained):
        compiled, reports = _compiled(block, options, generated)
        found = compiled(x, places[mine].float())
        expected = whole(exact, y, places.double())
    errors = {"output": _error(found, expected[:, mine])}
    if trained:
        weights = torch.randn_like(tokens)
        (found * weights[:, mine]).sum().backward()
        (expected * weights).sum().backward()
        errors["input"] = _error(x.grad, y.grad[:, mine])
        for (name, parameter), other in zip(block.named_parameters(), exact.parameters(), strict=True):
            dist.all_reduce(parameter.grad)
            errors[name] = _error(parameter.grad, other.grad)
    reports = all_reports() if generated else reports
    patterns = [[s.facts.pattern for s in r.sites if s.decision.status == "overlapped"] for r in reports]
    return patterns, errors, [text for r in reports for text in (*waste(r), *r.notices)]


@pytest.mark.parametrize(
    ("world_size", "batch", "trained", "norm", "rotary", "generated"),
    [
        (2, 1, True, "heads", "pairs", False),
        pytest.param(2, 1, True, "heads", "pairs", True, marks=pytest.mark.thorough),
        pytest.param(3, 2, False, "rows", "halves", True, marks=pytest.mark.thorough),
        pytest.param(2, 2, True, "rows", "", True, marks=pytest.mark.thorough),
    ],
)
def test_norms_and_rotary_embeddings(
    world_size: int, batch: int, trained: bool, norm: str, rotary: str, generated: bool
) -> None:
    """The projections are computed in bands of tokens. A band must be rotated by the positions of its own tokens. It
    must arrive in the right rows of each receiver, and be saved for the backward."""
    arguments = (batch, trained, norm, rotary, generated)
    for patterns, errors, problems in run_ranks(world_size, _normed, *arguments, timeout=500):
        assert patterns[0] == FORWARD and problems == []
        assert {what: error for what, error in errors.items() if error > 1e-5} == {}
