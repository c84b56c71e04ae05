# SPDX-License-Identifier: Apache-2.0
"""Checks faults on GPUs: peers that are killed, skip a call or are late, and the watchdog.

    python -m tests.gpu.check_faults [--ranks 2] [--late 15] [--only killed skipped]
    python -m tests.gpu.check_faults --late 60 --only late
    python -m tests.gpu.check_faults --only killed skipped --schedule chunked --pattern matmul_all_reduce
    python -m tests.gpu.check_faults --ranks 3 --ranks-share-gpus --schedule small_message --way two_shot --only uneven

The command starts the ranks itself, because a launcher would end all ranks when one dies. Each scenario has ranks of
its own. The ranks of all scenarios start together and import. The ranks of scenario ``well`` compile first. Then the
others compile, and each waits for its scenario.

The command prints one JSON row per scenario. ``found`` is the error of rank 0. In most scenarios, the last rank is
killed, or makes no call before its peers' waits time out. Then every other rank must get an error, even if none of its
kernels waited. In scenario ``late``, the last rank calls before the waits time out, so no rank may get an error. With
``--ranks-share-gpus``, NCCL is not used.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from overlap_inductor.cli.local_ranks import rank_environment
from tests.gpu import fault_scenarios
from tests.gpu.fault_scenarios import GRACE_SECONDS
from tests.gpu.fault_scenarios import TIMEOUT_SECONDS

ABORTED, KILLED = -6, -9
SLACK_SECONDS = 5.0
"""An error may come this many seconds late. After the scenarios with ``Expected.probed``, a new process
must multiply on each GPU within this time."""
START_SECONDS = 90.0
WAITED = r"site .+? of group '\S+' timed out waiting for [a-z -]+ rank {last}: expected call 4, saw call 3"
SCHEDULES = ("fused", "chunked", "small_message")
"""Schedules whose own kernels wait for peers."""

PATTERNS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@dataclass(frozen=True)
class Expected:
    """The expected outcome of a scenario.

    Attributes:
        last: exit status of the last rank.
        others: exit status of every other rank.
        told: regular expression for rank 0's error. ``None`` if rank 0 must get no error.
        after: seconds until the error comes, or until the scenario ends.
        logged: whether rank 0's error is in its log. Otherwise it is in the file that rank 0 writes.
        probed: whether each GPU must be free for a new process afterwards.
        others_told: regular expression for the errors of all ranks but rank 0. ``None`` if they are not checked.
    """

    last: int
    others: int
    told: str | None
    after: float = TIMEOUT_SECONDS
    logged: bool = False
    probed: bool = False
    others_told: str | None = None


def expected(late: float) -> dict[str, Expected]:
    """The expected outcomes by scenario. In ``uneven`` and ``uneven_replays``, only rank 0 has a short patience."""
    return {
        "well": Expected(0, 0, None, 0.0),
        "killed": Expected(KILLED, 1, WAITED, probed=True),
        "skipped": Expected(0, 0, WAITED, others_told=WAITED),
        "uneven": Expected(0, 0, WAITED, others_told="rank 0 gave up first: " + WAITED),
        "uneven_replays": Expected(0, 0, WAITED, others_told="rank 0 gave up first: " + WAITED),
        "late": Expected(0, 0, None, late),
        "replays": Expected(
            KILLED,
            ABORTED,
            WAITED + r".*?The process ends now\.",
            TIMEOUT_SECONDS + GRACE_SECONDS,
            logged=True,
            probed=True,
        ),
        "ended": Expected(1, 1, WAITED + r".*?No call has raised this error", logged=True),
        "behind": Expected(1, 1, WAITED + r".*?No call has raised this error", logged=True),
        "again": Expected(0, 0, WAITED, others_told=WAITED),
        "aborted": Expected(0, 0, r"group '\S+' was aborted;", 1.0, others_told=r"group '\S+' was aborted by rank 0;"),
    }


class Job:
    """The processes of one scenario. They wait at two steps, ``prepare`` and ``go``. A step begins when a file with its
    name is in the scenario's folder."""

    def __init__(self, scenario: str, arguments: argparse.Namespace, folder: Path, ranks: int | None = None) -> None:
        self.folder = folder / scenario
        self.folder.mkdir()
        self.kind = {name: getattr(arguments, name) for name in ("schedule", "pattern", "way", "ranks_share_gpus")}
        self.ranks = ranks = ranks or arguments.ranks
        self.logs = [self.folder / f"rank_{rank}.log" for rank in range(ranks)]
        # No compile workers: they would outlive a rank that is killed.
        environment = {**rank_environment("cuda"), "LOCAL_WORLD_SIZE": str(ranks), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-m", fault_scenarios.__name__, scenario, str(ranks), str(self.folder)]
        command += [str(arguments.late), arguments.schedule, arguments.pattern, arguments.way]
        command += ["share" if arguments.ranks_share_gpus else ""]
        self.processes = []
        for rank, path in enumerate(self.logs):
            with path.open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*command, str(rank)], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )

    def begin(self, step: str) -> None:
        (self.folder / step).touch()

    def wait_ready(self) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not any(p.poll() for p in self.processes):
            if all((self.folder / f"ready_{rank}").exists() for rank in range(self.ranks)):
                return True
            time.sleep(0.02)
        return False

    def wait_end(self, seconds: float) -> list[int | None]:
        """Exit statuses; ``None`` for a rank that had to be stopped."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(p.poll() is None for p in self.processes):
            time.sleep(0.02)
        statuses = [p.poll() for p in self.processes]
        self.stop()
        return statuses

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self, rank: int) -> dict[str, str | float]:
        path = self.folder / f"said_{rank}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def tail(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in self.logs)


def judge(job: Job, want: Expected, statuses: list[int | None], seconds: float) -> tuple[str, list[str]]:
    """``(rank 0's error, problems)``."""
    last, problems = job.ranks - 1, []
    wanted = [want.others] * last + [want.last]
    if statuses != wanted:
        problems.append(f"exit statuses {statuses}, expected {wanted}")
    said = job.said(0)
    told = job.logs[0].read_text(errors="replace") if want.logged else str(said.get("error", ""))
    took = float(said.get("seconds", seconds))
    match = re.search((want.told or "").format(last=last), told, re.DOTALL)
    if match is None or (want.told is None and told):
        problems.append(f"the error of rank 0 is {told[-600:]!r}, expected {want.told!r}")
    if not want.after - 0.5 <= took <= want.after + SLACK_SECONDS:
        problems.append(f"after {took:.1f} s, expected {want.after:.1f} to {want.after + SLACK_SECONDS:.1f}")
    for rank in range(1, job.ranks) if want.others_told else ():
        error, after = str(job.said(rank).get("error", "")), float(job.said(rank).get("seconds", seconds))
        # In ``uneven``, the last rank gets its error at its call, 2 s after rank 0. ``SLACK_SECONDS`` allows this.
        if re.search((want.others_told or "").format(last=last), error) is None or after > want.after + SLACK_SECONDS:
            problems.append(
                f"the error of rank {rank} is {error[-600:]!r} after {after:.1f} s, expected {want.others_told!r}"
            )
    return match.group()[:300] if match else "", problems


def play(name: str, job: Job, probe: Job | None, want: Expected) -> dict[str, object]:
    """Run one scenario whose ranks are ready. Returns its row."""
    start = time.monotonic()
    job.begin("go")
    statuses = job.wait_end(want.after + 30)
    seconds = time.monotonic() - start
    found, problems = judge(job, want, statuses, seconds)
    row: dict[str, object] = {
        "scenario": name,
        **job.kind,
        "ranks": job.ranks,
        "seconds": round(seconds, 1),
        "found": found,
    }
    if probe is not None:
        probe.begin("prepare")
        ended = probe.wait_end(30)
        row["gpus_free_s"] = free = probe.said(0).get("seconds")
        if ended != [0] or not isinstance(free, float) or free > SLACK_SECONDS:
            problems.append(f"a new process afterwards: exit status {ended[0]}, {free} s; {probe.tail()}")
    if problems:
        print(job.tail(), file=sys.stderr)
        row["problems"] = problems
    return {**row, "ok": not problems}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--late", type=float, default=15.0, help="seconds by which the late peer is late")
    parser.add_argument("--only", nargs="*", help="scenarios to run ('well' always runs); default: all")
    parser.add_argument("--schedule", default="fused", choices=SCHEDULES)
    parser.add_argument(
        "--way", default="", help="how the schedule runs, as in tests.gpu.stress_variants; default: the first way"
    )
    parser.add_argument("--ranks-share-gpus", action="store_true")
    parser.add_argument(
        "--pattern", choices=PATTERNS, help="default: matmul_reduce_scatter; for small_message: matmul_all_reduce"
    )
    arguments = parser.parse_args()
    arguments.pattern = arguments.pattern or (
        "matmul_all_reduce" if arguments.schedule == "small_message" else "matmul_reduce_scatter"
    )
    scenarios = {
        name: want
        for name, want in expected(arguments.late).items()
        if name == "well" or not arguments.only or name in arguments.only
    }
    failed = 0
    jobs: dict[str, Job] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in scenarios:
                jobs[name] = Job(name, arguments, Path(folder))
            probes = {
                name: Job(f"probe_{name}", arguments, Path(folder), ranks=1)
                for name, want in scenarios.items()
                if want.probed
            }
            jobs |= {f"probe {name}": probe for name, probe in probes.items()}
            # Scenario ``well`` prepares first and fills the caches. Then all other scenarios are ready quickly.
            jobs["well"].begin("prepare")
            for name, want in scenarios.items():
                if jobs[name].wait_ready():
                    row = play(name, jobs[name], probes.get(name), want)
                else:
                    row = {
                        "scenario": name,
                        "ok": False,
                        "found": f"its ranks were not ready in {START_SECONDS:.0f} s: {jobs[name].tail()}",
                    }
                failed += not row["ok"]
                print(json.dumps(row), flush=True)
                if name == "well":
                    for other in scenarios:
                        jobs[other].begin("prepare")
        finally:
            for job in jobs.values():
                job.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
