# SPDX-License-Identifier: Apache-2.0
"""Sites that read another site's result, nodes that move with a site, and nodes that a rewrite leaves in the graph."""

from __future__ import annotations

import re
from operator import getitem

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.compile.readings import codes
from tests.compile.readings import facts
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.spellings import world


def reach(made: HandGraph) -> None:
    """Assert that the output, or an op that exchanges data, depends on every aten op and every collective."""
    wanted, pending = set(), [n for n in made.graph.nodes if n.op == "output" or "exchange_" in str(n.target)]
    while pending:
        node = pending.pop()
        if node not in wanted:
            wanted.add(node)
            pending += node.all_input_nodes
    dead = [
        n.name
        for n in made.graph.nodes
        if n.op == "call_function" and str(n.target).startswith(("aten.", "_c10d")) and n not in wanted
    ]
    assert dead == [], f"results that are not used: {dead}"


def test_a_site_that_feeds_another() -> None:
    """The second site must read the pieces of the first site's result. A matmul of the whole gathered tensor would hide
    no transfer."""
    with fake_group(2):
        made = HandGraph()
        first = made.mm(made.gather(made.input(4, 16)), made.input(16, 8, name="w"))
        second = made.mm(made.call(aten.relu.default, first), made.input(8, 16, name="v"))
        report = made.output(made.scatter(second)).run(sub_chunks=1)
        reach(made)
    assert [f[2] for f in facts(report)] == ["overlapped"] * 2 and report.notices == []
    assert not re.search(r"mm\.default\(gather_start", report.after) and "_c10d_functional" not in report.after
    assert len(re.findall(r" aten\.mm\.default", report.after)) == 4


@pytest.mark.parametrize("kind", ["operand", "external", "weight"])
def test_a_site_that_reads_a_reduced_tensor(kind: str) -> None:
    """The first site's result is an operand, a summand or the weight of the second site. The second site must read the
    result that replaces the first collective's wait."""
    with fake_group(2):
        made = HandGraph()
        reduced = made.reduce(made.mm(made.input(4, 16), made.input(16, 16, name="w")))
        other, weight = made.input(4, 16, name="y"), made.input(16, 16, name="v")
        if kind == "operand":
            made.output(made.reduce(made.mm(reduced, weight)))
        elif kind == "external":
            made.output(made.reduce(made.call(aten.add.Tensor, made.mm(other, weight), reduced)))
        else:
            made.output(made.mm(made.gather(other), made.call(aten.permute.default, reduced, [1, 0])))
        report = made.run()
        reach(made)
    assert [f[2] for f in facts(report)] == ["overlapped"] * 2 and report.notices == []


def test_merged_all_reduces_leave_nothing_behind() -> None:
    """The sum of the three all-reduces becomes one site. The rewrite must remove the nodes of the sum, because they
    would keep the all-reduces and the whole matmuls in the graph: twice the work."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(4, 16)
        terms = [made.reduce(made.mm(x, made.input(16, 8, name=name))) for name in "uvw"]
        total = made.call(aten.add.Tensor, made.call(aten.add.Tensor, terms[0], terms[1]), terms[2])
        report = made.output(made.call(aten.relu.default, total)).run(sub_chunks=1)
        reach(made)
    assert facts(report) == [("matmul_all_reduce", ["mm M"] * 3, "overlapped")]
    assert "_c10d_functional" not in report.after and not re.search(r"\[4, 8\] = aten\.mm", report.after)


def test_vector_along_the_rows() -> None:
    """After a permute, an element of a vector belongs to one row of the matmul's result. So the vector is cut with the
    rows, although it is as long as a row."""
    with fake_group(2):
        made = HandGraph()
        y = made.call(aten.permute.default, made.mm(made.input(8, 4), made.input(4, 8, name="w")), [1, 0])
        report = made.output(made.reduce(made.call(aten.add.Tensor, y, made.input(8, name="b")))).run(sub_chunks=1)
    assert facts(report) == [("matmul_all_reduce", ["mm M"], "overlapped")]
    assert re.search(r"float32\[8, 1\] = aten\.reshape\.default\(b", report.after)
    assert len(re.findall(r"float32\[4, 1\] = overlap_inductor\.take", report.after)) == 2


def test_vector_along_a_part_of_the_columns() -> None:
    """After a view, an element of a vector belongs to several columns of the matmul's result. So there is no site."""
    with fake_group(2):
        made = HandGraph()
        y = made.view(made.mm(made.input(8, 4), made.input(4, 6, name="w")), 8, 2, 3)
        report = made.output(made.scatter(made.call(aten.mul.Tensor, y, made.input(3, name="b")))).run()
    assert facts(report) == [] and codes(report) == ["layout"] and report.before == report.after
    assert report.notices == []


def test_a_scale_with_one_dim_keeps_its_promotion() -> None:
    """bf16 times fp32[1] is fp32, so the pieces must be fp32. In bf16, they would have half the bytes that the peer
    expects."""
    with fake_group(2):
        made = HandGraph()
        y = made.mm(made.input(4, 16, dtype=torch.bfloat16), made.input(16, 8, dtype=torch.bfloat16, name="w"))
        report = made.output(made.scatter(made.call(aten.mul.Tensor, y, made.input(1, name="s")))).run(sub_chunks=1)
    assert [f[2] for f in facts(report)] == ["overlapped"]
    sent = re.search(r"exchange_send\.default\(\w+, \w+, (\w+),", report.after)
    assert sent is not None and f"{sent[1]}: float32" in report.after


def test_written_in_place_between_site_and_epilogue() -> None:
    """The bias is overwritten between the matmul and the addition. An epilogue would read the old bias, so the site
    stays as written."""
    with fake_group(2):
        made = HandGraph()
        bias, newer = made.input(8, name="b"), made.input(8, name="n")
        y = made.mm(made.gather(made.input(4, 16)), made.input(16, 8, name="w"))
        made.call(aten.copy_.default, bias, newer)
        report = made.output(made.mm(made.call(aten.add.Tensor, y, bias), made.input(8, 4, name="v"))).run()
    assert [r.code for r in report.sites[0].decision.reasons] == ["mutation"] and report.before == report.after


def test_scale_computed_from_the_gathered_tensor() -> None:
    """A dynamic scale needs the whole gathered tensor before the first piece is multiplied. So there is no site."""
    with fake_group(2):
        made = HandGraph()
        gathered = made.gather(made.input(4, 16))
        largest = made.call(aten.amax.default, made.call(aten.abs.default, gathered), [0, 1], True)
        report = made.output(made.mm(made.call(aten.div.Tensor, gathered, largest), made.input(16, 8, name="w"))).run()
    assert facts(report) == [] and codes(report) == ["weight_depends_on_collective"] and report.before == report.after


def test_size_of_the_result_is_used_after_it() -> None:
    """The epilogue reads a symbolic size of the matmul's output. The pieces need this size before the output exists."""
    with fake_group(2):
        made = HandGraph()
        y = made.mm(made.gather(made.input(4, 16, dynamic=(0,))), made.input(16, 8, name="w"))
        rows = made.call(aten.sym_size.int, y, 0)
        report = made.output(made.mm(made.call(aten.div.Tensor, y, rows), made.input(8, 4, name="v"))).run(sub_chunks=1)
        reach(made)
    assert [f[2] for f in facts(report)] == ["overlapped"] and report.notices == []


def test_dynamic_gated_mlp_of_a_sequence() -> None:
    """Views of the gathered tensor read its sizes. The pieces do not need these sizes, so the size nodes do not
    move."""

    def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(x, 1, world())
        g, u = gathered @ gate, gathered @ up
        return g, u.double(), torch.nn.functional.gelu(g) * u

    with fake_group(4), torch.no_grad():
        x = torch.randn(2, 48, 8)
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        report = report_of(mlp, x, torch.randn(8, 5), torch.randn(8, 5))
    assert facts(report) == [("all_gather_matmul", ["mm M", "mm M"], "overlapped")] and report.notices == []


def test_broadcast_that_adds_a_dim() -> None:
    """A pointwise op with an operand of more dims gives a result of more dims. The finder must not raise an error."""
    with fake_group(2):
        made = HandGraph()
        scaled = made.call(aten.mul.Tensor, made.gather(made.input(4, 8)), made.input(1, 1, 1, name="s"))
        made.output(
            made.call(
                aten.bmm.default, made.call(aten.permute.default, scaled, [0, 2, 1]), made.input(1, 8, 4, name="w")
            )
        )
        report = made.run()
    assert facts(report) == [("all_gather_matmul", ["bmm K"], "overlapped")] and report.notices == []


@pytest.mark.parametrize(
    "kind",
    [
        "plus one",
        "a factor",
        "twice the same",
        "a bias along cut columns",
        "a bias beside gathered columns",
        "two shapes of what is gathered",
    ],
)
def test_no_looping_op_for_what_it_does_not_compute(kind: str) -> None:
    """A looping op would compute wrong results for these sites, and the budget is too small to unroll them. So the
    sites are refused."""
    with fake_group(2):
        made = HandGraph()
        x, w, b = made.input(8, 16), made.input(16, 8, name="w"), made.input(8, name="bias")
        y = made.mm(x, w)
        if kind == "plus one":
            result = made.scatter(made.call(aten.add.Tensor, y, 1))
        elif kind == "a factor":
            result = made.scatter(made.call(aten.add.Tensor, y, made.mm(x, made.call(aten.relu.default, w)), alpha=3))
        elif kind == "twice the same":
            result = made.scatter(made.call(aten.add.Tensor, y, y))
        elif kind == "a bias along cut columns":
            result = made.scatter_on(made.call(aten.addmm.default, b, x, w), 1)
        elif kind == "a bias beside gathered columns":
            columns = made.call(aten.permute.default, made.gather(made.call(aten.relu.default, x)), [1, 0])
            result = made.call(aten.addmm.default, made.input(16, name="row"), made.input(5, 16, name="left"), columns)
        else:
            gathered = made.gather(x)
            result = made.call(
                aten.cat.default,
                [made.mm(gathered, w), made.mm(made.view(gathered, 32, 8), made.input(8, 8, name="v"))],
            )
        (site,) = made.output(result).run(step_node_budget=1).sites
    assert site.decision.status == "refused" and [r.code for r in site.decision.reasons] == ["too_many_steps"], (
        site.decision
    )


def test_an_output_gathered_in_another_order() -> None:
    """A transposed result is gathered in another order than the matmul computes it. So a band of the matmul's rows is
    not contiguous in the gathered tensor, and there is no site."""
    with fake_group(2):
        made = HandGraph()
        y = made.call(aten.permute.default, made.mm(made.input(8, 16), made.input(16, 8, name="w")), [1, 0])
        report = made.output(made.gather(made.call(aten.clone.default, y))).run()
    assert report.sites == [] and codes(report) == ["layout"]


def test_a_gathers_matmul_stays_with_its_gather_if_it_is_added_to_another_one() -> None:
    """The product of the gather's matmul is the bias of the reduction's matmul. Both sites are overlapped."""
    with fake_group(2) as group:

        def layer(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return reduce_scatter(all_gather(x, 0, group) @ a + y @ b, "sum", 0, group)

        report = report_of(layer, torch.randn(8, 16), torch.randn(16, 24), torch.randn(16, 16), torch.randn(16, 24))
    assert [(len(s.facts.matmuls), s.decision.status) for s in report.sites] == [(1, "overlapped")] * 2


def of_sites(made: HandGraph) -> list[tuple[str, int, str]]:
    return [(s.facts.pattern, len(s.facts.matmuls), s.decision.status) for s in made.run().sites]


def test_a_gathers_matmul_stays_with_its_gather_if_the_sum_is_an_add() -> None:
    """The sum is an ``add`` node, with a pointwise op between the gather's matmul and the sum."""
    with fake_group(2):
        made = HandGraph()
        gathered = made.mm(made.gather(made.input(4, 6)), made.input(6, 6, name="a"))
        other = made.mm(made.input(8, 6, name="y"), made.input(6, 6, name="b"))
        made.output(made.scatter(made.call(aten.add.Tensor, made.call(aten.relu.default, gathered), other)))
        assert of_sites(made) == [("all_gather_matmul", 1, "overlapped"), ("matmul_reduce_scatter", 1, "overlapped")]
        assert "wait_tensor" not in made.text() and made.text().count("relu") >= 2, (
            "the pointwise op runs on each piece"
        )


def test_a_gathers_matmul_stays_with_its_gather_if_the_reduction_begins_earlier() -> None:
    """A sum of all-reduces is one site. The finder meets its first all-reduce before the gather."""
    with fake_group(2):
        made = HandGraph()
        first = made.reduce(made.mm(made.input(8, 6), made.input(6, 6, name="a")))
        gathered = made.mm(made.gather(made.input(4, 6, name="z")), made.input(6, 6, name="c"))
        second = made.reduce(
            made.call(aten.addmm.default, gathered, made.input(8, 6, name="y"), made.input(6, 6, name="b"))
        )
        made.output(made.call(aten.add.Tensor, first, second))
        assert of_sites(made) == [("matmul_all_reduce", 2, "overlapped"), ("all_gather_matmul", 1, "overlapped")]


@pytest.mark.parametrize("order", ["gathered first", "gathered last"])
@pytest.mark.parametrize("kind", ["addmm", "add"])
def test_both_terms_of_a_sum_are_overlapped_in_either_order(kind: str, order: str) -> None:
    """``y @ b + all_gather(x) @ a`` may reach the pass as ``addmm(y @ b, gathered, a)``. Then the bias of the gather's
    matmul is the reduction's own matmul."""

    def graph() -> HandGraph:
        made = HandGraph()
        pairs = [
            (made.gather(made.input(4, 6)), made.input(6, 6, name="a")),
            (made.input(8, 6, name="y"), made.input(6, 6, name="b")),
        ]
        first, last = pairs if order == "gathered first" else pairs[::-1]
        product = made.mm(*first)
        total = (
            made.call(aten.addmm.default, product, *last)
            if kind == "addmm"
            else made.call(aten.add.Tensor, product, made.mm(*last))
        )
        return made.output(made.scatter(total))

    with fake_group(2):
        assert of_sites(graph()) == [("all_gather_matmul", 1, "overlapped"), ("matmul_reduce_scatter", 1, "overlapped")]
        alone = graph()
        report = alone.run(patterns=("matmul_reduce_scatter",))
        assert [(len(s.facts.matmuls), s.decision.status) for s in report.sites] == [
            (1, "kept"),
            (2, "overlapped"),
        ], "the reduction takes the matmul of a gather that is kept"
        other = graph()
        report = other.run(patterns=("all_gather_matmul",))
        assert (report.sites[0].facts.pattern, report.sites[0].decision.status) == ("all_gather_matmul", "overlapped")
        reduction = [s.decision.status for s in report.sites[1:]] + codes(report)
        assert reduction == (["shares_nodes"] if (kind, order) == ("addmm", "gathered last") else ["kept"]), (
            "the reduction is not overlapped: its sum is part of the gather's matmul, or its pattern is switched off"
        )
        sums = {n.target for n in other.graph.nodes} & {aten.addmm.default, aten.add.Tensor}
        assert sums == {aten.addmm.default if kind == "addmm" else aten.add.Tensor}, (
            "a sum is not taken apart for a reduction that is not overlapped"
        )
        for fields in ({"mode": "report"}, {"schedule": "keep"}):
            kept = graph()
            before = kept.text()
            assert kept.run(**fields).sites and kept.text() == before, (
                "a sum that was taken apart in vain must be one node again"
            )


def test_the_matmul_of_a_kept_gather_is_not_a_term_if_it_is_read_elsewhere() -> None:
    """The reduction takes only its own matmul, and adds the gather's product as a whole tensor."""
    with fake_group(2):
        made = HandGraph()
        product = made.mm(made.gather(made.input(4, 6)), made.input(6, 6, name="a"))
        total = made.call(aten.add.Tensor, product, made.mm(made.input(8, 6, name="y"), made.input(6, 6, name="b")))
        report = made.output(product, made.reduce(total)).run(patterns=("matmul_all_reduce",))
    assert [(len(s.facts.matmuls), s.decision.status) for s in report.sites] == [(1, "kept"), (1, "overlapped")]


@pytest.mark.parametrize("kind", ["at the same place", "before the other's matmul"])
def test_two_gathers_that_sink(kind: str) -> None:
    """The second site's matmul reads a tensor computed from the first gathered tensor, or computes an operand of the
    first site. A site's steps must come after the nodes that move down with its gather."""
    with fake_group(2):
        made = HandGraph()
        first, second = made.gather(made.input(4, 8)), made.gather(made.input(4, 8, name="z"))
        reduced = made.reduce(made.input(8, 8, name="y"))
        if kind == "at the same place":
            both = made.call(aten.add.Tensor, first, second)
            running = made.call(aten.cumsum.default, first, 0)
            made.output(both, made.mm(first, reduced), made.mm(second, running))
        else:
            made.output(made.call(aten.cumsum.default, made.mm(first, made.mm(second, reduced)), 0))
        report = made.run()
        made.graph.lint()
    assert [s.decision.status for s in report.sites] == ["overlapped"] * 2 and report.notices == []


def test_a_site_is_refused_if_its_operand_sinks_below_it() -> None:
    with fake_group(2):
        made = HandGraph()
        first, reduced = made.gather(made.input(4, 8)), made.reduce(made.input(8, 8, name="y"))
        product = made.mm(first, reduced)
        second = made.gather(made.input(4, 8, name="z"))
        made.output(made.call(aten.cumsum.default, second, 0), made.mm(second, product))
        report = made.run()
    assert [s.decision.status for s in report.sites] == ["overlapped", "refused"] and report.notices == []


def test_a_site_is_refused_if_a_node_that_moves_up_reads_one_that_moves_down() -> None:
    """The first gather's matmul needs the result of a reduction. So the first gather moves down, below the second
    gather. The second site's operand depends on the first gathered tensor, so this operand cannot move up. The second
    site must be refused before its rewrite."""
    with fake_group(2):
        made = HandGraph()
        first, reduced, second = (
            made.gather(made.input(4, 8)),
            made.reduce(made.input(8, 8, name="y")),
            made.gather(made.input(4, 8, name="z")),
        )
        beside, other = made.call(aten.cumsum.default, second, 0), made.call(aten.cumsum.default, first, 0)
        made.output(made.mm(first, reduced), made.mm(second, other), other, beside)
        report = made.run()
    assert [(s.decision.status, [r.code for r in s.decision.reasons]) for s in report.sites] == [
        ("overlapped", []),
        ("refused", ["hoist"]),
    ]
    assert report.notices == []


@pytest.mark.parametrize("kind", ["its operand, too", "twice", "an unbacked size"])
def test_a_bias_that_is_not_a_term(kind: str) -> None:
    """A product that is read twice is not a term of the sum, because it would be computed more than once. An unbacked
    size in the bias is no reason to refuse the site."""
    with fake_group(2):
        made = HandGraph()
        x, a, b = made.input(8, 6), made.input(6, 6, name="a"), made.input(6, 6, name="b")
        if kind == "an unbacked size":
            u = made.unbacked_input(8, name="u")
            bias = made.mm(made.call(aten.permute.default, u, [1, 0]), u)
            x, a = made.input(8, 6, name="y"), made.input(6, 8, name="v")
        else:
            bias = made.mm(x, a)
            x, a = (bias, b) if kind == "its operand, too" else (x, b)
        made.output(
            made.scatter(
                made.call(aten.addmm.default, made.call(aten.add.Tensor, bias, bias) if kind == "twice" else bias, x, a)
            )
        )
        assert of_sites(made) == [("matmul_reduce_scatter", 1, "overlapped")]


@pytest.mark.parametrize("kind", ["gather", "reduce", "scatter"])
@pytest.mark.parametrize("batch", [4, None], ids=["bmm", "mm"])
def test_a_column_and_a_row_of_the_same_layout_are_not_two_terms(kind: str, batch: int | None) -> None:
    """The products are ``[4, 1]`` and ``[1, 4]``. As terms of one sum, their pieces would broadcast to ``[4, 4]``."""
    with fake_group(2):
        made = HandGraph()
        lead = [] if batch is None else [batch]
        multiply = aten.mm.default if batch is None else aten.bmm.default
        row = made.call(multiply, made.input(*lead, 1, 6, name="a"), made.input(*lead, 6, 4, name="b"))
        column = made.call(multiply, made.input(*lead, 4, 6, name="c"), made.input(*lead, 6, 1, name="d"))
        turned = made.call(aten.permute.default, row, [1, 0] if batch is None else [0, 2, 1])
        report = made.output(getattr(made, kind)(made.call(aten.add.Tensor, column, turned))).run()
    assert report.sites == [] and codes(report) == ["layout"] and not report.notices


def test_sizes_that_have_two_forms() -> None:
    """In ``layer``, the number of rows may be written as a product or as a sum of products. In ``mean``, a guard fixes
    the number of scattered rows to 1. Both sites must be overlapped."""

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return all_gather(torch.cat([x, x], 1), 2, world()) @ w

    def mean(x: torch.Tensor, w: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return column @ (reduce_scatter(x @ w, "avg", 0, world()) * 2)

    with fake_group(2), torch.no_grad():
        x, column = torch.randn(2, 6), torch.randn(40, 1)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        report = report_of(mean, x, torch.randn(6, 40), column)
        assert facts(report) == [("matmul_reduce_scatter", ["mm M"], "overlapped")] and report.notices == []
        x = torch.randn(2, 8, 6)
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        report = report_of(layer, x, torch.randn(12, 5))
        assert facts(report) == [("all_gather_matmul", ["mm K"], "overlapped")] and report.notices == []


def test_pieces_of_a_transposed_gathered_tensor_are_not_shards() -> None:
    """The gathered tensor is transposed and split along a dim that was not gathered. So its pieces are not shards,
    though there are as many pieces as ranks."""
    with fake_group(2):
        made = HandGraph()
        turned = made.call(aten.permute.default, made.gather(made.input(4, 6)), [1, 0])
        pieces = made.call(aten.split.Tensor, turned, 3)
        joined = made.call(aten.cat.default, [made.call(getitem, pieces, i) for i in range(2)], 1)
        report = made.output(made.mm(joined, made.input(16, 5, name="w"))).run()
    assert report.sites == [] and codes(report) == ["layout"] and not report.notices


def test_a_gather_that_sinks_does_not_move_a_node_that_it_replaces() -> None:
    """From a random program: one tensor is gathered along an inner dim and also reduced, and the two results are
    multiplied. The reduction's wait comes after the gather's, so the site's steps must move down below the
    reduction's wait."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        reduced, gathered = all_reduce(x, "max", dist.group.WORLD), all_gather(x, 2, dist.group.WORLD)
        return gathered.mT @ reduced, gathered

    with fake_group(2):
        report = report_of(function, torch.randn(2, 16, 1))
    assert report.notices == [] and [s.decision.status for s in report.sites] == ["overlapped"]
