# SPDX-License-Identifier: Apache-2.0
"""Some of the forms (*spellings*) in which a graph may contain a site: in training graphs and in graphs built by
hand."""

from __future__ import annotations

from tests.compile.readings import summary
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import c10d
from tests.support.spellings import GATHER
from tests.support.spellings import SCATTER
from tests.support.spellings import weight
from tests.support.spellings import x2
from tests.support.structures import GatherTokens
from tests.support.structures import ScatterTokens


def test_spelling_o_backward_of_a_row_wise_layer() -> None:
    """One gathered gradient feeds dgrad and wgrad. The gathered dim is M of dgrad and K of wgrad. Both matmuls belong
    to one site."""
    with fake_group(2):
        x, w = x2().requires_grad_(), weight().requires_grad_()
        forward, backward = reports_of(lambda x, w: ScatterTokens.apply(x.relu() @ w).relu(), x, w)
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert summary(forward) == [(SCATTER, 0, ["mm M"], "overlapped")]
    ((pattern, dim, matmuls, status),) = summary(backward)
    assert (pattern, dim, sorted(matmuls), status) == (GATHER, 0, ["mm K", "mm M"], "overlapped")


def test_backward_of_a_column_wise_layer() -> None:
    """The forward gathers its input, and the backward scatters the gradient."""
    with fake_group(2):
        x, w = x2().requires_grad_(), weight().requires_grad_()
        forward, backward = reports_of(lambda x, w: (GatherTokens.apply(x) @ w).relu(), x, w)
    assert summary(forward) == [(GATHER, 0, ["mm M"], "overlapped")]
    assert summary(backward)[-1] == (SCATTER, 0, ["mm M"], "overlapped")


def test_unbacked_token_count_is_found_and_refused() -> None:
    """A gather whose size is only known at run time must be a refused site, not a near miss."""
    with fake_group(2):
        made = HandGraph()
        report = made.output(made.mm(made.gather(made.unbacked_input(16)), made.input(16, 8, name="w"))).run()
    (site,) = report.sites
    assert site.facts.pattern == GATHER
    assert (site.decision.status, [r.code for r in site.decision.reasons]) == ("refused", ["dynamic_shape"])
    assert report.before == report.after


def test_spelling_i_scattered_result_saved_for_backward() -> None:
    """The collective itself is an output, and not only its wait. The site must still be overlapped."""
    with fake_group(2):
        made = HandGraph()
        started = made.call(
            c10d.reduce_scatter_tensor.default,
            made.mm(made.input(4, 16), made.input(16, 8, name="w")),
            "sum",
            2,
            made.group,
        )
        report = made.output(started, made.wait(started)).run(is_inference=False)
    assert summary(report) == [(SCATTER, 0, ["mm M"], "overlapped")]
    assert "_c10d_functional" not in report.after
