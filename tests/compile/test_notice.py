# SPDX-License-Identifier: Apache-2.0
"""A program that only switches overlap on prints one line for each graph with a collective, also in its second run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.installed import pretend_installed

pytestmark = pytest.mark.usefixtures("known_vector_instructions")
PROGRAM = """
import sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=int(sys.argv[1]), world_size=2)

def with_a_site(x, w):
    return collectives.wait_tensor(collectives.all_reduce(x @ w, "sum", dist.group.WORLD))

def without_a_collective(x, w):
    return x @ w

for function in (with_a_site, without_a_collective):
    torch.compile(function)(torch.ones(64, 32), torch.ones(32, 16))
"""
LINE = "graph 0_0 inference: 1 site found, 1 overlapped (1 ring), estimated "


def lines(folder: Path, rank: int = 0, **variables: str) -> list[str]:
    """The lines about graphs that the program writes to standard error."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OVERLAP_INDUCTOR", "TORCH_LOGS"))}
    kept |= {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "OVERLAP_INDUCTOR": "1",
        "OVERLAP_INDUCTOR_SCHEDULE": "ring",
    }
    kept |= {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])]), **variables}
    command = [sys.executable, "-c", PROGRAM, str(rank)]
    done = subprocess.run(command, env=kept, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "graph 0_0" in line or "graph 1_0" in line]


def test_one_line_by_default_also_from_a_cache(tmp_path: Path) -> None:
    pretend_installed(tmp_path)
    (line,) = lines(tmp_path)
    assert line.startswith(f"overlap_inductor: {LINE}") and line.endswith("; report: set OVERLAP_INDUCTOR_DUMP=FOLDER")
    (again,) = lines(tmp_path, OVERLAP_INDUCTOR_DUMP="reports")
    written = "reports/rank_0/0_0_inference/report.txt"
    assert again == line.split("; report")[0] + f" [from cache]; report: {written}" and (tmp_path / written).is_file()
    assert lines(tmp_path, rank=1) == []
    assert lines(tmp_path, OVERLAP_INDUCTOR_NOTICE="off") == []


def test_torch_logs_shows_it_once(tmp_path: Path) -> None:
    """The line has torch's prefix, and there is also a line for the graph without a collective."""
    pretend_installed(tmp_path)
    first, second = lines(tmp_path, TORCH_LOGS="overlap_inductor")
    assert f"] {LINE}" in first and "] graph 1_0 inference: 0 sites found" in second
    assert lines(tmp_path, TORCH_LOGS="-overlap_inductor") == []
