# SPDX-License-Identifier: Apache-2.0
"""The file that ``overlap-inductor bugreport`` writes. The file must not name the user or the user's home folder. The
user name ``root`` may stay."""

from __future__ import annotations

import json
import os
import platform
import zipfile
from pathlib import Path

import pytest

from overlap_inductor.cli import bugreport
from overlap_inductor.cli import doctor_machine
from overlap_inductor.cli import main as cli
from overlap_inductor.cli.bugreport import Redaction
from overlap_inductor.cli.bugreport import write_bug_report
from overlap_inductor.errors import OverlapError
from overlap_inductor.report.dump import write_dump
from overlap_inductor.report.failure import Failure
from overlap_inductor.version import __version__
from tests.support.fork_base import ForkBase
from tests.unit import sample_reports as samples

ROOT = Path(__file__).parents[2]
HOME, USER = "/srv/accounts/tester", "tester"


@pytest.fixture(autouse=True)
def _tester(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.setattr(bugreport, "_user_name", lambda: USER)


def contents(file: Path) -> dict[str, str]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_it_holds_graphs_plans_versions_doctor_and_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_machine, "tool_output", lambda command: "NVIDIA H200, 570.1\n" * 2)
    dump, file = tmp_path / "dump", tmp_path / "out.zip"
    for rank in (0, 1):
        write_dump(samples.llama(2), dump, rank)
    write_dump(samples.broken(), dump, 1)
    (dump / "rank_0" / "0_0_inference" / "weights.safetensors").write_text("secret")
    assert cli.main(["bugreport", str(dump), "-o", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    found = contents(file)
    graphs = ("rank_0/0_0_inference", "rank_1/0_0_inference", "rank_1/3_0_inference")
    assert set(found) == {
        "versions.json",
        "doctor.json",
        "tracebacks.txt",
        *(f"reports/{graph}/{name}" for graph in graphs for name in bugreport.PACKED),
    }, "no other file of the folder may be packed"
    assert found["reports/rank_0/0_0_inference/graph.before.txt"] == samples.BEFORE
    assert found["reports/rank_0/0_0_inference/graph.after.txt"] == samples.AFTER
    assert json.loads(found["reports/rank_1/0_0_inference/sites.json"]) == samples.llama(2).to_dict()
    assert found["tracebacks.txt"].startswith("reports/rank_1/3_0_inference: the pass failed\nTraceback")
    assert "KeyError: 'made up'" in found["tracebacks.txt"]
    versions = json.loads(found["versions.json"])
    assert (versions["overlap_inductor"], versions["python"]) == (__version__, platform.python_version())
    assert versions["torch"] and "triton" in versions and versions["gpus"] == ["NVIDIA H200, 570.1"] * 2
    assert {"usable", "checks"} == json.loads(found["doctor.json"]).keys()


def test_no_file_names_the_user_or_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR_DUMP", f"{HOME}/dump")
    text = f"{HOME}/job/train.py, /tmp/torchinductor_{USER}/x, /home/{USER}/y, /Users/{USER}x/z; by {USER}."
    report = samples.llama(1)
    report.before += f"# {text}\n"
    report.notices.append(text)
    report.failures.append(Failure("pass", "KeyError", text))
    folder = tmp_path / "dumps of tester" / "run"
    write_dump(report, folder, 0)
    found = contents(write_bug_report(str(folder.parent.parent), str(tmp_path / "out.zip")))
    assert all(USER not in name and USER not in content for name, content in found.items())
    assert "DUMP" in found["doctor.json"] and "~/dump" in found["doctor.json"]
    expected = "~/job/train.py, /tmp/torchinductor_<user>/x, ~/y, ~/z; by <user>."
    place = "reports/dumps of <user>/run/rank_0/0_0_inference"
    assert expected in found[f"{place}/graph.before.txt"]
    assert json.loads(found[f"{place}/sites.json"])["notices"][-1] == expected
    assert expected in found["tracebacks.txt"]


@pytest.mark.parametrize(
    ("home", "user", "text", "expected"),
    [
        ("/srv/accounts/tester", "tester", "mtester and tester_2 of testerl", "mtester and <user>_2 of testerl"),
        (
            "/srv/accounts/tester",
            "tester",
            "/srv/accounts/tester-old/x in /srv/accounts/tester.",
            "/srv/accounts/<user>-old/x in ~.",
        ),
        ("/root", "root", "/root/x in the root module", "~/x in the root module"),
        ("/", "", "/usr/lib and mm.default", "/usr/lib and mm.default"),
        ("/srv/köln", "köln", r'"/srv/k\u00f6ln/x by k\u00f6ln" and /srv/köln/x', '"~/x by <user>" and ~/x'),
        ("/srv/a", "", r'"/home/k\u00f6ln\n"', r'"~\n"'),
        ("/srv/a+b", "a+b", "/srv/a+b/x by a+b, not aab", "~/x by <user>, not aab"),
    ],
)
def test_redaction(home: str, user: str, text: str, expected: str) -> None:
    assert Redaction(home, user)(text) == expected


def test_a_folder_without_reports_is_an_error_that_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bugreport", str(tmp_path), "-o", str(tmp_path / "out.zip")]) == 2
    assert "OVERLAP_INDUCTOR_DUMP" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_dump(samples.block(), tmp_path / "dump", 0)
    with pytest.raises(OverlapError, match=r"missing/out\.zip cannot be written .*-o FILE"):
        write_bug_report(str(tmp_path / "dump"), str(tmp_path / "missing" / "out.zip"))


def test_a_process_without_a_user_name_has_none_to_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(bugreport.getpass, "getuser", nameless)
    monkeypatch.setenv("HOME", "/")
    assert Redaction()("/usr/lib/x") == "/usr/lib/x"


SCRIPT = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from overlap_inductor.passes.find import SiteFinder
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
import torch.distributed._functional_collectives as collectives
def model(x, w):
    return collectives.wait_tensor(collectives.all_reduce(x @ w, "sum", dist.group.WORLD))
def broken(self):
    raise IndexError("made up")
SiteFinder.run = broken
torch.compile(model, backend="overlap_inductor")(torch.randn(64, 32), torch.randn(32, 16))
print(torch._dynamo.utils.counters["overlap_inductor"]["failed"])
"""


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_a_pass_that_fails_in_a_compile_leaves_what_a_bug_report_needs(
    inductor_base: ForkBase, tmp_path: Path, mode: str
) -> None:
    """In mode ``on``, the compile continues. In mode ``strict``, the compile raises."""
    script, dump = tmp_path / "script.py", tmp_path / "dump"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OVERLAP_INDUCTOR")}
    environment.update(PYTHONPATH=str(ROOT), OVERLAP_INDUCTOR=mode, OVERLAP_INDUCTOR_DUMP=str(dump))
    environment.update(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    done = inductor_base.run(str(script), env=environment)
    assert (done.returncode == 0) == (mode == "on"), done.stderr
    assert ("StrictError" in done.stderr) == (mode == "strict")
    assert (done.stdout == "1\n") == (mode == "on")
    assert "run again with OVERLAP_INDUCTOR_DUMP=FOLDER, then run `overlap-inductor bugreport FOLDER`" in done.stderr
    found = contents(write_bug_report(str(dump), str(tmp_path / "out.zip")))
    assert 'File "overlap_inductor/passes/overlap_pass.py"' in found["tracebacks.txt"]
    assert "IndexError: made up" in found["tracebacks.txt"]
    assert "aten.mm.default" in found["reports/rank_0/0_0_inference/graph.before.txt"]


@pytest.mark.parametrize("damage", ["half", "gone"])
def test_a_damaged_dump_is_an_error_that_names_its_folder(tmp_path: Path, damage: str) -> None:
    place = write_dump(samples.block(), tmp_path, 0)
    assert place is not None
    if damage == "half":
        (place / "sites.json").write_text('{"sites": [')
    else:
        (place / "graph.after.txt").unlink()
    with pytest.raises(OverlapError, match=r"1_0_forward.*remove .*1_0_forward"):
        write_bug_report(str(tmp_path), str(tmp_path / "out.zip"))
