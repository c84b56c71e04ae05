# SPDX-License-Identifier: Apache-2.0
"""If only environment variables switch overlap on, rank 0 prints one line for each graph with a collective. Graphs from
a cache have a line, too."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.fork_base import ForkBase
from tests.support.installed import pretend_installed

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


def lines(base: ForkBase, folder: Path, rank: int = 0, **variables: str) -> list[str]:
    """The lines about graphs that the program writes to standard error."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OVERLAP_INDUCTOR", "TORCH_LOGS"))}
    kept |= {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "OVERLAP_INDUCTOR": "1",
        "OVERLAP_INDUCTOR_SCHEDULE": "ring",
    }
    kept |= {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])]), **variables}
    done = base.run("-c", PROGRAM, str(rank), env=kept, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "graph 0_0" in line or "graph 1_0" in line]


def test_one_line_by_default_and_with_torch_logs_also_from_a_cache(inductor_base: ForkBase, tmp_path: Path) -> None:
    """With ``TORCH_LOGS=overlap_inductor``, each line has torch's prefix and appears once, and graphs without a
    collective have a line, too."""
    pretend_installed(tmp_path)
    (line,) = lines(inductor_base, tmp_path)
    assert line.startswith(f"overlap_inductor: {LINE}") and line.endswith("; report: set OVERLAP_INDUCTOR_DUMP=FOLDER")
    (again,) = lines(inductor_base, tmp_path, OVERLAP_INDUCTOR_DUMP="reports")
    written = "reports/rank_0/0_0_inference/report.txt"
    assert again == line.split("; report")[0] + f" [from cache]; report: {written}" and (tmp_path / written).is_file()
    assert lines(inductor_base, tmp_path, rank=1) == []
    assert lines(inductor_base, tmp_path, OVERLAP_INDUCTOR_NOTICE="off") == []
    first, second = lines(inductor_base, tmp_path, TORCH_LOGS="overlap_inductor")
    assert f"] {LINE}" in first and "] graph 1_0 inference: 0 sites found" in second
    assert lines(inductor_base, tmp_path, TORCH_LOGS="-overlap_inductor") == []
