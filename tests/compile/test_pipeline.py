# SPDX-License-Identifier: Apache-2.0
"""A pass on the joint graph (forward and backward in one) is one entry of ``PIPELINE``. While overlap is on,
Inductor's setting ``joint_custom_post_pass`` (a slot) holds the pass. The pass is part of the cache key."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

import overlap_inductor
from overlap_inductor.inductor import pass_slot
from overlap_inductor.passes import pipeline
from overlap_inductor.passes.pipeline import JOINT
from overlap_inductor.passes.pipeline import POST_GRAD
from overlap_inductor.passes.pipeline import GraphContext
from tests.support.fake_group import fake_group

aten = torch.ops.aten


class CosForSin:
    """Replaces each ``sin`` by ``cos``, so results show whether the pass ran."""

    name = "cos for sin"

    def __init__(self, version: str = "1") -> None:
        self.version = version
        self.graphs: list[GraphContext] = []

    def run(self, graph: fx.Graph, context: GraphContext) -> None:
        self.graphs.append(context)
        for node in graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.cos.default


@pytest.fixture(autouse=True)
def _without_kernels() -> Iterator[None]:
    """Generated code calls ATen for each op, because building a C++ kernel takes a second."""
    with inductor_config.patch(fallback_by_default=True):
        yield


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[CosForSin]:
    one = CosForSin()
    monkeypatch.setattr(pipeline, "PIPELINE", [*pipeline.PIPELINE, (JOINT, one)])
    torch._dynamo.reset()
    yield one
    overlap_inductor.disable()
    torch._dynamo.reset()


def _compiled() -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(lambda x: x.sin() * 3, dynamic=False)


def _joint() -> object:
    return inductor_config.joint_custom_post_pass


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline without a pass on the joint graph."""
    monkeypatch.setattr(pipeline, "PIPELINE", [entry for entry in pipeline.PIPELINE if entry[0] != JOINT])


def test_both_slots_hold_our_passes_while_the_switch_is_on() -> None:
    before = _joint()
    with overlap_inductor.overlap():
        assert all(pass_slot.find(pass_slot.read(slot)) is not None for slot in (JOINT, POST_GRAD))
    assert _joint() is before


def test_without_an_entry_the_slot_is_left_alone(emptied: None) -> None:
    before = _joint()
    with overlap_inductor.overlap():
        assert _joint() is before and pass_slot.find(pass_slot.read(POST_GRAD)) is not None


@pytest.mark.parametrize("trains", [False, True])
def test_it_runs_while_the_switch_is_on(added: CosForSin, trains: bool) -> None:
    x = torch.randn(5, requires_grad=trains)
    with fresh_cache(), overlap_inductor.overlap():
        assert pass_slot.find(_joint()) is not None
        found = _compiled()(x)
    assert torch.allclose(found, x.cos() * 3) and len(added.graphs) == 1
    if trains:
        # The gradient is still that of sin: the joint graph already held the backward when the pass ran.
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert torch.allclose(gradient, x.cos() * 3)
    assert _joint() is None
    torch._dynamo.reset()
    with fresh_cache():
        assert torch.allclose(_compiled()(x), x.sin() * 3) and len(added.graphs) == 1


def test_enable_and_disable(added: CosForSin) -> None:
    x = torch.randn(5)
    with fresh_cache():
        overlap_inductor.enable()
        assert torch.allclose(_compiled()(x), x.cos() * 3)
        overlap_inductor.disable()
        assert _joint() is None


def test_by_the_backend(added: CosForSin) -> None:
    x = torch.randn(5)
    with fresh_cache():
        found = torch.compile(lambda x: x.sin() * 3, backend="overlap_inductor", dynamic=False)(x)
        assert torch.allclose(found, x.cos() * 3) and _joint() is None
        off = {"mode": "off"}
        found = torch.compile(lambda x: x.sin() * 5, backend="overlap_inductor", options=off, dynamic=False)(x)
        assert torch.allclose(found, x.sin() * 5)


def test_another_authors_pass_stays(added: CosForSin, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: list[str] = []

    class Theirs(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            theirs.append(str(len(added.graphs)))

        def uuid(self) -> str:
            return "theirs"

    one, x = Theirs(), torch.randn(5)
    with inductor_config.patch(joint_custom_post_pass=one), fresh_cache():
        with overlap_inductor.overlap():
            assert pass_slot.members(_joint()) == (one, pass_slot.find(_joint()))
            assert torch.allclose(_compiled()(x), x.cos() * 3) and theirs == ["0"]
        assert _joint() is one


def test_it_is_part_of_the_cache_key(added: CosForSin) -> None:
    """With another version of the pass, the graph is compiled again. With the same version, the graph comes from the
    cache, and the pass does not run again."""
    x = torch.randn(5)
    # Other tests of this process may have switched the caches off.
    on = inductor_config.patch(fx_graph_cache=True), torch._functorch.config.patch(enable_autograd_cache=True)
    with on[0], on[1], fresh_cache():
        for version, runs in (("1", 1), ("1", 1), ("2", 2)):
            torch._dynamo.reset()
            added.version = version
            with overlap_inductor.overlap():
                assert torch.allclose(_compiled()(x), x.cos() * 3)
            assert len(added.graphs) == runs, version


def test_it_runs_before_the_overlap_pass(added: CosForSin) -> None:
    from overlap_inductor.torch_compat.functional_collectives import all_gather

    with fresh_cache(), fake_group(2) as group, overlap_inductor.overlap(schedule="ring"):
        torch.compile(lambda x, w: all_gather(x.sin(), 0, group) @ w, dynamic=False)(
            torch.randn(6, 8), torch.randn(8, 5)
        )
        report = overlap_inductor.last_report()
    assert report is not None and report.counters()["sites_overlapped"] == 1
    assert "aten.sin" not in report.before and "aten.cos" in report.before and len(added.graphs) == 1
