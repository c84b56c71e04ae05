# SPDX-License-Identifier: Apache-2.0
"""Time programs on a slow link over gloo, with and without the pass, in one run.

    sudo .venv/bin/python -m bench.slow_link            # two and four ranks, about 15 minutes

The programs (``bench.slow_link_cases``) are

- matmuls beside all-gathers, reduce-scatters and all-to-alls;
- lookups in embedding tables before an all-to-all;
- layers of experts.

Rows are written to ``bench/results/slow_link.jsonl``, the table to ``bench/results/slow_link.md``, the plot to
``docs/assets/slow_link.png``. With ``--out FOLDER`` all three files go to ``FOLDER``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import plots
from bench import tables
from bench.slow_link_cases import CASES
from overlap_inductor.cli import slow_link as link

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parent.parent
INTRODUCTION = """\
# Stored rows of `bench.slow_link`

`python -m bench.slow_link` makes this page. [Performance](../../docs/performance.md#on-a-slow-link) describes the link
and the columns.

"""
"""The beginning of ``slow_link.md``."""
PICTURE = ROOT / "docs" / "assets" / "slow_link.png"


def run(world_size: int, options: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
    """Yields each row of one world size as soon as it is measured. Standard error of all ranks is shown as it comes.

    Raises:
        SystemExit: rank 0 fails, or still runs after ``timeout`` seconds.
    """
    with link.slow_hosts(world_size, options["megabits"]) as hosts:
        processes = []
        for rank, host in enumerate(hosts):
            environment = {
                **os.environ,
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29511",
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": "0",
                "GLOO_SOCKET_IFNAME": host.interface,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": "1",
            }
            command = [*host.command, sys.executable, "-m", "bench.slow_link_worker", json.dumps(options)]
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(
                subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=None, text=True)
            )
        late = threading.Timer(timeout, processes[0].kill)
        late.start()
        try:
            for line in processes[0].stdout or ():
                if line.startswith("ROW "):
                    yield json.loads(line[4:])
        finally:
            in_time = late.is_alive()
            late.cancel()
            code = processes[0].wait() if in_time else None
            for process in processes:
                process.kill()
        if not in_time:
            raise SystemExit(f"{world_size} ranks did not end within {timeout:.0f} s")
        if code:
            raise SystemExit(f"rank 0 of {world_size} ended with exit code {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, default=2048, help="layers of experts have four times as many")
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--columns", type=int, nargs="+", default=[512, 1024, 2048, 3072, 4096])
    parser.add_argument(
        "--megabits", type=int, nargs="+", default=[500, 250], help="link rate for each entry of --ranks"
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--sub-chunks", type=int, help="default: 2; for layers of experts 4")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each entry of --ranks")
    parser.add_argument("--out", type=Path, help="the folder for rows, table and plot")
    arguments = parser.parse_args()
    if (reason := link.why_not()) is not None:
        raise SystemExit(reason)
    folder, picture = (RESULTS, PICTURE) if arguments.out is None else (arguments.out, arguments.out / PICTURE.name)
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    rows, file = [], folder / "slow_link.jsonl"
    for world_size, megabits in zip(arguments.ranks, arguments.megabits, strict=True):
        options = {
            "rows": arguments.rows,
            "inner": arguments.inner,
            "columns": arguments.columns,
            "cases": arguments.cases,
            "megabits": megabits,
            "sub_chunks": arguments.sub_chunks,
            "repeats": arguments.repeats,
        }
        for row in run(world_size, options, arguments.timeout):
            rows.append({**row, **environment})
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = tables.slow_link(rows)
    (folder / "slow_link.md").write_text(INTRODUCTION + table)
    plots.slow_link(rows, picture)
    print(table)


if __name__ == "__main__":
    main()
