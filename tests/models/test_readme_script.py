# SPDX-License-Identifier: Apache-2.0
"""Runs step 3 of README's quickstart, "Switch the pass on", in small sizes and without GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fork_base import ForkBase
from tests.support.free_ports import free_port
from tests.support.installed import pretend_installed
from tools.doc_parts.pages import ROOT
from tools.doc_parts.samples import samples
from tools.make_docs import README

SMALLER = {"4096": "64", "14336": "256", "16384": "128"}


def _command(folder: Path) -> tuple[str, dict[str, str]]:
    """The name of the script that step 3 of README runs under ``torchrun``, and the step's environment. Step 2 shows
    the script's text. This function writes the text, with smaller sizes, into ``folder``."""
    text = README.read_text()
    (script,) = [sample.content for sample in samples(text) if sample.name == "tp_mlp.py"]
    for size, small in SMALLER.items():
        assert re.search(rf"\b{size}\b", script)
        script = re.sub(rf"\b{size}\b", small, script)
    (folder / "tp_mlp.py").write_text(script)
    (command,) = re.findall(r"^OVERLAP_INDUCTOR=1 torchrun --nproc-per-node 8 (tp_mlp\.py)$", text, re.M)
    pretend_installed(folder)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OVERLAP_INDUCTOR")}
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment.update(PYTHONPATH=path, OVERLAP_INDUCTOR="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    return command, environment


def _check(printed: str) -> None:
    lines = [line for line in printed.splitlines() if "overlap_inductor: graph" in line]
    assert len(lines) == 1 and "2 sites found" in lines[0], printed


def test_one_variable_switches_the_script_on(tmp_path: Path, inductor_base: ForkBase) -> None:
    """Runs the command on two ranks instead of eight. The ranks are forked from a process that has imported torch. Each
    rank gets some of the variables that ``torchrun`` sets, for example ``RANK``."""
    command, environment = _command(tmp_path)
    environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2")
    ranks = [{**environment, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    done = inductor_base.run_at_once(command, envs=ranks, cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], done
    _check("".join(rank.stderr for rank in done))


@pytest.mark.thorough
def test_torchrun_starts_the_script(tmp_path: Path) -> None:
    """Runs ``torchrun`` itself. Three interpreters start: that of ``torchrun`` and those of two ranks."""
    command, environment = _command(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    _check(done.stderr)
