# SPDX-License-Identifier: Apache-2.0
"""The cost of the pass in a compile, counted and not timed: evaluations of operators on fake tensors, and searches for
collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from overlap_inductor.inductor import hooks
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat import step_values
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.step_values import StepValues
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

LARGE = 10**6
"""A node budget within which every ring is unrolled."""


def blocks(layers: int) -> HandGraph:
    """Layers of tensor parallelism, each ``x + all_reduce(relu(x @ w) @ v)`` with one site."""
    made = HandGraph()
    x = made.input(16, 16)
    weights = [[made.input(*s, name=f"{n}{i}") for n, s in (("w", (16, 8)), ("v", (8, 16)))] for i in range(layers)]
    for w, v in weights:
        x = made.call(aten.add.Tensor, x, made.reduce(made.mm(made.call(aten.relu.default, made.mm(x, w)), v)))
    return made.output(x)


def counted(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Counter[str]:
    """How often ``run`` evaluates each operator on fake tensors."""
    seen: Counter[str] = Counter()
    dispatch = FakeTensorMode.dispatch

    def noted(mode: FakeTensorMode, function: Any, *args: Any, **kwargs: Any) -> Any:
        seen[str(function)] += 1
        return dispatch(mode, function, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noted)
    run()
    monkeypatch.undo()
    return seen


def test_steps_of_equal_layers_share_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further layers cause less than one evaluation for every 20 nodes that they add."""
    found = []
    for layers in (4, 8, 16):
        with fake_group(2):
            made = blocks(layers)
            before = len(made.graph.nodes)
            evaluated = counted(monkeypatch, lambda made=made: made.run(step_node_budget=LARGE))  # type: ignore[misc]
            found.append((sum(evaluated.values()), len(made.graph.nodes) - before))
    (small, fewest), (medium, fewer), (large, added) = found
    assert added - fewer == 2 * (fewer - fewest) and 0 < large <= max(small, medium) + (added - fewer) / 20, found


def test_steps_are_not_evaluated_again_after_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the passes, Inductor evaluates every added node without a value. The steps have values, so further layers
    cause no evaluations of this package's ops."""

    def run(layers: int) -> Counter[str]:
        def model(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            for w, v in zip(weights[::2], weights[1::2], strict=True):
                x = x + all_reduce(torch.relu(x @ w) @ v, "sum", torch.distributed.group.WORLD)
            return x

        shapes = [(16, 16), *[(16, 8), (8, 16)] * layers]
        with fake_group(2), torch.no_grad():
            return counted(monkeypatch, lambda: reports_of(model, *map(torch.empty, shapes), step_node_budget=LARGE))

    few, many = run(2), run(6)
    ours = {name for name in many if name.startswith("overlap_inductor.")}
    assert "overlap_inductor.take.default" in ours and "overlap_inductor.exchange_send.default" in ours
    assert {n: many[n] - few[n] for n in ours} == dict.fromkeys(ours, 0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_step_has_a_value_of_its_own(dynamic: bool) -> None:
    """A step has the value that its fake function returns. Only the step's views share memory with it."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(16, 16, dynamic=(0,) if dynamic else ())
        for i in range(3):
            x = made.reduce(made.mm(x, made.input(16, 16, name=f"w{i}")))
        made.output(x)
        assert made.run(step_node_budget=LARGE).counters()["sites_overlapped"] == 3
    steps = [n for n in made.graph.nodes if "overlap_site" in n.meta]
    assert len(steps) > 60
    bases: dict[int, fx.Node] = {}
    for node in steps:
        value = node.meta["val"]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with made.mode:
            anew = node.target(*args, **kwargs)  # type: ignore[operator]
        # The stride of a dim of size 1 has no meaning, and may be above 1 in torch 2.15.
        found, expected = (
            [(str(n), n == 1 or str(s)) for n, s in zip(v.shape, v.stride(), strict=True)] for v in (value, anew)
        )
        assert found == expected, node
        assert (value.dtype, value.device, value.fake_mode) == (anew.dtype, anew.device, made.mode), node
        inputs = {t.untyped_storage()._cdata for t in operators.tensors_in((args, kwargs))}
        memory = value.untyped_storage()._cdata
        shares, would = (v.untyped_storage()._cdata in inputs for v in (value, anew))
        assert shares == would, node
        assert shares or bases.setdefault(memory, node) is node, f"{node} shares memory with {bases[memory]}"


def test_a_value_depends_on_its_arguments() -> None:
    """The type of a number among the arguments decides the dtype. A replaced argument makes the value out of date."""
    with fake_group(2):
        made = HandGraph()
    x, y = made.input(4, 6, dtype=torch.int64), made.input(6, 6, dtype=torch.int64, name="y")
    values = StepValues()
    results = []
    for other in (1, 1.0, True):
        node = made.graph.call_function(aten.add.Tensor, (x, other))
        results.append(values.evaluate(node, "a site").dtype)
    assert results == [torch.int64, torch.float32, torch.int64] and values.evaluated == 3
    assert step_values.up_to_date(node)
    node.replace_input_with(x, y)
    assert not step_values.up_to_date(node)
    assert values.evaluate(node, "a site").shape == (6, 6) and step_values.up_to_date(node)


def test_a_view_is_made_from_its_own_base() -> None:
    """An equal view of another tensor is not evaluated. It has this tensor's memory, at an offset behind the tensor's
    own. ``as_strided`` is evaluated, because its offset does not depend on the tensor's."""
    with fake_group(2):
        made = HandGraph()
    whole, other = made.input(8, 6), made.input(4, 6, name="other")
    values = StepValues()
    rows = [other, made.call(aten.slice.Tensor, whole, 0, 4, 8)]
    for function, args, offsets, evaluated in (
        (aten.slice.Tensor, (0, 1, 3), [6, 30], 1),
        (aten.as_strided.default, ([2, 6], [6, 1], 6), [6, 6], 2),
    ):
        before = values.evaluated
        views = [made.graph.call_function(function, (x, *args)) for x in rows]
        found = [values.result(view) for view in views]
        assert values.evaluated - before == evaluated and [v.storage_offset() for v in found] == offsets
        assert [(tuple(v.shape), v.stride()) for v in found] == [((2, 6), (6, 1))] * 2
        bases = [x.meta["val"].untyped_storage()._cdata for x in rows]
        assert [v.untyped_storage()._cdata for v in found] == bases and bases[0] != bases[1]
        assert not any(map(step_values.up_to_date, views))


def test_a_view_that_the_graph_returns_keeps_its_value() -> None:
    """The graph's output reads the view, but has no value that must be evaluated."""
    with fake_group(2):
        made = HandGraph()
    x, alike = made.input(4, 6), made.input(4, 6, name="alike")
    view = made.call(aten.reshape.default, x, [24])
    again = made.call(aten.reshape.default, view, [6, 4])
    made.output(view, again)
    made.graph.output_node().meta["val"] = [n.meta["val"] for n in (view, again)]
    view.replace_input_with(x, alike)
    StepValues().keep(view)
    memory = alike.meta["val"].untyped_storage()._cdata
    for node in (view, again):
        assert step_values.up_to_date(node) and node.meta["val"].untyped_storage()._cdata == memory


def test_a_reader_of_a_replaced_tensor_keeps_its_value_if_that_is_right() -> None:
    """The reader keeps its value if the new tensor gives it equal strides. Otherwise the value is out of date."""
    with fake_group(2):
        made = HandGraph()
    x, alike, y = made.input(4, 6), made.input(4, 6, name="alike"), made.input(6, 4, name="y")
    turned = made.call(aten.permute.default, y, [1, 0])
    values = StepValues()
    for new, kept in ((alike, True), (turned, False)):
        reader = made.call(aten.relu.default, x)
        before = reader.meta["val"]
        reader.replace_input_with(x, new)
        values.keep(reader)
        assert step_values.up_to_date(reader) == kept and reader.meta["val"] is before
        reader.replace_input_with(new, y)
        assert not step_values.up_to_date(reader)


def shares_memory(node: fx.Node, other: fx.Node) -> bool:
    memory, others = (n.meta["val"].untyped_storage()._cdata for n in (node, other))
    return memory == others


def test_views_of_a_replaced_tensor_become_views_of_the_new_one() -> None:
    """A view of a view also becomes a view of the new tensor. A tensor computed from a view keeps its value."""
    with fake_group(2):
        made = HandGraph()
    x, new = made.input(4, 6), made.input(4, 6, name="new")
    view = made.call(aten.view.default, x, [24])
    second = made.call(aten.slice.Tensor, view, 0, 6, 12)
    computed = made.call(aten.relu.default, second)
    before = computed.meta["val"]
    view.replace_input_with(x, new)
    StepValues().keep(view)
    assert step_values.up_to_date(view) and step_values.up_to_date(second)
    assert shares_memory(view, new) and shares_memory(second, new)
    assert second.meta["val"].storage_offset() == 6 and computed.meta["val"] is before


def test_views_are_left_to_inductor_if_one_of_them_cannot_be_evaluated() -> None:
    """A split's result is a list, and ``StepValues.keep`` gives no new value to a list. So all views keep their old
    values and are out of date."""
    with fake_group(2):
        made = HandGraph()
    x, new = made.input(4, 6), made.input(4, 6, name="new")
    view = made.call(aten.view.default, x, [24])
    inner = made.call(aten.view.default, view, [6, 4])
    parts = made.call(aten.split.Tensor, view, 12)
    assert parts.meta["val"][0].untyped_storage()._cdata == x.meta["val"].untyped_storage()._cdata
    view.replace_input_with(x, new)
    StepValues().keep(view)
    assert not step_values.up_to_date(view) and not step_values.up_to_date(inner)
    assert shares_memory(view, x) and shares_memory(inner, x)


def test_what_follows_a_view_of_a_gathered_tensor_is_not_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps' buffer replaces the gathered tensor. The operators behind a view of the gathered tensor are evaluated
    as often as in mode ``report``, which leaves the graph as written."""

    def model(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gathered = all_gather(x, 0, torch.distributed.group.WORLD)
        return gathered @ w, gathered.view(1, 32, 16).sin().cos()

    def run(mode: str) -> Counter[str]:
        with fake_group(2), torch.no_grad():
            return counted(monkeypatch, lambda: reports_of(model, torch.empty(16, 16), torch.empty(16, 8), mode=mode))

    written, overlapped = run("report"), run("on")
    assert overlapped["overlap_inductor.gather_start.default"]
    for name in ("aten.sin.default", "aten.cos.default"):
        assert overlapped[name] == written[name] > 0


def test_collectives_are_not_searched_for_if_inductor_pads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor pads no matmul on a CPU, so ``beside_collective`` must not be called. Its search for a collective is
    slow."""
    asked: list[fx.Node] = []
    monkeypatch.setattr(hooks, "beside_collective", asked.append)

    def model(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x + all_reduce(torch.relu(x @ w) @ v, "sum", torch.distributed.group.WORLD)

    with fake_group(2):
        (report,) = reports_of(model, *map(torch.empty, [(16, 18), (18, 10), (10, 18)]))
    assert report.counters()["sites_overlapped"] == 1 and asked == []
