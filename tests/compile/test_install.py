# SPDX-License-Identifier: Apache-2.0
"""Switching overlap on and off.

While overlap is on, the pass runs once in each forward and inference graph, unless other code has replaced it. A
backward has the configuration of its forward. Passes of other authors run beside ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.output_code import CompiledFxGraph

import overlap_inductor
from overlap_inductor.inductor import compile_scope
from overlap_inductor.inductor import pass_slot
from overlap_inductor.report import publish as reporting
from overlap_inductor.switch.backend import overlap_inductor as backend
from tests.compile.fake_pass import calls
from tests.compile.fake_pass import count
from tests.compile.fake_pass import fake as fake
from tests.compile.fake_pass import inference
from tests.compile.fake_pass import ours_of

pytestmark = pytest.mark.usefixtures("fake")
TAKES_LIST = pass_slot.TAKES_LIST


def slot() -> Any:
    return inductor_config.post_grad_custom_post_pass


def set_slot(value: Any) -> None:
    inductor_config.post_grad_custom_post_pass = value


@pytest.fixture(autouse=True)
def empty_slot() -> Any:
    yield
    set_slot(None)


class UserPass(custom_graph_pass.CustomGraphPass):
    """Another author's pass. It records how often our pass has run before it."""

    def __init__(self) -> None:
        self.ours_before: list[int] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.ours_before.append(len(calls))

    def uuid(self) -> str:
        return "UserPass"


def training() -> torch.Tensor:
    """Run a forward. ``.backward()`` on the result compiles the backward graph."""
    weight = torch.ones(2, 2, requires_grad=True)
    return torch.compile(lambda x: x @ weight @ weight)(torch.ones(2, 2)).sum()


def phases() -> list[str | None]:
    return [phase for _, _, phase in calls]


def schedules() -> list[str]:
    return [config.schedule for config, _, _ in calls]


def test_enabled_pass_runs_in_forward_backward_and_inference() -> None:
    overlap_inductor.enable(schedule="ring")
    training().backward()
    inference()
    assert phases() == ["forward", "backward", "inference"]
    assert [is_inference for _, is_inference, _ in calls] == [False, False, True]
    assert schedules() == ["ring"] * 3
    assert [r.phase for r in reporting.all_reports()] == ["forward", "backward", "inference"]
    assert reporting.last_report() is reporting.all_reports()[-1]
    number = sum(len(r.sites) for r in reporting.all_reports())
    assert number > 3
    assert count() == {"sites_found": number, "sites_overlapped": number, "schedule.ring": number}


def functions() -> list[Any]:
    owners = [(compile_fx, "_compile_fx_inner"), (compile_fx, "fx_codegen_and_compile")]
    return [vars(o)[n] for o, n in [*owners, (CompiledFxGraph, "post_compile"), (AOTAutogradCache, "try_load")]]


def test_disable_leaves_nothing_behind() -> None:
    before = functions()
    overlap_inductor.enable()
    assert all(new is not old for new, old in zip(functions(), before, strict=True))
    overlap_inductor.disable()
    assert functions() == before
    assert slot() is None
    assert inductor_config._config["post_grad_custom_post_pass"].default is None
    inference()
    assert calls == [] and count() == {}


@pytest.mark.parametrize("switch_off", [lambda: overlap_inductor.enable(mode="off"), lambda: None])
def test_mode_off_changes_nothing_in_inductor(switch_off: Callable[[], None]) -> None:
    before = functions()
    switch_off()
    assert functions() == before and slot() is None
    inference()
    assert calls == []


def test_the_environment_can_switch_off_an_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR", "0")
    overlap_inductor.enable()
    inference()
    assert calls == []


def test_second_enable_replaces_the_first() -> None:
    overlap_inductor.enable(schedule="ring")
    overlap_inductor.enable(schedule="keep")
    inference()
    assert schedules() == ["keep"]
    overlap_inductor.enable(mode="off")
    inference()
    assert schedules() == ["keep"] and slot() is None


def compiled_here(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def said_by(caplog: pytest.LogCaptureFixture, switch: Callable[[], Any]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "overlap_inductor"):
        switch()
    return [r.getMessage() for r in ours_of(caplog)]


def test_enable_names_functions_that_are_already_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """A function that was compiled before ``enable`` keeps its code, so ``enable`` must warn the user."""
    compiled = torch.compile(compiled_here)
    compiled(torch.ones(2, 2))
    (text,) = said_by(caplog, lambda: overlap_inductor.enable(schedule="ring"))
    assert "compiled_here (test_install.py:" in text and "torch.compiler.reset()" in text
    compiled(torch.ones(2, 2))
    assert calls == [], "the function keeps its code, as the warning says"
    torch.compiler.reset()
    compiled(torch.ones(2, 2))
    assert len(calls) == 1, "the warning's advice helps"
    assert said_by(caplog, lambda: overlap_inductor.enable(schedule="ring", dump=None)) == [], "no switch changes"
    assert len(said_by(caplog, lambda: overlap_inductor.enable(schedule="keep"))) == 1


def test_enable_names_a_module_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2)))(torch.ones(2, 2))
    (text,) = said_by(caplog, overlap_inductor.enable)
    assert "keep their code: a module of torch.nn. " in text


@pytest.mark.parametrize("before", ["nothing", "eager", "ours", "reset", "off"])
def test_enable_does_not_warn_if_compiling_again_would_change_nothing(
    caplog: pytest.LogCaptureFixture, before: str
) -> None:
    if before != "nothing":
        compiler: Any = {"eager": "eager", "ours": backend}.get(before, "inductor")
        torch.compile(compiled_here, backend=compiler)(torch.ones(2, 2))
    if before == "reset":
        torch.compiler.reset()
    mode = "off" if before == "off" else "on"
    assert said_by(caplog, lambda: overlap_inductor.enable(mode=mode)) == []


def test_a_bad_field_leaves_the_old_state() -> None:
    overlap_inductor.enable(schedule="ring")
    with pytest.raises(overlap_inductor.errors.ConfigError, match="OVERLAP_INDUCTOR_SCHEDULE='rings'"):
        overlap_inductor.enable(schedule="rings")
    inference()
    assert schedules() == ["ring"]


@pytest.mark.parametrize("plain", [False, True])
def test_composes_with_a_pass_that_was_there_before(plain: bool) -> None:
    user = UserPass()
    theirs = user.__call__ if plain else user
    set_slot(theirs)
    overlap_inductor.enable()
    inference()
    assert user.ours_before == [0] and len(calls) == 1
    overlap_inductor.disable()
    assert slot() is theirs


@pytest.mark.skipif(not TAKES_LIST, reason="before torch 2.13, the slot cannot hold a list")
@pytest.mark.parametrize("make", [list, tuple])
def test_composes_with_a_list_and_restores_the_same_one(make: Callable[..., Any]) -> None:
    user = UserPass()
    theirs = make([user])
    set_slot(theirs)
    overlap_inductor.enable()
    assert theirs == make([user]), "the user's own list must not change"
    assert type(slot()) is make
    inference()
    assert user.ours_before == [0] and len(calls) == 1
    overlap_inductor.disable()
    assert slot() is theirs


@pytest.mark.skipif(not TAKES_LIST, reason="before torch 2.13, the slot cannot hold a list")
def test_a_pass_that_is_appended_after_ours_stays_after_disable() -> None:
    user = UserPass()
    overlap_inductor.enable()
    set_slot([slot(), user])
    inference()
    assert user.ours_before == [1] and len(calls) == 1
    overlap_inductor.disable()
    assert pass_slot.members(slot()) == (user,)


def test_another_pass_may_call_ours_which_does_nothing_after_disable() -> None:
    user = UserPass()
    overlap_inductor.enable()
    ours = slot()

    def both(graph: torch.fx.Graph) -> None:
        ours(graph)
        user(graph)

    set_slot(both)
    inference()
    assert user.ours_before == [1] and len(calls) == 1
    overlap_inductor.disable()
    inference()
    assert user.ours_before == [1, 1] and len(calls) == 1


@pytest.mark.skipif(TAKES_LIST, reason="torch 2.13 and later take a list")
def test_a_chain_is_cacheable_only_if_each_of_its_passes_is() -> None:
    user = UserPass()
    set_slot(user)
    overlap_inductor.enable()
    first = slot().uuid()
    assert "UserPass" in first
    overlap_inductor.enable(sub_chunks=7)
    assert slot().uuid() != first
    overlap_inductor.disable()
    set_slot(lambda graph: None)
    overlap_inductor.enable()
    assert slot().uuid() is None


def test_replaced_slot_is_noticed_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    overlap_inductor.enable()
    set_slot(UserPass())
    with caplog.at_level(logging.WARNING, "overlap_inductor"):
        inference()
        inference()
    (record,) = ours_of(caplog)
    assert "UserPass (module tests.compile.test_install)" in record.getMessage()
    assert calls == []


def test_replaced_by_an_option_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    overlap_inductor.enable()
    with caplog.at_level(logging.WARNING, "overlap_inductor"):
        inference(options={"post_grad_custom_post_pass": UserPass()})
    assert "now holds UserPass" in caplog.text


def test_there_is_no_warning_if_the_pass_ran(caplog: pytest.LogCaptureFixture) -> None:
    overlap_inductor.enable(mode="report")
    with caplog.at_level(logging.WARNING, "overlap_inductor"):
        training().backward()
    assert ours_of(caplog) == [] and len(calls) == 2


def test_installed_twice_runs_once_a_graph() -> None:
    """Both enable() and the backend may install our pass, or another pass may call our pass twice. In either case, our
    pass must run once."""
    overlap_inductor.enable()
    torch.compile(lambda x: x @ x, backend=backend)(torch.ones(2, 2))
    assert len(calls) == 1
    ours = slot()

    def twice(graph: torch.fx.Graph) -> None:
        ours(graph)
        ours(graph)

    set_slot(twice)
    inference()
    assert len(calls) == 2
    assert count()["sites_found"] == 2


def test_the_pass_runs_inside_an_overlap_block_only() -> None:
    with overlap_inductor.overlap(schedule="ring") as config:
        assert config.schedule == "ring"
        inference()
    assert slot() is None
    inference()
    assert schedules() == ["ring"]


def test_backward_after_the_block_follows_its_forward() -> None:
    """The backward is compiled when it first runs, after the block has ended."""
    with overlap_inductor.overlap(schedule="ring"):
        loss = training()
    loss.backward()
    assert phases() == ["forward", "backward"]
    assert schedules() == ["ring", "ring"]


def test_backward_follows_its_forward_and_not_the_block_it_runs_in() -> None:
    overlap_inductor.enable(schedule="ring")
    loss = training()
    with overlap_inductor.overlap(schedule="keep"):
        loss.backward()
    assert schedules() == ["ring", "ring"]


def test_backward_of_a_forward_without_overlap_stays_without_overlap(caplog: pytest.LogCaptureFixture) -> None:
    overlap_inductor.enable()
    with overlap_inductor.overlap(mode="off"):
        loss = training()
    loss.backward()
    assert calls == [] and ours_of(caplog) == []


def test_backward_stays_without_overlap_if_another_pass_replaced_ours_in_the_forward() -> None:
    overlap_inductor.enable()
    ours = slot()
    set_slot(UserPass())
    loss = training()
    set_slot(ours)
    loss.backward()
    assert calls == []


def test_backward_of_a_forward_without_operations() -> None:
    """Inductor compiles nothing for this forward, so the pass cannot have seen it. The backward is still overlapped."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad @ grad

    with overlap_inductor.overlap(schedule="ring"):
        loss = torch.compile(Double.apply)(torch.ones(2, 2, requires_grad=True)).sum()
    loss.backward()
    assert (schedules()[-1], phases()[-1]) == ("ring", "backward")


def test_backward_on_another_thread_follows_its_forward() -> None:
    """The autograd engine runs the backward of CUDA tensors on a thread of its own. This thread does not have the
    configuration of the forward's thread."""
    with overlap_inductor.overlap(schedule="ring"):
        loss = training()
    in_thread(loss.backward)
    assert schedules() == ["ring", "ring"]


def in_thread(work: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_enable_holds_in_other_threads_and_overlap_does_not() -> None:
    overlap_inductor.enable(schedule="ring")
    in_thread(inference)
    assert schedules() == ["ring"]
    overlap_inductor.disable()
    with overlap_inductor.overlap(schedule="ring"):
        in_thread(inference)
    assert schedules() == ["ring"]


def test_blocks_nest_and_may_be_left_in_any_order() -> None:
    overlap_inductor.enable(schedule="auto")
    outer, inner = overlap_inductor.overlap(schedule="ring"), overlap_inductor.overlap(mode="off")
    outer.__enter__()
    inner.__enter__()
    inference()
    assert schedules() == []
    outer.__exit__(None, None, None)
    inference()
    assert schedules() == []
    inner.__exit__(None, None, None)
    inference()
    assert schedules() == ["auto"]


def test_disable_inside_a_block_is_final() -> None:
    before = functions()
    with overlap_inductor.overlap():
        overlap_inductor.disable()
        inference()
    assert calls == [] and functions() == before and slot() is None


def test_pytorchs_own_pass_is_named_in_the_report() -> None:
    overlap_inductor.enable()
    with inductor_config.patch(_micro_pipeline_tp=True):
        inference()
    assert "_micro_pipeline_tp" in reporting.all_reports()[-1].notices[0]


def test_the_compile_scope_is_empty_outside_a_compile() -> None:
    assert (
        compile_scope.current_graph_name() is None
        and compile_scope.current_phase() is None
        and compile_scope.refusal_context() is None
    )
