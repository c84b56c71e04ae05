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
from overlap_inductor.cli import demo_text
from overlap_inductor.cli import main as cli
from overlap_inductor.cli import slow_link
from overlap_inductor.cli.demo import DemoOptions
from overlap_inductor.cli.demo_progress import Progress
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
    """The cause is the missing launcher, and the command is to be read off the screen."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # An init_process_group that fails has counted its group, which would change the names of later tests' groups.
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


def test_explain_for_another_machine(launched: Path) -> None:
    """The whole command: a script as torchrun starts it, on a machine without GPUs, planned for 8 of them."""
    done = python("-m", "overlap_inductor", "explain", "--machine", "h200", "--ranks", "8", str(launched))
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


def test_explain_without_a_number_of_ranks_takes_the_machines(launched: Path) -> None:
    done = python("-m", "overlap_inductor", "explain", "--machine", "h200", str(launched))
    assert "ranks 8 8 0\n" in done.stdout, done.stderr


def test_explain_with_ranks_alone_plans_for_this_machine(launched: Path) -> None:
    done = python("-m", "overlap_inductor", "explain", "--ranks", "2", str(launched), CUDA_VISIBLE_DEVICES="")
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
def test_explain_for_a_machine_that_cannot_be(
    launched: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *arguments, str(launched)]) == 2
    assert re.search(text, capsys.readouterr().err)


def test_explain_for_another_machine_is_not_launched(
    launched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["explain", "--machine", "h200", str(launched)]) == 2
    assert "WORLD_SIZE is 4" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script finds its GPU")
def test_explain_of_a_script_that_needs_a_gpu(launched: Path) -> None:
    done = python("-m", "overlap_inductor", "explain", "--machine", "h200", str(launched), SCRIPT_DEVICE="cuda")
    assert done.returncode == 1
    assert "the script asks for a GPU, and this machine has none" in done.stderr


def test_explain_of_a_script_that_asks_for_other_ranks(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo', rank=0, world_size=4)")
    done = python("-m", "overlap_inductor", "explain", "--machine", "h200", "--ranks", "2", str(script))
    assert done.returncode == 2 and "world_size=4, and --ranks is 2" in done.stderr and "Traceback" not in done.stderr


def test_rich_is_not_imported_with_torch_or_the_package() -> None:
    script = (
        "import sys, torch, overlap_inductor\nfrom overlap_inductor.switch import backend, explain, install\n"
        "install.enable()\nimport torch._inductor.compile_fx\nprint('rich' in sys.modules)"
    )
    done = python("-c", script, OVERLAP_INDUCTOR="1")
    assert done.stdout == "False\n", done.stderr


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
        ({"link": "fast"}, "--link fast: expected auto, none, or a rate"),
        ({"link": "0"}, "--link 0"),
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
    setup = demo._resolve(DemoOptions(parts=("block",)))
    assert (setup.device, setup.ranks, setup.hidden, setup.tokens, setup.megabits) == ("cuda", ranks, 4096, 4096, None)


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


def test_a_link_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the ranks do without it and say why; asked for by its rate, it is an error."""
    monkeypatch.setattr(slow_link, "why_not", lambda: "needs root")
    setup = demo._resolve(DemoOptions(device="cpu", parts=("block",)))
    assert (setup.megabits, setup.no_link) == (None, "needs root")
    with pytest.raises(ConfigError, match="--link 300: needs root"):
        demo._resolve(DemoOptions(device="cpu", parts=("block",), link="300"))
    monkeypatch.setattr(slow_link, "why_not", lambda: None)
    assert demo._resolve(DemoOptions(device="cpu", parts=("block",))).megabits == demo.MEGABITS
    assert demo._resolve(DemoOptions(device="cpu", parts=("block",), link="300")).megabits == 300
    assert demo._resolve(DemoOptions(device="cpu", parts=("block",), link="none")).megabits is None


def test_why_no_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (slow_link.why_not() or "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(slow_link.shutil, "which", lambda tool: None)
    assert "iproute2" in (slow_link.why_not() or "")
    monkeypatch.setattr(slow_link.shutil, "which", lambda tool: tool)
    refused = subprocess.CompletedProcess([], 1, "", "RTNETLINK answers: Operation not permitted\n")
    commands: list[list[str]] = []
    monkeypatch.setattr(slow_link.subprocess, "run", lambda command, **_: commands.append([*command]) or refused)
    assert re.search("`ip link add .*` answered: .*not permitted", slow_link.why_not() or "")
    assert ["ip", "link", "del", commands[0][3]] in commands, "what was made is removed"


def result(part: str = "block", overlapped: int = 2, passed: bool = True, ms: float = 20.0) -> dict[str, Any]:
    check = {"name": "output", "difference": 0.5, "largest": 1.0, "tolerance": 0.1, "passed": passed}
    graph = {
        "graph": "0_0",
        "phase": "forward",
        "headline": "2 sites found",
        "found": 2,
        "overlapped": overlapped,
        "reason": "too slow" if overlapped == 0 else "",
        "rows": [["m", 1, "p", "mm", "x"]],
    }
    form = {"name": "auto", "checks": [check], "ms": [ms - 1, ms, ms + 1] if overlapped else None, "graphs": [graph]}
    return {"part": part, "plain_ms": [9.5, 10.0, 10.5], "plain_against_eager": [check], "forms": [form]}


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

    def run(command: Any, ranks: int, folder: Path, *, hosts: Any, on_line: Any, **rest: Any) -> None:
        assert ranks == 2 and folder == tmp_path and not hosts
        for one in results:
            on_line(json.dumps(one))

    monkeypatch.setattr(demo, "run_ranks", run)
    options = DemoOptions(device="cpu", parts=("block",), link="none", keep_dir=str(tmp_path))
    monkeypatch.setattr(demo, "_estimate", lambda: print("estimated"))
    assert demo.run_demo(options) == status
    out = capsys.readouterr().out
    assert ("PASSED" in out) == (status == 0)
    assert str(tmp_path / "reports") in out
    assert "cannot gain" in out and "\nestimated\n" in out and "--link none was given" in out
    if results and results[0]["forms"][0]["ms"]:
        assert "2.00x SLOWER" in out


def test_the_demo_ends_with_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the block in the sizes of a real layer, on a machine whose figures are known."""
    demo._estimate()
    out = capsys.readouterr().out
    assert "8 x NVIDIA H200" in out and re.search(r"total of 4 sites of 2 graphs: estimated .* 1\.\d\dx", out)


def test_the_demo_says_of_every_form_what_it_did() -> None:
    form = result(ms=8.0)
    kept = {**result(overlapped=0)["forms"][0], "name": "fused"}
    form["forms"].append(kept)
    text = demo_text.part(form, shared_cpu=False)
    assert "auto is 1.25x faster than plain torch.compile here." in text
    assert re.search(
        r"plain +10.00 ms +\(9.5 to 10.5\)\n +auto +8.00 ms +\(7.0 to 9.0\) +1.25x +2 of 2 sites overlapped\n", text
    )
    assert re.search(r"fused +as plain +0 of 2 sites overlapped: too slow\n", text)
    for ms in (10.1, 9.0):  # within 2 %; and quartiles that overlap
        assert "no clear difference" in demo_text.verdict(result(ms=ms), shared_cpu=True)
    assert "takes the cores" in demo_text.verdict(result(ms=15.0), shared_cpu=True)
    assert "bugreport" in demo_text.verdict(result(ms=15.0), shared_cpu=False)
    assert "keeps every site" in demo_text.verdict(result(overlapped=0), shared_cpu=False)
    other = result(overlapped=0)
    other["forms"].append({**result(ms=5.0)["forms"][0], "name": "ring"})
    assert demo_text.verdict(other, shared_cpu=False).endswith("ring, forced, is 2.00x faster.")


def test_demo_shows_the_failing_ranks_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: Any, **rest: Any) -> None:
        raise RankError("rank 1 ended with exit status 1. The end of its log:\n  | ValueError: mine")

    monkeypatch.setattr(demo, "run_ranks", run)
    assert demo.run_demo(DemoOptions(device="cpu", parts=("block",), link="none", keep_dir=str(tmp_path))) == 1
    shown = capsys.readouterr()
    assert "ValueError: mine" in shown.err and str(tmp_path) in shown.err


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
