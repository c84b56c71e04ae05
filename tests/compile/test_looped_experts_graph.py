# SPDX-License-Identifier: Apache-2.0
"""The graphs of loops over experts: which spellings become a site, and why others are left as written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.compile.readings import facts
from tests.compile.readings import misses
from tests.compile.readings import summary
from tests.support.expert_layers import gated
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.row_wise_programs import reduce
from tests.support.spellings import world

Loop = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
TOKENS, HIDDEN, INNER, EXPERTS = 10, 16, 8, 3


def _arguments() -> list[torch.Tensor]:
    """The tokens, the factors and the weights of the experts."""
    shapes = [(TOKENS, HIDDEN), (TOKENS, EXPERTS), (EXPERTS, HIDDEN, INNER), (EXPERTS, INNER, HIDDEN)]
    return [torch.rand(shape) for shape in shapes]


def _addcmul(x: torch.Tensor, shares: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        out = torch.addcmul(out, (x @ up[e]).relu() @ down[e], shares[:, e, None])
    return out


def _biased(x: torch.Tensor, shares: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        out += F.linear(F.linear(x, up[e].t(), up[e][0]).relu(), down[e].t(), down[e][0]) * shares[:, e, None]
    return out


def _routed(x: torch.Tensor, shares: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A matmul computes the factors."""
    return gated(x, torch.softmax(x @ shares.new_ones(HIDDEN, EXPERTS), -1), up, down)


def _cast(x: torch.Tensor, shares: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.bfloat16)
    for e in range(EXPERTS):
        y = (x.bfloat16() @ up[e].bfloat16()).relu() @ down[e].bfloat16()
        out = out + (y * shares[:, e, None]).bfloat16()
    return out


@pytest.mark.parametrize(
    ("loop", "kind"), [(gated, "mm"), (_addcmul, "mm"), (_biased, "addmm"), (_routed, "mm"), (_cast, "mm")]
)
@pytest.mark.usefixtures("two")
def test_spellings(loop: Loop, kind: str) -> None:
    """All experts are matmuls of one site."""
    report = report_of(lambda *a: reduce(loop(*a)), *_arguments())
    assert facts(report) == [("matmul_all_reduce", [f"{kind} M"] * EXPERTS, "overlapped")]
    assert report.near_misses == [] and report.notices == [] and "_c10d_functional" not in report.after


def test_a_rank_in_the_graph() -> None:
    """A graph holds the numbers of its rank's experts. The plans do not hold them, so they are equal."""
    plans = set()
    for rank in (0, 1):
        with fake_group(2, rank), torch.no_grad():

            def layer(
                x: torch.Tensor, ids: torch.Tensor, up: torch.Tensor, down: torch.Tensor, first: int = EXPERTS * rank
            ) -> torch.Tensor:
                chosen = torch.stack([(ids == first + e).any(1) for e in range(EXPERTS)], 1).float()
                return reduce(gated(x, chosen, up, down))

            x, _, *weights = _arguments()
            report = report_of(layer, x, torch.arange(2 * TOKENS).view(-1, 2) % (2 * EXPERTS), *weights)
            plans.add(report.exchange)
            assert facts(report) == [("matmul_all_reduce", ["mm M"] * EXPERTS, "overlapped")]
    assert len(plans) == 1


@pytest.mark.usefixtures("two")
def test_no_looping_op_computes_factors() -> None:
    report = report_of(lambda *a: reduce(gated(*a)), *_arguments(), step_node_budget=1)
    (site,) = report.sites
    assert [r.code for r in site.decision.reasons] == ["too_many_steps"] and report.before == report.after


@pytest.mark.usefixtures("two")
def test_a_maximum_is_refused() -> None:
    """Steps only add the ranks' terms."""
    report = report_of(lambda *a: all_reduce(gated(*a), "max", world()), *_arguments())
    assert [[r.code for r in s.decision.reasons] for s in report.sites] == [["reduce_op"]]


@pytest.mark.usefixtures("two")
def test_stacked_results_are_left_as_written() -> None:
    def stacked(x: torch.Tensor, shares: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        results = torch.stack([(x @ up[e]).relu() @ down[e] for e in range(EXPERTS)])
        return reduce((results * shares.t()[..., None]).sum(0))

    report = report_of(stacked, *_arguments())
    assert summary(report) == [] and misses(report) == [("all_reduce", "layout")] and report.before == report.after


@pytest.mark.usefixtures("two")
def test_selected_tokens_are_left_as_written() -> None:
    """The eager experts of ``transformers`` select the tokens of each expert. The number of an expert's rows is only
    known when the graph runs, and ``index_put`` adds the rows to the tokens. ``torch.compile`` makes one graph of such
    a loop only if it captures ops whose result has such a size."""

    def selected(x: torch.Tensor, shares: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            (tokens,) = torch.where(shares[:, e] > 0.5)
            out.index_add_(0, tokens, (x[tokens] @ up[e]).relu() @ down[e] * shares[tokens, e, None])
        return reduce(out)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = report_of(selected, *_arguments())
    assert summary(report) == [] and misses(report) == [("all_reduce", "op_between")]
    assert "index_put" in report.near_misses[0].reason.text and report.before == report.after
