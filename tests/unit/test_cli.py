# SPDX-License-Identifier: Apache-2.0
"""The command line: it imports few modules, names a missing package or file, shows reports, and explains scripts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overlap_inductor.cli import main as cli
from overlap_inductor.cli.explain_script import LAUNCHER_VARIABLES
from overlap_inductor.report import overview
from overlap_inductor.report import publish as reporting
from overlap_inductor.report.dump import write_dump
from overlap_inductor.switch import install
from tests.support.fork_base import ForkBase
from tests.unit import sample_reports as samples

ROOT = Path(__file__).parents[2]


def python(*arguments: str, base: ForkBase | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a fork of ``base``. Without ``base``, run it in a new interpreter."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OVERLAP_INDUCTOR")}
    kept.update(PYTHONPATH=str(ROOT), **environment)
    if base:
        return base.run(*arguments, env=kept)
    return subprocess.run([sys.executable, *arguments], env=kept, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["report", "/nonexistent"]])
def test_commands_that_need_no_torch_import_none(arguments: list[str]) -> None:
    """If importing the command line also imported torch, ``--help`` would take seconds."""
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


def test_help_lists_the_commands_and_an_unknown_one_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
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
    """``overlap-inductor report FOLDER | head`` prints no traceback and no error about the closed pipe."""
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


def test_a_closed_pipe_is_not_reported_as_a_page_that_cannot_be_written(
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


def test_a_missing_module_of_our_own_is_not_reported_as_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a module of overlap_inductor is missing, the installation of overlap_inductor is broken. To install another
    package would not help."""

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


def test_explain_runs_the_script_and_shows_its_graphs(inductor_base: ForkBase, tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(SCRIPT)
    done = python("-m", "overlap_inductor", "explain", str(script), "3", "--steps", "2", base=inductor_base)
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
    assert shown.out.endswith("The script ended with exit status 1 before it compiled a graph.\n")


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
    """If the script fails because a variable of a launcher is not set, the error names the variable. The error then
    shows two commands: one with ``--ranks``, one with ``torchrun``. If another key is missing, the error shows no
    command."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # A call of init_process_group that fails still adds 1 to ``group_count``. Names of groups contain this count, so
    # the count is set back for later tests.
    world = torch.distributed.distributed_c10d._world
    monkeypatch.setattr(world, "group_count", world.group_count)
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
    assert ("torchrun" in shown.err) == (f"explain --ranks 8 '{script}' --steps 2\n" in shown.err) == bool(variable)


READER = """
import os, runpy, sys
reader, writer = os.pipe()
if not (command := os.fork()):
    os.dup2(writer, 1)
    os.close(reader)
    os.close(writer)
    runpy.run_module("overlap_inductor", run_name="__main__", alter_sys=True)
os.close(writer)
with open(reader) as lines:
    first = lines.readline()
print(first, os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]))
"""


def test_the_reader_of_an_explained_script_may_go_away(inductor_base: ForkBase, tmp_path: Path) -> None:
    """``overlap-inductor explain script.py | head -1`` ends quietly, even if the script itself writes into the closed
    pipe."""
    script = tmp_path / "user.py"
    script.write_text("while True:\n    print('a line of the script', flush=True)\n")
    done = python("-c", READER, "explain", str(script), base=inductor_base)
    assert done.stderr == ""
    assert done.stdout == f"a line of the script\n {cli.READER_GONE}\n"


LAUNCHED = """
import os
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
device = os.environ.get("SCRIPT_DEVICE", "cpu")
dist.init_process_group("nccl")
print("ranks", dist.get_world_size(), os.environ["WORLD_SIZE"], os.environ["RANK"])
def up(x, w):
    return collectives.all_gather_tensor(x, 0, dist.group.WORLD) @ w
def down(x, w):
    return collectives.wait_tensor(collectives.all_reduce(x @ w, "sum", dist.group.WORLD))
x = torch.empty(1024, 4096, dtype=torch.bfloat16, device=device)
torch.compile(up)(x, torch.empty(4096, 1792, dtype=torch.bfloat16, device=device))
torch.compile(down)(torch.empty(16, 8), torch.empty(8, 8))
dist.destroy_process_group()
"""


@pytest.fixture
def launched(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    return script


def test_explain_for_another_machine(inductor_base: ForkBase, launched: Path) -> None:
    """The whole command runs without a GPU. The script is written for ``torchrun``, and is planned as if it ran on 8
    GPUs."""
    command = ("-m", "overlap_inductor", "explain", "--machine", "h200", "--ranks", "8", str(launched))
    done = python(*command, base=inductor_base)
    assert done.returncode == 0, done.stderr
    assert "ranks 8 8 0\n" in done.stdout
    assert re.search(
        r"all_gather_matmul +mm \[8192 x 1792 x 4096\] bf16 +would be overlapped: (chunked|fused)/", done.stdout
    )
    assert re.search(r"^graph +phase +sites +as written +as planned +ratio$", done.stdout, re.M)
    (total,) = re.findall(
        r"^total of 2 sites of 2 graphs: estimated (\d+) us -> (\d+) us, (.*)x \((.*) % less\)$", done.stdout, re.M
    )
    keep, plan, ratio, percent = map(float, total)
    assert 380 < keep < 500 and plan < keep
    assert ratio == pytest.approx(keep / plan, abs=0.01) and percent == pytest.approx(100 * (1 - plan / keep), abs=0.5)
    assert "estimates of the cost model for h200: 8 x NVIDIA H200" in done.stdout and "nothing was sent" in done.stdout
    assert "\x1b" not in done.stdout


def test_explain_without_a_number_of_ranks_takes_the_machines(inductor_base: ForkBase, launched: Path) -> None:
    launched.write_text(LAUNCHED.partition("def up")[0])
    done = python("-m", "overlap_inductor", "explain", "--machine", "h200", str(launched), base=inductor_base)
    assert "ranks 8 8 0\n" in done.stdout, done.stderr


def test_explain_with_ranks_alone_plans_for_this_machine(inductor_base: ForkBase, launched: Path) -> None:
    command = ("-m", "overlap_inductor", "explain", "--ranks", "2", str(launched))
    done = python(*command, base=inductor_base, CUDA_VISIBLE_DEVICES="")
    assert "ranks 2 2 0\n" in done.stdout, done.stderr
    assert "would be ring/p2p" in done.stdout or "too_small" in done.stdout
    assert "cost model for this machine" in done.stdout and "fused/" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--machine", "b200"], "--machine b200: .*; expected one of: h200"),
        (["--machine", "h200", "--ranks", "16"], "--ranks 16: expected 2 to 8"),
        (["--ranks", "1"], "--ranks 1: expected 2 or more"),
    ],
)
def test_explain_for_an_impossible_machine_or_number_of_ranks(
    launched: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *arguments, str(launched)]) == 2
    assert re.search(text, capsys.readouterr().err)


def test_explain_for_another_machine_refuses_to_run_under_a_launcher(
    launched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["explain", "--machine", "h200", str(launched)]) == 2
    assert "WORLD_SIZE is 4" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script finds its GPU")
def test_explain_of_a_script_that_needs_a_gpu(torch_base: ForkBase, launched: Path) -> None:
    command = ("-m", "overlap_inductor", "explain", "--machine", "h200", str(launched))
    done = python(*command, base=torch_base, SCRIPT_DEVICE="cuda")
    assert done.returncode == 1
    assert "the script asks for a GPU, and this machine has none" in done.stderr


def test_explain_of_a_script_that_asks_for_other_ranks(torch_base: ForkBase, tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo', rank=0, world_size=4)")
    command = ("-m", "overlap_inductor", "explain", "--machine", "h200", "--ranks", "2", str(script))
    done = python(*command, base=torch_base)
    assert done.returncode == 2 and "world_size=4, and --ranks is 2" in done.stderr and "Traceback" not in done.stderr


def test_rich_is_not_imported_with_torch_or_the_package(inductor_base: ForkBase) -> None:
    script = (
        "import sys, torch, overlap_inductor\nfrom overlap_inductor.switch import backend, explain, install\n"
        "install.enable()\nimport torch._inductor.compile_fx\nprint('rich' in sys.modules)"
    )
    done = python("-c", script, base=inductor_base, OVERLAP_INDUCTOR="1")
    assert done.stdout == "False\n", done.stderr


def test_explain_of_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(tmp_path / "none.py")]) == 2
    assert "none.py is not a file" in capsys.readouterr().err
