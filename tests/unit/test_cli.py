# SPDX-License-Identifier: Apache-2.0
"""The command line: it imports little, names what is missing, and reports the demo's real outcome."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_inductor.cli import demo
from overlap_inductor.cli import main as cli
from overlap_inductor.cli.demo import DemoOptions
from overlap_inductor.cli.demo import Progress
from overlap_inductor.cli.explain_script import LAUNCHER_VARIABLES
from overlap_inductor.cli.local_ranks import RankError
from overlap_inductor.cli.local_ranks import rank_environment
from overlap_inductor.cli.local_ranks import run_ranks
from overlap_inductor.errors import ConfigError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.report import overview
from overlap_inductor.report import publish as reporting
from overlap_inductor.report.dump import write_dump
from overlap_inductor.switch import install
from tests.unit import sample_reports as samples

ROOT = Path(__file__).parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OVERLAP_INDUCTOR")}
    kept.update(PYTHONPATH=str(ROOT), **environment)
    return subprocess.run([sys.executable, *arguments], env=kept, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["report", "/nonexistent"]])
def test_no_torch_where_none_is_needed(arguments: list[str]) -> None:
    """Catches an import at the top of a module that every command loads: --help would take seconds."""
    script = (
        "import sys\nfrom overlap_inductor.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    )
    done = python("-c", script, *arguments)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_module_and_version() -> None:
    done = python("-m", "overlap_inductor", "--version")
    assert (done.returncode, done.stdout) == (0, "overlap_inductor 0.1.0\n")


def test_commands_are_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(command in text for command in ("demo", "doctor", "explain", "report", "bugreport"))
    with pytest.raises(SystemExit) as ending:
        cli.main(["profile"])
    assert ending.value.code == 2


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dump(samples.llama(4), tmp_path, 0)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "layers.{0..3}.mlp.down_proj" in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "OVERLAP_INDUCTOR_DUMP" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path) -> None:
    """``overlap-inductor report FOLDER | head``: neither a traceback nor Python's complaint at exit."""
    for graph in range(40):
        report = samples.llama(3)
        report.graph = f"{graph}_0"
        write_dump(report, tmp_path, 0)
    command = [sys.executable, "-m", "overlap_inductor", "report", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"0_0_inference")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == cli.READER_GONE


def test_a_reader_that_goes_away_is_not_taken_for_a_page_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dump(samples.llama(3), tmp_path, 0)
    reader, writer = os.pipe()

    def written(dump: Path) -> Path:
        os.close(reader)
        return dump / "index.html"

    monkeypatch.setattr(overview, "write_overview", written)
    with os.fdopen(writer, "w", buffering=1) as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert cli.main(["report", str(tmp_path)]) == cli.READER_GONE
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_another_broken_pipe_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(as_json: bool) -> int:
        raise BrokenPipeError("of something else")

    monkeypatch.setattr("overlap_inductor.cli.doctor.run_doctor", broken)
    with pytest.raises(BrokenPipeError, match="of something else"):
        cli.main(["doctor"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(as_json: bool) -> int:
        raise ModuleNotFoundError("No module named 'torch.x'", name="torch.x")

    monkeypatch.setattr("overlap_inductor.cli.doctor.run_doctor", missing)
    assert cli.main(["doctor"]) == 2
    assert "pip install torch" in capsys.readouterr().err


def test_a_missing_module_of_our_own_is_no_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a broken installation that is reported as a package to install."""

    def missing(as_json: bool) -> int:
        raise ModuleNotFoundError("No module named 'overlap_inductor.x'", name="overlap_inductor.x")

    monkeypatch.setattr("overlap_inductor.cli.doctor.run_doctor", missing)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["doctor"])


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
import torch.distributed._functional_collectives as collectives
print("arguments", sys.argv[1:])
def model(x, w):
    return collectives.wait_tensor(collectives.all_reduce(x @ w, "sum", dist.group.WORLD))
torch.compile(model)(torch.randn(64, 32), torch.randn(32, 16))
sys.exit(int(sys.argv[1]))
"""


def test_explain_runs_the_script_and_shows_its_graphs(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(SCRIPT)
    done = python("-m", "overlap_inductor", "explain", str(script), "3", "--steps", "2")
    assert "arguments ['3', '--steps', '2']" in done.stdout, done.stderr
    assert "matmul_all_reduce  mm [64 x 16 x 32] fp32" in done.stdout
    assert "mode report" in done.stdout
    assert done.returncode == 3, "the script's own exit status"


def test_explain_of_a_script_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "user.py"
    script.write_text("raise KeyError('mine')")
    before = list(sys.path), list(sys.argv)
    reporting.forget_reports()
    try:
        assert cli.main(["explain", str(script)]) == 1
    finally:
        install.disable()
    assert (sys.path, sys.argv) == before
    shown = capsys.readouterr()
    assert "KeyError: 'mine'" in shown.err
    assert "compiled no graph" in shown.out


@pytest.mark.parametrize(
    ("line", "variable"),
    [
        ("dist.init_process_group('gloo')", "RANK"),
        ("os.environ['LOCAL_RANK']", "LOCAL_RANK"),
        ("try: os.environ['WORLD_SIZE']\nexcept KeyError: raise OSError('tp_plan needs a group')", "WORLD_SIZE"),
        ("{}['RANKS']", ""),
    ],
)
def test_explain_of_a_script_that_a_launcher_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, variable: str
) -> None:
    """The cause is the missing launcher, and the command is to be read off the screen."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "my train.py"
    script.write_text(f"import os\nimport torch.distributed as dist\n{line}\n")
    reporting.forget_reports()
    try:
        assert cli.main(["explain", str(script), "--steps", "2"]) == 1
    finally:
        install.disable()
    shown = capsys.readouterr()
    command = f"torchrun --nproc-per-node 2 -m overlap_inductor explain '{script}' --steps 2\n"
    assert (f"{variable} is not set" in shown.err and shown.err.endswith(command)) == bool(variable)
    assert ("torchrun" in shown.err) == bool(variable)
    assert ("compiled no graph" in shown.out) == (not variable)


def test_the_reader_of_an_explained_script_may_go_away(tmp_path: Path) -> None:
    """``overlap-inductor explain script.py | head -1``, while the script itself prints."""
    script = tmp_path / "user.py"
    script.write_text("while True:\n    print('a line of the script', flush=True)\n")
    command = [sys.executable, "-m", "overlap_inductor", "explain", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"a line of the script\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == cli.READER_GONE


def test_explain_of_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(tmp_path / "none.py")]) == 2
    assert "none.py is not a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"ranks": 3}, "--ranks 3"),
        ({"ranks": 1}, "--ranks 1"),
        ({"tokens": 33}, "--tokens 33"),
        ({"hidden": 100}, "--hidden 100"),
        ({"layers": 0}, "--layers 0"),
        ({"parts": ("mamba",)}, "--parts mamba"),
        ({"parts": ()}, "--parts"),
        ({"device": "cuda", "ranks": 512}, "--device cuda"),
    ],
)
def test_demo_options_that_cannot_be(options: dict[str, Any], names: str) -> None:
    """Catches options that would fail minutes later, inside a rank."""
    with pytest.raises(ConfigError, match=names):
        demo.run_demo(DemoOptions(**{"device": "cpu", "parts": ("block",), **options}))


@pytest.mark.parametrize(
    ("gpus", "nccl", "cuda", "visible", "why"),
    [
        (0, True, "13.0", None, "this machine has 0 that torch can use; run it where nvidia-smi shows two,"),
        (1, True, "13.0", "3", "CUDA_VISIBLE_DEVICES=3 has 1 that torch can use;"),
        (8, False, "13.0", None, "is built without NCCL; install"),
        (0, False, None, None, "is built without CUDA; install"),
    ],
)
def test_demo_on_gpus_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, gpus: int, nccl: bool, cuda: str | None, visible: str | None, why: str
) -> None:
    """Catches the number of ranks blamed, which nobody asked for, and a GPU looked for where torch is at fault."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=f"--device cuda: the demo needs 2 GPUs, and .*{why}.* or use --device cpu"):
        demo.run_demo(DemoOptions(device="cuda", parts=("block",)))


@pytest.mark.parametrize(("gpus", "ranks"), [(2, 2), (3, 2), (7, 4), (9, 8)])
def test_demo_takes_as_many_gpus_as_its_model_divides_among(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert demo._resolve(DemoOptions(parts=("block",))) == ("cuda", ranks)


@pytest.mark.parametrize("below", ["", "x/y"])
def test_demo_folder_that_cannot_be_written(tmp_path: Path, below: str) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(ConfigError, match=f"--keep-dir {blocked / below}: cannot be written"):
        demo.run_demo(DemoOptions(device="cpu", parts=("block",), keep_dir=str(blocked / below)))


def test_demo_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "accelerate" else object())
    with pytest.raises(UnsupportedError, match="pip install accelerate .*--parts block"):
        demo.run_demo(DemoOptions())


def result(part: str = "block", overlapped: int = 2, passed: bool = True) -> dict[str, Any]:
    check = {"name": "output", "difference": 0.5, "largest": 1.0, "tolerance": 0.1, "passed": passed}
    graph = {
        "graph": "0_0",
        "phase": "forward",
        "headline": "2 sites found",
        "overlapped": overlapped,
        "rows": [["m", 1, "p", "mm", "x"]],
    }
    return {
        "part": part,
        "checks": [check],
        "plain_against_eager": [check],
        "times_ms": {"plain": 10.0, "overlap": 20.0},
        "graphs": [graph],
    }


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([result()], 0),
        ([result(passed=False)], 1),
        ([result(overlapped=0)], 1),
        ([], 1),
    ],
)
def test_demo_status_is_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    results: list[dict[str, Any]],
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a demo that passes though numbers differ, nothing was overlapped, or a part gave no result."""

    def run(command: Any, ranks: int, folder: Path, *, on_line: Any, **rest: Any) -> None:
        assert ranks == 2 and folder == tmp_path
        for one in results:
            on_line(json.dumps(one))

    monkeypatch.setattr(demo, "run_ranks", run)
    assert demo.run_demo(DemoOptions(device="cpu", parts=("block",), keep_dir=str(tmp_path))) == status
    out = capsys.readouterr().out
    assert ("PASSED" in out) == (status == 0)
    assert str(tmp_path / "reports") in out
    if results:
        assert "2.00x SLOWER" in out


def test_demo_shows_the_failing_ranks_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: Any, **rest: Any) -> None:
        raise RankError("rank 1 ended with exit status 1. The end of its log:\n  | ValueError: mine")

    monkeypatch.setattr(demo, "run_ranks", run)
    assert demo.run_demo(DemoOptions(device="cpu", parts=("block",), keep_dir=str(tmp_path))) == 1
    shown = capsys.readouterr()
    assert "ValueError: mine" in shown.err and str(tmp_path) in shown.err


def test_times_are_said_plainly() -> None:
    assert "1.50x faster" in demo.times_line(15.0, 10.0, "cpu")
    assert "no difference" in demo.times_line(10.0, 10.1, "cpu")
    assert "1.50x SLOWER" in demo.times_line(10.0, 15.0, "cuda")


def test_progress_passes_on_what_is_not_its_own() -> None:
    """Catches a rank's own print swallowed, or taken for a result."""
    stream = io.StringIO()
    progress = Progress(stream)
    for line in ('{"step": "one"}', "a warning", "[1, 2]", '{"part": "block"}', '{"step": "two"}'):
        progress.line(line)
    progress.wait()
    progress.finish()
    assert progress.results == [{"part": "block"}]
    text = re.sub(r"\d+\.\d s", "T", stream.getvalue())
    assert text == "  starting the ranks ... T\n  one ...\n  | a warning\n\n  | [1, 2]\n T\n  two ... T\n"


def ranks(tmp_path: Path, script: str, timeout: float = 20.0) -> list[str]:
    lines: list[str] = []
    run_ranks(
        ["-c", script],
        2,
        tmp_path,
        environment=rank_environment("cpu"),
        timeout=timeout,
        on_line=lines.append,
        on_wait=lambda: None,
    )
    return lines


def test_ranks_get_their_variables_and_rank_0_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_INDUCTOR", "strict")
    script = (
        "import os; print(*(os.environ.get(n) for n in ('RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS', 'OVERLAP_INDUCTOR')))"
    )
    assert ranks(tmp_path, script) == ["0 2 1 None"], "the caller's switches must not reach the plain run"
    assert (tmp_path / "rank_1.log").read_text() == "1 2 1 None\n"


def test_a_rank_that_raises_stops_the_others_and_is_shown(tmp_path: Path) -> None:
    script = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('mine')\ntime.sleep(60)"
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 ended with exit status 1.*ValueError: mine"):
        ranks(tmp_path, script)
    assert time.monotonic() - start < 15


def test_hung_ranks_are_stopped(tmp_path: Path) -> None:
    """Catches a demo that never ends, also where a rank ignores the polite signal."""
    script = (
        f"import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(os.path.join({str(tmp_path)!r},"
        " 'pid' + os.environ['RANK']), 'w').write(str(os.getpid()))\ntime.sleep(120)"
    )
    with pytest.raises(RankError, match=r"rank 0, 1 did not finish within 2 s"):
        ranks(tmp_path, script, timeout=2.0)
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)
