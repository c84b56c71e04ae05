# SPDX-License-Identifier: Apache-2.0
"""The doctor reports the machine's facts. It fails only if something required is missing, or if something requested
cannot take effect."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.cli import doctor
from overlap_inductor.cli import doctor_machine
from overlap_inductor.cli.doctor_checks import BAD
from overlap_inductor.cli.doctor_checks import GOOD
from overlap_inductor.cli.doctor_checks import NOTE
from overlap_inductor.cli.doctor_checks import Check
from overlap_inductor.cli.doctor_checks import as_text
from overlap_inductor.cli.doctor_facts import SECTION as MACHINE_FACTS
from overlap_inductor.cli.doctor_facts import machine_facts
from overlap_inductor.cli.doctor_registered import HERE
from overlap_inductor.cli.doctor_registered import runs_here
from overlap_inductor.config import OverlapConfig
from overlap_inductor.inductor import probe
from overlap_inductor.lowerings.registry import SCHEDULES
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat import versions
from tests.support.fork_base import ForkBase


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OVERLAP_INDUCTOR") or name == doctor.AUTOLOAD:
            monkeypatch.delenv(name)
    monkeypatch.setattr(probe, "config_in_slot", lambda: None)
    monkeypatch.setattr(probe, "slot_content", lambda: "nothing")
    monkeypatch.setattr(probe, "hindrances", list)
    monkeypatch.setattr(doctor, "_registered", lambda group: True)


def named(checks: list[Check], name: str) -> Check:
    found = [check for check in checks if check.name == name]
    assert len(found) == 1, f"{name}: {[check.name for check in checks]}"
    return found[0]


def bad(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.state == BAD]


def test_nothing_asked_for_is_usable() -> None:
    assert bad(doctor.switches()) == []
    assert named(doctor.switches(), "by environment").state == NOTE


def test_asked_for_and_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR", "1")
    monkeypatch.setattr(probe, "config_in_slot", lambda: OverlapConfig.from_environment())
    check = named(doctor.switches(), "by environment")
    assert check.state == GOOD and "requested on, effective on" in check.value
    assert bad(doctor.switches()) == []


def test_asked_for_and_autoload_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set, but torch does not load entry points."""
    monkeypatch.setenv("OVERLAP_INDUCTOR", "strict")
    monkeypatch.setenv(doctor.AUTOLOAD, "0")
    check = named(doctor.switches(), "by environment")
    assert (check.state, check.value) == (BAD, "requested strict, effective off")
    assert doctor.AUTOLOAD in check.advice


def test_asked_for_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR", "on")
    monkeypatch.setattr(doctor, "_registered", lambda group: group != "torch.backends")
    checks = doctor.switches()
    assert bad(checks) == ["by environment"]
    assert "pip install" in named(checks, "by environment").advice
    assert named(checks, "entry point torch.backends").state == NOTE


def test_asked_for_and_replaced_by_another_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR", "on")
    monkeypatch.setattr(probe, "slot_content", lambda: "their_pass (module theirs)")
    assert "their_pass" in named(doctor.switches(), "by environment").advice


def test_asked_for_and_effective_with_another_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor compares every requested switch with the switch in effect, not only the mode."""
    monkeypatch.setenv("OVERLAP_INDUCTOR", "on")
    monkeypatch.setenv("OVERLAP_INDUCTOR_SUB_CHUNKS", "8")
    monkeypatch.setattr(probe, "config_in_slot", lambda: OverlapConfig(sub_chunks=2))
    check = named(doctor.switches(), "sub_chunks")
    assert (check.state, check.value) == (BAD, "requested 8, effective 2")


@pytest.mark.parametrize(("mode", "state"), [("on", BAD), ("off", NOTE)])
def test_a_hindrance_is_bad_only_if_overlap_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, mode: str, state: str
) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR", mode)
    monkeypatch.setattr(probe, "hindrances", lambda: [("cpp_wrapper", "unset it")])
    assert named(doctor.switches(), "cpp_wrapper").state == state


def test_machine_facts_are_named_with_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fact's source shows the user whether a machine file is in effect."""
    assert named(machine_facts(), "link_bytes").value == "1e+09 (shipped for cpu)"
    monkeypatch.setenv("OVERLAP_INDUCTOR_MACHINE", '{"link_bytes": 6.25e7, "matmul_flops": {"4": 4e10}}')
    found = machine_facts()
    assert named(found, "link_bytes") == Check(
        MACHINE_FACTS, "link_bytes", GOOD, "6.25e+07 (set by OVERLAP_INDUCTOR_MACHINE)"
    )
    assert named(found, "matmul_flops").value.startswith("2e+10 for 8 B, 4e+10 for 4 B, 5e+10 for 2 B")
    assert named(found, "step_seconds").state == NOTE
    monkeypatch.setenv("OVERLAP_INDUCTOR_MACHINE", "no/such/file")
    assert "not valid" in named(machine_facts(), "facts").value and bad(doctor.switches()) == ["configuration"]


def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR_SCHEDULE", "spiral")
    check = named(doctor.switches(), "configuration")
    assert check.state == BAD
    assert all(text in check.advice for text in ("OVERLAP_INDUCTOR_SCHEDULE", "spiral", "ring"))


@pytest.mark.parametrize(
    ("name", "near"),
    [("OVERLAP_INDUCTOR_SHEDULE", "OVERLAP_INDUCTOR_SCHEDULE?"), ("OVERLAP_INDUCTOR_MODE", "OVERLAP_INDUCTOR?")],
)
def test_a_switch_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch, name: str, near: str) -> None:
    monkeypatch.setenv(name, "ring")
    check = named(doctor.switches(), name)
    assert check.state == BAD and f"Did you mean {near}" in check.advice
    bad = [other.name for other in doctor.switches() if other.state == BAD and "entry point" not in other.name]
    assert bad == [name], "the misspelt variable must be reported once"


def test_dump_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR_DUMP", str(tmp_path / "not" / "yet"))
    assert named(doctor.switches(), "dump folder").state == GOOD
    assert list(tmp_path.iterdir()) == [], "the check must not create the folder"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OVERLAP_INDUCTOR_DUMP", str(tmp_path / "file" / "below"))
    assert named(doctor.switches(), "dump folder").state == BAD


def test_an_unsupported_torch_ends_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "torch_version", lambda: "2.10.1")
    checks = doctor.collect()
    assert bad(checks) == ["torch"]
    assert "2.11 to 2.15" in named(checks, "torch").advice
    assert {check.section for check in checks} == {"Software"}


def test_a_missing_triton_is_bad_only_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    for gpu, state in ((False, NOTE), (True, BAD)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert named(doctor_machine.software(), "triton").state == state


def test_no_backend_for_transfers_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert bad(doctor_machine.distributed()) == ["transport p2p"]
    monkeypatch.setattr(dist, "is_gloo_available", lambda: True)
    assert bad(doctor_machine.distributed()) == []


def test_gpus_without_peer_access_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU model {i}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (8, i))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) != (2, 0))
    monkeypatch.setattr(
        doctor_machine, "tool_output", lambda command: "GPU 0\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    )
    monkeypatch.setattr(doctor_machine, "symmetric_memory", list)
    checks = doctor_machine.gpus()
    assert named(checks, "GPUs").value.splitlines()[2] == "2: GPU model 2, compute capability 8.2"
    assert named(checks, "peer access").value == "missing: 2->0"
    assert named(checks, "NVLink").value == "2 links active on 3 GPUs"


def gpus(
    monkeypatch: pytest.MonkeyPatch, number: int, capability: tuple[int, int] = (9, 0), cut_off: tuple[int, ...] = ()
) -> None:
    """Pretend that this machine has ``number`` GPUs. Those in ``cut_off`` cannot reach any other GPU."""
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: not {a, b} & set(cut_off))
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(symmetric, "_reach", symmetric._reach.__wrapped__)


def answers() -> dict[str, str]:
    return {check.name: check.answer for check in runs_here()[1:]}


def test_every_schedule_says_whether_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    ranks, *checks = runs_here()
    assert (ranks.answer, ranks.value) == ("2", "on CPUs, because no GPU is visible")
    assert [check.name for check in checks] == [schedule.name for schedule in SCHEDULES]
    assert [check.name for check in checks if check.answer == "yes"] == ["ring", "early_start"]
    for check in checks[1:-1]:
        assert check.answer == "no" and check.state == NOTE and "needs NVIDIA GPUs" in check.value


def test_schedules_on_gpus_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4)
    assert runs_here()[0].value == "one on each GPU"
    assert set(answers().values()) == {"yes"}


def test_schedules_on_gpus_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2, capability=(8, 0))
    assert answers() == {
        schedule.name: "yes" if schedule.name in ("ring", "early_start") else "no" for schedule in SCHEDULES
    }
    assert "compute capability (8, 0)" in named(runs_here(), "fused").value


def test_schedules_on_gpus_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four GPUs, only the last is cut off. The doctor lists which GPUs each GPU cannot reach."""
    gpus(monkeypatch, 4, cut_off=(3,))
    assert [name for name, answer in answers().items() if answer == "yes"] == ["ring", "wave_groups", "early_start"]
    assert named(runs_here(), "chunked").value.splitlines() == [
        "GPU 0, 1, 2: this GPU cannot reach the memory of GPUs (3,)",
        "GPU 3: this GPU cannot reach the memory of GPUs (0, 1, 2)",
    ]


def test_one_gpu_reaches_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    assert "one of them on another machine" in runs_here()[0].value
    assert named(runs_here(), "fused").value == "it needs 2 GPUs, one for each rank; this process sees 1"
    assert answers()["ring"] == "yes"


def test_a_torch_without_the_backend_runs_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name != "nccl")
    assert "without nccl" in named(runs_here(), "ring").value


def test_the_doctor_names_no_schedule() -> None:
    """A list of schedules in the doctor's sources would miss a new schedule."""
    sources = [path.read_text() for path in Path(doctor.__file__).parent.glob("doctor*.py")]
    assert len(sources) >= 4
    assert not re.findall(rf"\b({'|'.join(schedule.name for schedule in SCHEDULES)})\b", "".join(sources))


@pytest.mark.parametrize(("mode", "bad_names"), [("on", ["OVERLAP_INDUCTOR_SCHEDULE=fused"]), ("off", [])])
def test_a_schedule_that_is_asked_for_and_cannot_run_here(
    monkeypatch: pytest.MonkeyPatch, mode: str, bad_names: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("OVERLAP_INDUCTOR", mode)
    monkeypatch.setenv("OVERLAP_INDUCTOR_SCHEDULE", "fused")
    monkeypatch.setattr(probe, "config_in_slot", lambda: OverlapConfig.from_environment())
    checks = doctor.switches()
    assert bad(checks) == bad_names
    monkeypatch.setenv("OVERLAP_INDUCTOR_SCHEDULE", "ring")
    assert bad(doctor.switches()) == []


def test_symmetric_memory_names_the_schedules_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "symmetric_memory_backend", lambda: "CUDA")
    monkeypatch.setattr(probe, "has_multicast", lambda: True)
    assert doctor_machine.symmetric_memory()[0].value == "backend CUDA; used by fused, chunked, small_message"


def test_symmetric_memory_that_is_absent_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise RuntimeError("no CUDA")

    monkeypatch.setattr(probe, "symmetric_memory_backend", absent)
    (check,) = doctor_machine.symmetric_memory()
    assert check.state == NOTE
    assert check.value == (
        "not available: no CUDA; needed by fused, chunked, small_message; not needed by ring, wave_groups, early_start"
    )


@pytest.mark.parametrize(
    ("scope", "refusal", "state"),
    [("1\n", "", GOOD), ("2\n", "", NOTE), ("0\n", "Operation not permitted", NOTE), (None, "", GOOD)],
)
def test_handle_exchange(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str | None, refusal: str, state: str
) -> None:
    file = tmp_path / "ptrace_scope"
    if scope is not None:
        file.write_text(scope)
    monkeypatch.setattr(doctor_machine, "_PTRACE_SCOPE", file)
    monkeypatch.setattr(doctor_machine, "_FABRIC_CHANNELS", tmp_path / "absent")
    monkeypatch.setattr(doctor_machine, "pidfd_refusal", lambda: refusal)
    check = doctor_machine.handle_exchange("GPUs")
    assert check.state == state
    assert bool(check.advice) == (state != GOOD)


def test_pidfd_probe_leaks_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    refusals = {doctor_machine.pidfd_refusal() for _ in range(5)}
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(refusals) == 1


@pytest.mark.parametrize(
    ("command", "expected"),
    [(["no-such-tool-here"], ""), (["false"], ""), (["sleep", "30"], ""), (["echo", "links"], "links\n")],
)
def test_an_absent_failing_or_hanging_tool_gives_an_empty_text(
    monkeypatch: pytest.MonkeyPatch, command: list[str], expected: str
) -> None:
    monkeypatch.setattr(doctor_machine, "_TOOL_SECONDS", 0.2)
    assert doctor_machine.tool_output(command) == expected


def test_text_marks_every_state_and_ends_with_the_verdict() -> None:
    checks = [
        Check("A", "one", GOOD, "1"),
        Check("A", "two", NOTE, "2\n3"),
        Check("B", "three", BAD, "4", "Do this.", "yes"),
    ]
    utf8, ascii_ = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "ascii")
    assert as_text(checks, utf8).splitlines() == [
        "A",
        "  \u2713 one  1",
        "  \u00b7 two  2",
        "         3",
        "",
        "B",
        "  \u2717 three  yes  4",
        "                -> Do this.",
        "",
        "Not usable as asked: three.",
    ]
    assert as_text(checks, ascii_).isascii(), "a terminal without UTF-8 must get ASCII only"
    assert as_text(checks[:2], utf8).endswith("Usable.\n")


LONG = "a reason of many words that is longer than a terminal is wide, as a path or a list of GPUs may be " * 3


def test_a_pipe_gets_whole_lines_without_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines must not be cut or wrapped, and a log file must not hold colour codes."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    text = as_text([Check("A [x]", "one", BAD, LONG, "[bold]Do[/bold] this.", "no")], io.StringIO())
    assert f"one  no  {LONG.rstrip()}\n" in text and "\x1b" not in text
    assert "A [x]\n" in text and "-> [bold]Do[/bold] this.\n" in text, "brackets are text, not markup"


def test_a_terminal_gets_lines_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = as_text([Check("A", "one", BAD, LONG, answer="no"), Check("A", "two", GOOD, "short")], Terminal())
    assert "\x1b[" in text
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    assert max(map(len, lines)) <= 60
    start = lines[1].index("a reason")
    words = [line[start:].strip() for line in lines if line[:start].strip() in ("", "\u2717 one  no", "x one  no")]
    assert " ".join(filter(None, words)) == LONG.strip(), "the reason stays in its column"


def test_json_and_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for state, status in ((GOOD, 0), (NOTE, 0), (BAD, 1)):
        monkeypatch.setattr(doctor, "collect", lambda state=state: [Check("S", "n", state, "v", "a")])
        assert doctor.run_doctor(as_json=True) == status
        value = json.loads(capsys.readouterr().out)
        assert value == {
            "usable": status == 0,
            "checks": [{"section": "S", "name": "n", "state": state, "value": "v", "advice": "a", "answer": ""}],
        }
        assert doctor.run_doctor() == status
        assert "n  v" in capsys.readouterr().out


def test_this_machine_in_a_process_of_its_own(inductor_base: ForkBase) -> None:
    """The whole command, without mocks, on any machine. Overlap is requested, but torch loads no entry points, so the
    exit status is 1."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OVERLAP_INDUCTOR")}
    environment.update(
        OVERLAP_INDUCTOR="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONPATH=str(Path(__file__).parents[2])
    )
    done = inductor_base.run("-m", "overlap_inductor", "doctor", "--json", env=environment)
    assert done.returncode == 1, done.stderr
    value = json.loads(done.stdout)
    assert "by environment" in [check["name"] for check in value["checks"] if check["state"] == BAD]
    sections = {
        "Software",
        "Distributed",
        "GPUs",
        "Patterns",
        "Schedules",
        HERE,
        "Transports",
        "Machine facts",
        "Switched on",
    }
    assert {check["section"] for check in value["checks"]} == sections
