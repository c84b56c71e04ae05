# SPDX-License-Identifier: Apache-2.0
"""The package's own errors reach the caller of a compiled function with their message and attributes. Their
tracebacks show frames of torch and of this package only if Dynamo is verbose."""

from __future__ import annotations

import os
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import overlap_inductor
from overlap_inductor.errors import ConfigError
from overlap_inductor.errors import OverlapError
from overlap_inductor.errors import StrictError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.torch_compat import versions
from overlap_inductor.torch_compat.plain_errors import shown_plainly
from tests.compile import fake_pass
from tests.compile.fake_pass import fake as fake
from tests.compile.fake_pass import inference
from tests.support.fork_base import ForkBase
from tests.support.installed import pretend_installed

pytestmark = pytest.mark.usefixtures("fake")
ROOT = Path(__file__).parents[2]
SCRIPT = "import torch\nf = torch.compile(lambda x: x @ x)\nf(torch.ones(2, 2))\n"


def of_compile(kind: type[OverlapError], **options: Any) -> OverlapError:
    with pytest.raises(kind) as error:
        inference(**options)
    return error.value


@pytest.mark.parametrize(
    ("variable", "value", "problem", "caches"),
    [
        ("OVERLAP_INDUCTOR_SCHEDULE", "rinng", "is not a known value; expected one of: auto, keep, ring, ", "1"),
        ("OVERLAP_INDUCTOR_SUB_CHUNKS", "0", "is not allowed; expected a whole number of at least 1", "0"),
        pytest.param(
            *("OVERLAP_INDUCTOR_SHEDULE", "ring", "is not a switch of overlap_inductor. Did you mean OVERLAP_", "1"),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_bad_variable_is_the_last_line_of_a_script(
    torch_base: ForkBase, tmp_path: Path, variable: str, value: str, problem: str, caches: str
) -> None:
    """Whether the caches are on decides in which hook of Inductor the switches are first read. The error must look the
    same in both cases."""
    pretend_installed(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OVERLAP_INDUCTOR", "TORCH"))}
    environment |= {"OVERLAP_INDUCTOR": "1", variable: value, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_AUTOGRAD_CACHE": caches}
    environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": caches}
    done = torch_base.run(str(tmp_path / "script.py"), env=environment)
    lines = done.stderr.splitlines()
    start = lines.index("Traceback (most recent call last):")
    assert done.returncode == 1
    assert lines[-1].startswith(f"overlap_inductor.errors.ConfigError: {variable}='{value}' {problem}")
    assert lines[start + 2].strip() == "f(torch.ones(2, 2))"
    assert "BackendCompilerFailed" not in done.stderr
    assert len(lines) - start < 10, done.stderr


def test_the_environment_can_be_mended_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR_SCHEDULE", "rings")
    error = of_compile(ConfigError, backend="overlap_inductor")
    assert str(error).startswith("OVERLAP_INDUCTOR_SCHEDULE='rings' is not a known value")
    monkeypatch.setenv("OVERLAP_INDUCTOR_SCHEDULE", "ring")
    inference(backend="overlap_inductor")
    assert [config.schedule for config, _, _ in fake_pass.calls] == ["ring"]


def test_a_strict_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake_pass.STATUS, "status", "refused")
    overlap_inductor.enable(mode="strict")
    error = of_compile(StrictError)
    assert str(error).startswith("OVERLAP_INDUCTOR=strict: 1 of 1 sites")
    assert "TORCHDYNAMO_VERBOSE" not in str(error)


def test_an_unsupported_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "FIRST_UNKNOWN", (2, 11))
    assert "Install a supported torch" in str(of_compile(UnsupportedError, backend="overlap_inductor"))


def test_an_error_is_pickled_with_its_own_type() -> None:
    """Launchers send errors from process to process."""
    error = of_compile(ConfigError, backend="overlap_inductor", options={"schedule": "rings"})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ConfigError and str(again) == str(error)


@pytest.mark.parametrize("verbose", [False, True])
def test_verbose_dynamo_keeps_the_frames(verbose: bool) -> None:
    with torch._dynamo.config.patch(verbose=verbose):
        error = of_compile(ConfigError, backend="overlap_inductor", options={"schedule": "rings"})
    functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert ("_config_with" in functions) == verbose


def test_attributes_stay_and_an_error_in_nested_blocks_is_replaced_once() -> None:
    with pytest.raises(ConfigError) as error, shown_plainly(), shown_plainly():
        overlap_inductor.OverlapConfig(schedule="rings")
    assert error.value.field == "schedule"
    assert type(error.value).__mro__[1] is ConfigError


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(ZeroDivisionError) as error, shown_plainly():
        raise ZeroDivisionError
    assert type(error.value) is ZeroDivisionError
