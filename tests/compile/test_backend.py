# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(model, backend="overlap_inductor")``: options, modes, backwards that are compiled later,
and refused compiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass

import overlap_inductor
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.inductor import pass_slot
from overlap_inductor.report import publish as reporting
from overlap_inductor.switch.backend import overlap_inductor as backend
from overlap_inductor.torch_compat import versions
from tests.compile import fake_pass
from tests.compile.fake_pass import calls
from tests.compile.fake_pass import chain
from tests.compile.fake_pass import fake as fake
from tests.compile.fake_pass import refusals
from tests.support.fork_base import ForkBase
from tests.support.installed import pretend_installed

pytestmark = pytest.mark.usefixtures("fake")
SLOT = pass_slot.SLOT


class Noting(custom_graph_pass.CustomGraphPass):
    """A user's pass that records the value of an Inductor option, and how often our pass has run before it."""

    def __init__(self, option: str) -> None:
        self.option = option
        self.seen: list[Any] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append((getattr(inductor_config, self.option), len(calls)))

    def uuid(self) -> str:
        return "Noting"


@pytest.fixture(autouse=True)
def empty_slot() -> Iterator[None]:
    yield
    setattr(inductor_config, SLOT, None)


def inference(**keywords: Any) -> None:
    torch.compiler.reset()
    torch.compile(lambda x: x @ x, backend=backend, **keywords)(torch.ones(2, 2))


def test_our_options_and_inductors_go_in_one_dictionary() -> None:
    note = Noting("epilogue_fusion")
    inference(options={"schedule": "ring", "sub_chunks": 2, "epilogue-fusion": False, SLOT: note})
    ((config, is_inference, phase),) = calls
    assert (config.schedule, config.sub_chunks, is_inference, phase) == ("ring", 2, True, "inference")
    assert note.seen == [(False, 0)], "the user's pass runs before ours, under the user's option"
    assert getattr(inductor_config, SLOT) is None


def test_inductors_mode_is_applied_beside_ours() -> None:
    """``torch.compile`` takes a mode or options. With a mode, our options come from enable() or the environment."""
    note = Noting("coordinate_descent_tuning")
    setattr(inductor_config, SLOT, note)
    overlap_inductor.enable(mode="report")
    inference(mode="max-autotune-no-cudagraphs")
    assert calls[0][0].mode == "report"
    assert note.seen == [(True, 0)]


def test_a_pass_in_the_global_slot_still_runs() -> None:
    note = Noting("epilogue_fusion")
    setattr(inductor_config, SLOT, note)
    inference()
    assert len(note.seen) == 1 and len(calls) == 1


def test_unknown_option_names_near_ones() -> None:
    with pytest.raises(Exception) as error:
        inference(options={"shedule": "ring"})
    assert "options['shedule']: no such option" in chain(error.value)
    assert "Did you mean schedule" in chain(error.value)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_bad_value_in_the_options_names_the_option(enabled: bool) -> None:
    """The error must not name the environment's variable."""
    if enabled:
        overlap_inductor.enable()
    with pytest.raises(Exception) as error:
        inference(options={"schedule": "rings"})
    assert "ConfigError: options['schedule']='rings' is not a known value; expected one of: auto" in chain(error.value)
    assert "OVERLAP_INDUCTOR" not in chain(error.value)


def test_a_bad_variable_is_blamed_on_the_environment_even_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR_SCHEDULE", "rings")
    with pytest.raises(Exception) as error:
        inference(options={"sub_chunks": 2})
    assert "ConfigError: OVERLAP_INDUCTOR_SCHEDULE='rings'" in chain(error.value)


def test_inductors_mode_among_the_options_is_an_error_that_says_what_works() -> None:
    with pytest.raises(Exception) as error:
        inference(options={"mode": "max-autotune"})
    text = chain(error.value)
    assert "ConfigError: options['mode']='max-autotune' is not a known value; expected one of: off" in text
    assert "pass mode='max-autotune' to torch.compile" in text
    assert "options={**torch._inductor.list_mode_options('max-autotune'), 'schedule': 'auto'}" in text


def test_a_modes_settings_are_taken_as_options() -> None:
    """The error in the test above advises to pass a mode's settings as options."""
    note = Noting("coordinate_descent_tuning")
    settings = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    inference(options={**settings, "schedule": "ring", SLOT: note})
    assert calls[0][0].schedule == "ring"
    assert note.seen == [(True, 0)]


def test_backward_is_compiled_later_with_the_same_options() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    options = {"schedule": "ring", "sub_chunks": 3}
    loss = torch.compile(lambda x: x @ weight, backend=backend, options=options)(torch.ones(2, 2)).sum()
    overlap_inductor.enable(schedule="keep")
    loss.backward()
    assert [(c.schedule, c.sub_chunks, phase) for c, _, phase in calls] == [
        ("ring", 3, "forward"),
        ("ring", 3, "backward"),
    ]
    assert len(reporting.all_reports()) == 2


def test_two_models_with_different_options() -> None:
    loss = []
    for schedule in ("ring", "keep"):
        weight = torch.ones(2, 2, requires_grad=True)
        compiled = torch.compile(lambda x, w: x @ w, backend=backend, options={"schedule": schedule})
        loss.append(compiled(torch.ones(2, 2), weight).sum())
    loss[0].backward()
    loss[1].backward()
    assert [c.schedule for c, _, _ in calls] == ["ring", "keep", "ring", "keep"]


def test_options_go_on_top_of_enable_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR_SUB_CHUNKS", "7")
    inference(options={"schedule": "ring"})
    overlap_inductor.enable(numerics="allow_hop_rounding")
    inference(options={"schedule": "ring"})
    assert [(c.schedule, c.sub_chunks, c.numerics) for c, _, _ in calls] == [
        ("ring", 7, "preserve"),
        ("ring", 7, "allow_hop_rounding"),
    ]


@pytest.mark.parametrize("how", ["option", "environment"])
def test_off(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "environment":
        monkeypatch.setenv("OVERLAP_INDUCTOR", "0")
    else:
        overlap_inductor.enable()
    inference(options={"mode": "off"} if how == "option" else {})
    assert calls == []


def test_strict_by_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake_pass.STATUS, "status", "failed")
    with pytest.raises(Exception) as error:
        inference(options={"mode": "strict"})
    assert "StrictError" in chain(error.value)


def test_dump_by_option(tmp_path: Path) -> None:
    inference(options={"dump": str(tmp_path)})
    assert (tmp_path / "rank_0" / "0_0_inference" / "report.txt").exists()


def test_unsupported_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "FIRST_UNKNOWN", (2, 11))
    with pytest.raises(UnsupportedError, match="Install a supported torch"):
        backend(torch.fx.symbolic_trace(torch.nn.Identity()), [])
    assert versions.unsupported_reason("3.0.0a0+git") is not None
    assert versions.unsupported_reason("nonsense") is not None


def test_the_name_is_found_by_its_entry_point(inductor_base: ForkBase, tmp_path: Path) -> None:
    pretend_installed(tmp_path)
    code = (
        "from tests.compile import fake_pass; fake_pass.put_in_place(); import torch\n"
        "torch.compile(lambda x: x @ x, backend='overlap_inductor', options={'schedule': 'ring'})(torch.ones(2, 2))\n"
        "assert fake_pass.calls[0][0].schedule == 'ring'; torch.compiler.reset()\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = inductor_base.run("-c", code, env=environment)
    assert done.returncode == 0, done.stderr


def test_export_is_untouched_by_enable() -> None:
    """Export stops before Inductor, so the exported program has none of our ops."""
    overlap_inductor.enable()
    linear = torch.nn.Linear(2, 2)
    program = torch.export.export(linear, (torch.ones(1, 2),))
    assert calls == []
    torch.testing.assert_close(program.module()(torch.ones(1, 2)), linear(torch.ones(1, 2)))


def test_aot_inductor_is_refused_site_by_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTInductor's library runs without Python, so every site is refused. The library is not built, to save 20
    seconds."""
    library = tmp_path / "model.so"
    library.touch()
    monkeypatch.setattr("torch._inductor.codecache.AotCodeCompiler.compile", lambda *args, **keywords: [str(library)])
    overlap_inductor.enable()
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    assert "AOTInductor" in (refusals[-1] or "")
    assert reporting.last_report() is not None


class _Built(BaseException):
    """Ends a compile when its C++ is ready to be built, to save five seconds."""


def _build(*args: object, **keywords: object) -> None:
    raise _Built


def test_cpp_wrapper_is_refused_site_by_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.codecache.CppWrapperCodeCache.load_pybinding", _build)
    with pytest.raises(_Built):
        inference(options={"cpp_wrapper": True})
    assert refusals and all("cpp_wrapper" in (r or "") for r in refusals)


def test_ordinary_compiles_are_not_refused() -> None:
    inference()
    assert refusals == [None]
