# SPDX-License-Identifier: Apache-2.0
"""Sums of matmuls before one reduction, as one op of schedule ``chunked``."""

from __future__ import annotations

import pytest

from tests.compile.fused_graphs import BF16
from tests.compile.fused_graphs import operand
from tests.compile.fused_graphs import summed_scatter_site
from tests.support.fake_group import fake_group
from tests.support.golden import check_golden
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

pytestmark = pytest.mark.usefixtures("reachable")


@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_one_text_of_a_sum_in_chunks(world_size: int) -> None:
    texts = set()
    for rank in (0, world_size - 1):
        with fake_group(world_size, rank):
            report = summed_scatter_site().run(schedule="chunked")
            assert [p.schedule for s in report.sites for p in s.decision.plan] == ["chunked"], report.notices
            texts.add((report.before, report.after, report.plan_hash, report.to_json()))
    assert len(texts) == 1


def test_a_sum_with_two_biases_is_refused() -> None:
    with fake_group(2):
        (site,) = summed_scatter_site(biased=2).run(schedule="chunked").sites
    assert (
        site.decision.status == "refused"
        and "2 of the matmuls that are added into one reduction have a bias" in site.decision.reasons[0].text
    )


@pytest.mark.parametrize("read_elsewhere", [False, True])
def test_a_sum_that_inductor_made_one_matmul_is_a_sum(read_elsewhere: bool) -> None:
    """``addmm(x @ a, y, b)`` is Inductor's form of a sum of matmuls. If another node also reads a product, the product
    is not a term of the sum."""
    with fake_group(2):
        made = HandGraph()
        pairs = [
            (operand(made, 48, inner, f"x{i}"), operand(made, inner, 40, f"w{i}"))
            for i, inner in enumerate((16, 24, 8))
        ]
        first = total = made.call(aten.addmm.default, made.input(40, name="row", dtype=BF16), *pairs[0])
        for pair in pairs[1:]:
            total = made.call(aten.addmm.default, total, *pair)
        report = made.output(made.scatter(total), *([first] if read_elsewhere else [])).run(schedule="chunked")
    (site,) = report.sites
    assert len(site.facts.matmuls) == (2 if read_elsewhere else 3)
    if read_elsewhere:
        assert site.decision.status == "refused"
        assert "or an unsupported matmul or bias" in site.decision.reasons[0].text
    else:
        line = next(line for line in report.after.splitlines() if "chunked_sum_matmul_reduce_scatter" in line)
        assert "[x0, x2, x1], [w0, w2, w1], row" in line and "mm.default" not in report.after, report.after


def test_a_sum_scattered_in_chunks_golden() -> None:
    """No matmul of the sum may stay in the graph. The matmul with the bias comes first, because the op adds its bias to
    the first product."""
    with fake_group(2):
        report = summed_scatter_site(biased=1).run(schedule="chunked")
        check_golden(report.after, "fused_graph/a_sum_scattered_in_chunks.txt")
