# SPDX-License-Identifier: Apache-2.0
"""The budget of unrolled steps: which sites are unrolled, which become looping ops, and how large the graph gets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Iterable

import pytest
import torch
from torch import fx

from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites import collectives
from overlap_inductor.sites import graph_tools as tools
from tests.compile.readings import facts
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

BUDGET = 3000
OP_NODES = 10
"""The most nodes that one looping op adds: the op, its views, results and token."""


def backward(layers: int) -> HandGraph:
    """A backward graph. Each layer gathers a gradient, computes dgrad and wgrad, and scatters the next gradient."""
    made = HandGraph()
    gradient = made.input(4, 16, name="g")
    saved = [
        [made.input(*s, name=f"{n}{i}") for n, s in (("w", (16, 8)), ("v", (8, 16)), ("a", (4 * made.world_size, 8)))]
        for i in range(layers)
    ]
    wgrads = []
    for w, v, a in saved:
        gathered = made.gather(gradient)
        wgrads.append(made.mm(made.call(aten.permute.default, gathered, [1, 0]), a))
        gradient = made.scatter(made.mm(made.mm(gathered, w), v))
    return made.output(gradient, *wgrads)


def unrolled(report: OverlapReport) -> list[bool]:
    return [s.decision.moving.parameters["unrolled"] for s in report.sites]


@pytest.mark.parametrize(
    ("world_size", "layers"), [(8, 80), pytest.param(64, 80, marks=pytest.mark.thorough), (1024, 80)]
)
def test_eighty_layers_stay_within_the_budget(world_size: int, layers: int) -> None:
    """A site that does not fit the budget is still overlapped. The number of added nodes has a limit that does not
    depend on the number of ranks."""
    with fake_group(world_size, 1):
        made = backward(layers)
        before = len(made.graph.nodes)
        report = made.run(is_inference=False)
        added = len(made.graph.nodes) - before
    expected = [
        ("all_gather_matmul", ["mm K", "mm M"], "overlapped"),
        ("matmul_reduce_scatter", ["mm M"], "overlapped"),
    ]
    assert facts(report) == expected * layers and report.notices == []
    assert added <= BUDGET + OP_NODES * 2 * layers
    chosen = unrolled(report)
    assert any(chosen) == (world_size < 1024) and not all(chosen)
    # After a gather that does not fit, no later gather is unrolled. A scatter may still fit the rest of the budget.
    gathers = chosen[::2]
    assert gathers == sorted(gathers, reverse=True)
    assert report.after.count("overlap_inductor.all_gather_matmul.default(") == gathers.count(False)
    assert report.after.count("overlap_inductor.matmul_reduce_scatter.default(") == chosen[1::2].count(False)


def calls_of_the_pass(world_size: int) -> int:
    """The number of function calls of the pass on a graph whose sites all become looping ops."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with fake_group(world_size, 1):
        made = backward(10)
        sys.setprofile(count)
        try:
            report = made.run(is_inference=False, step_node_budget=1)
        finally:
            sys.setprofile(None)
    assert not any(unrolled(report))
    return calls


def test_the_pass_takes_no_longer_in_a_larger_group() -> None:
    """A loop over the ranks for each site would take minutes in a group of thousands."""
    calls_of_the_pass(2)  # In this call, torch does its one-time work. The call's count is not used.
    assert calls_of_the_pass(1024) == pytest.approx(calls_of_the_pass(8), rel=0.02)


def looked_at(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of nodes that the finder visits on its walks."""
    seen: list[object] = []
    walk = tools.walk

    def noted(starts: Iterable[fx.Node], visit: Callable[[fx.Node], bool]) -> None:
        walk(starts, lambda node: seen.append(node) or visit(node))  # type: ignore[func-returns-value]

    monkeypatch.setattr(tools, "walk", noted)
    with fake_group(8):
        assert len(backward(layers).found("backward").sites) == 2 * layers
    monkeypatch.undo()
    return len(seen)


def test_the_finders_visits_grow_linearly_with_the_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finder that follows each gather to the end of the graph would visit a quadratic number of nodes."""
    assert looked_at(40, monkeypatch) == 2 * looked_at(20, monkeypatch) > 0


@pytest.mark.parametrize("layers", [10, 40])
def test_a_graphs_collectives_are_read_once(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph has sums of all-reduces. Its collectives must not be read again for each term."""
    read = []
    find = collectives.find_collectives
    monkeypatch.setattr(collectives, "find_collectives", lambda graph: read.append(1) or find(graph))
    with fake_group(8):
        made = HandGraph()
        x, w = made.input(64, 16), made.input(16, 16, name="w")
        for _ in range(layers):
            terms = [made.reduce(made.mm(made.call(aten.relu.default, x), w)) for _ in range(2)]
            x = made.call(aten.add.Tensor, x, made.call(aten.add.Tensor, *terms))
        assert [len(s.facts.matmuls) for s in made.output(x).found().sites] == [2] * layers
    assert len(read) == 1


def test_ranks_unroll_the_same_sites() -> None:
    texts = []
    for rank in (0, 5):
        with fake_group(8, rank):
            report = backward(20).run(is_inference=False, sub_chunks=4)
            texts.append((report.plan_hash, report.after, unrolled(report)))
    assert texts[0] == texts[1] and True in texts[0][2] and False in texts[0][2]


def with_pointwise_ops(count: int, loopable: bool, budget: int) -> OverlapReport:
    """The report of a graph with ``count`` pointwise ops after its matmul. With ``loopable``, a looping op can compute
    these ops. Otherwise they stand before a scatter, and no looping op can compute them."""
    with fake_group(4):
        made = HandGraph()
        x, w = made.input(4 if loopable else 16, 16), made.input(16, 8, name="w")
        y = made.mm(made.gather(x) if loopable else x, w)
        for _ in range(count):
            y = made.call(aten.neg.default, y)
        return made.output(y if loopable else made.scatter(y)).run(step_node_budget=budget, sub_chunks=4)


def test_ranks_with_unlike_epilogues_exchange_the_same() -> None:
    """A site with 7 pointwise ops is unrolled. A site with 8 becomes a looping op. Both move equal bytes in the same
    order, so the ranks agree."""
    seven, eight = (with_pointwise_ops(n, loopable=True, budget=100) for n in (7, 8))
    assert (unrolled(seven), unrolled(eight)) == ([True], [False])
    assert seven.plan_hash == eight.plan_hash != ""


def test_ranks_of_which_one_refuses_a_site_do_not_agree() -> None:
    """The plans' hashes differ, so the ranks run the graph without overlap."""
    seven, eight = (with_pointwise_ops(n, loopable=False, budget=200) for n in (7, 8))
    assert [f[2] for f in facts(seven)] == ["overlapped"]
    assert [(f[2], s.decision.reasons[0].code) for f, s in zip(facts(eight), eight.sites)] == [
        ("refused", "too_many_steps")
    ]
    assert seven.groups and eight.groups and seven.plan_hash != eight.plan_hash


@pytest.mark.parametrize("budget", [220, 4000])
def test_a_site_without_a_looping_op_gets_its_budget_first(budget: int) -> None:
    """If other sites took the budget first, the site that cannot become a looping op would be refused."""
    with fake_group(4):
        made = HandGraph()
        outs = [
            made.mm(made.gather(made.input(4, 16, name=f"x{i}")), made.input(16, 8, name=f"w{i}")) for i in range(4)
        ]
        outs.append(
            made.call(
                aten.bmm.default, made.gather_on(made.input(3, 4, 16, name="y"), 1), made.input(3, 16, 8, name="v")
            )
        )
        report = made.output(*outs).run(step_node_budget=budget, sub_chunks=4)
    assert [f[2] for f in facts(report)] == ["overlapped"] * 5
    assert unrolled(report) == ([True, True, False, False, True] if budget == 220 else [True] * 5)


def test_dgrad_and_wgrad_in_one_looping_op() -> None:
    """One ring serves all matmuls. The op also returns the gathered tensor for another reader."""
    with fake_group(2):
        made = HandGraph()
        gathered = made.gather(made.input(4, 16))
        wgrad = made.mm(made.call(aten.permute.default, gathered, [1, 0]), made.input(8, 6, name="a"))
        left = made.mm(made.input(5, 8, name="l"), gathered)
        dgrad = made.mm(gathered, made.input(16, 8, name="w"))
        report = made.output(wgrad, dgrad, left, made.call(aten.add.Tensor, gathered, 1)).run(step_node_budget=1)
    (line,) = [line for line in report.after.splitlines() if "overlap_inductor.all_gather_matmul.default(" in line]
    assert "[a, l, w], [None, None, None], 'lhs K transposed, rhs K transposed, lhs M'" in line
    assert "_c10d_functional" not in report.after and "permute" not in report.after


def test_a_dynamic_token_count_can_be_compared_if_tokens_are_contracted() -> None:
    """The site's op compares the number of gathered rows with the token count from which overlap pays. In a wgrad,
    these rows are tokens. Gathered columns that are contracted are not tokens, so the site is kept."""
    with fake_group(2):
        for transposed, status in ((True, "overlapped"), (False, "kept")):
            made = HandGraph()
            x = made.input(2**13, 2**10, dynamic=(0,)) if transposed else made.input(2**10, 2**13, dynamic=(1,))
            gathered = made.gather(x) if transposed else made.gather_on(x, 1)
            size = gathered.meta["val"].shape[0 if transposed else 1]
            left = made.call(aten.permute.default, gathered, [1, 0]) if transposed else gathered
            y = made.call(aten.full.default, [size, 2**7], 1.0, dtype=torch.float32)
            (site,) = made.output(made.mm(left, y)).run(schedule="auto").sites
            assert (site.decision.status, [r.code for r in site.decision.reasons]) == (
                status,
                [] if transposed else ["dynamic_shape"],
            ), site.decision


@pytest.mark.parametrize(
    ("kind", "status"),
    [("activation", "overlapped"), ("narrowed", "overlapped"), ("widened", "refused"), ("read elsewhere", "refused")],
)
def test_pointwise_ops_before_the_matmul_are_computed_on_shards(kind: str, status: str) -> None:
    """The ring gathers the result of these ops. So the result must not have more bytes than the input, and no other
    node may read it."""
    convert = torch.ops.prims.convert_element_type.default
    with fake_group(2):
        made = HandGraph()
        dtype = {"widened": torch.bfloat16, "narrowed": torch.float32}.get(kind)
        gathered = made.gather(made.input(4, 16, dtype=dtype or torch.float32))
        if dtype is None:
            operand, weight = made.call(aten.relu.default, gathered), made.input(16, 8, name="w")
        else:
            other = torch.float32 if kind == "widened" else torch.bfloat16
            operand, weight = made.call(convert, gathered, other), made.input(16, 8, dtype=other, name="w")
        y = made.mm(operand, weight)
        report = made.output(y, *([operand] if kind == "read elsewhere" else [])).run(step_node_budget=1)
    assert [f[2] for f in facts(report)] == [status] and report.notices == []
    if status == "overlapped":
        line = next(line for line in report.after.splitlines() if "relu" in line or "convert_element_type" in line)
        assert "[4, 16]" in line and "_c10d_functional" not in report.after


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("another result added", "overlapped"),
        ("another result, read elsewhere, added", "overlapped"),
        ("cast", "overlapped"),
        ("cast twice", "refused"),
        ("each cast", "refused"),
        ("one row added", "overlapped"),
        ("a number added", "refused"),
    ],
)
def test_ops_after_the_matmul_that_looping_reductions_compute(kind: str, status: str) -> None:
    """After a matmul, a looping reduction can compute three kinds of ops: the addition of another matmul's result, the
    addition of one row, and one change of dtype."""

    def convert(x: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        return made.call(torch.ops.prims.convert_element_type.default, x, dtype)

    with fake_group(2):
        made = HandGraph()
        x, w, v = made.input(8, 16), made.input(16, 6, name="w"), made.input(16, 6, name="v")
        y = made.mm(x, w)
        terms = {
            "another result added": lambda: made.call(aten.addmm.default, y, x, v),
            "another result, read elsewhere, added": lambda: made.call(aten.addmm.default, y, x, v),
            "cast": lambda: convert(y, torch.bfloat16),
            "cast twice": lambda: convert(convert(y, torch.bfloat16), torch.float32),
            "each cast": lambda: made.call(
                aten.add.Tensor, convert(y, torch.bfloat16), convert(made.mm(x, v), torch.bfloat16)
            ),
            "one row added": lambda: made.call(aten.add.Tensor, y, made.input(1, 6, name="row")),
            "a number added": lambda: made.call(aten.add.Tensor, y, 1.0),
        }
        report = made.output(made.scatter(terms[kind]()), *([y] if "elsewhere" in kind else [])).run(step_node_budget=1)
    assert [f[2] for f in facts(report)] == [status] and report.notices == []
    if "another result" in kind:
        # If ``y`` is read elsewhere, its matmul stays whole, and pieces of ``y`` are added.
        operands, bias = (
            ("[x, x], [v, w], [None, None]", False)
            if kind == "another result added"
            else ("[x], [v], [mm_default]", True)
        )
        assert operands in report.after, report.after
        assert ("aten.mm.default" in report.after) == bias
    if kind == "one row added":
        assert "[x], [w], [reshape_default]" in report.after, report.after
    if status == "overlapped":
        assert f"torch.{'bfloat16' if kind == 'cast' else 'float32'}, 'sum'" in report.after


def test_the_report_gives_the_sub_chunks_of_a_looping_op() -> None:
    """Each shard is multiplied transposed, so sub-chunks would split the contracted dim. The op has 1 sub-chunk, though
    the switch requests 2. The report must give 1."""
    with fake_group(2):
        made = HandGraph()
        gathered = made.view(made.gather(made.input(4, 6)), 2, 4, 6)
        turned = made.call(aten.clone.default, made.call(aten.permute.default, gathered, [0, 2, 1]))
        made.output(made.mm(made.view(turned, 12, 4), made.input(4, 10, name="w")))
        (site,) = made.run(step_node_budget=1, sub_chunks=2).sites
    assert site.decision.moving.parameters["unrolled"] is False
    assert site.decision.moving.parameters["sub_chunks"] == 1
    assert ", 'lhs M transposed', 1, " in made.text()
