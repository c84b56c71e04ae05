# SPDX-License-Identifier: Apache-2.0
"""Runs the demo, and the Python code with which README switches the pass on. Sizes are small, and no GPU is needed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import overlap_inductor
from overlap_inductor.cli import demo
from overlap_inductor.cli import main as cli
from overlap_inductor.inductor.hooks import config_in_effect
from overlap_inductor.switch import install
from tests.support.fake_group import fake_group
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tools.make_docs import README

TEXT = README.read_text()


def test_the_three_ways_in_code() -> None:
    (block,) = re.findall(r"^```python\n(import overlap_inductor\ntorch\.compile\(.*?)^```$", TEXT, re.M | re.S)
    with fake_group(2, 0):

        def model(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        names = {"torch": torch, "overlap_inductor": overlap_inductor, "model": model, "x": torch.ones(2)}
        names["compiled"] = torch.compile(model)
        try:
            exec(block, names)
            config = config_in_effect()
            assert config is not None and config.mode == "on", "enable() has no effect after the block"
        finally:
            install.disable()
    assert not dist.is_initialized()


def _worker(rank: int, world_size: int, settings: str, environment: dict[str, str]) -> str:
    """What ``python -m overlap_inductor.cli.demo_worker`` prints on this rank. To save time, no C++ kernel is built,
    and sites run as looping ops. The plain models are not compiled, and the Llama model is not compiled with
    schedule ``auto``."""
    compile_anew(kernels=False)
    made = torch.compile

    def compiled(model: Any, backend: Any, options: Any = None) -> Any:
        is_llama = isinstance(model, transformers.LlamaForCausalLM)
        if backend == "inductor" or is_llama and options["schedule"] == "auto":
            return model
        return made(model, backend=backend, options=options)

    torch.compile = compiled
    os.environ.update(environment, OVERLAP_INDUCTOR_STEP_NODE_BUDGET="1")
    sys.argv = ["demo_worker", settings]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_module("overlap_inductor.cli.demo_worker", run_name="__main__")
    return printed.getvalue()


def _forked(
    command: list[str], ranks: int, folder: Path, *, environment: Any, on_line: Callable[[str], None], **rest: Any
) -> None:
    """Run the demo's ranks in processes that have already imported torch and compiled a first graph."""
    module, settings = command[1:]
    assert module == "overlap_inductor.cli.demo_worker" and not rest["hosts"]
    first, _ = run_ranks(ranks, _worker, settings, dict(environment), grouped=False, timeout=500)
    for line in first.splitlines():
        on_line(line)


@pytest.mark.timeout(600)
def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo's own checks must pass, sites must be overlapped, and times must be printed. The Llama's stretch is
    rewritten. Then its head is part of two sites, and only one of them can be overlapped."""
    monkeypatch.setattr(demo, "run_ranks", _forked)
    monkeypatch.setattr(demo, "_estimate", lambda: print("estimated"))
    small = ["--layers", "1", "--hidden", "64", "--tokens", "64"]
    status = cli.main(["demo", "--device", "cpu", "--link", "none", *small, "--keep-dir", str(tmp_path)])
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.rstrip().endswith("PASSED") and "FAIL:" not in out
    assert len(re.findall(r"^    plain +\d+\.\d\d ms +\(.*\)$", out, re.M)) == 2
    ring = r"^    ring +\d+\.\d\d ms +\(.*\) +\d\.\d\dx  (\d) of (\d) sites overlapped$"
    assert re.findall(ring, out, re.M) == [("5", "6"), ("4", "4")]
    assert "cannot gain" in out and "\nestimated\n" in out
    assert {path.name for path in (tmp_path / "reports").iterdir()} == {"llama", "block"}
