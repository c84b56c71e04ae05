# SPDX-License-Identifier: Apache-2.0
"""Runs one rank of a fault scenario, for ``tests.gpu.check_faults``.

Arguments: ``<scenario> <ranks> <folder> <late> <schedule> <pattern> <way> <share> <rank>``. In scenario ``late``, the
last rank sleeps ``<late>`` seconds before its call. If ``<share>`` is ``share``, several ranks may use one GPU.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from bench.support.gpu_ranks import allow_sharing
from bench.support.gpu_ranks import device
from overlap_inductor.errors import TransferError
from overlap_inductor.runtime import watchdog
from overlap_inductor.runtime.workspace import workspace_of
from tests.gpu.stress_sites import Shape
from tests.gpu.stress_sites import sites
from tests.gpu.stress_variants import Variant
from tests.gpu.stress_variants import variants

TIMEOUT_SECONDS = 6.0
"""The time after which waits in the site's kernels time out, in most scenarios."""
GRACE_SECONDS = 3.0
PATIENT_SECONDS = 60.0
CALLS = 3
"""The number of calls before the fault, including the first call, which ``Site`` makes when it is
created. All ranks take part in these calls."""
SHAPE = Shape(tokens=384, few=48, inner=1024, columns=512)
"""The token counts are multiples of 2, 3, 4, 6 and 8."""
NAME = "faulty"


@dataclass(frozen=True)
class Kind:
    """A site's schedule, pattern and way. The way says how the schedule runs, for example its transport
    (``stress_variants.variants``). An empty ``way`` selects the first way of the pattern."""

    schedule: str
    pattern: str
    way: str

    @property
    def variant(self) -> Variant:
        return next(v for v in variants([self.schedule]) if v.pattern == self.pattern and self.way in ("", v.way))


class Site:
    """A site in a group of its own, after one call. This rank's kernels wait for at most ``seconds``."""

    def __init__(self, kind: Kind, seconds: float) -> None:
        self.group = group = dist.new_group(timeout=datetime.timedelta(seconds=PATIENT_SECONDS))
        place = workspace_of(group, device())
        place.patience_ns = int(seconds * 1e9)
        self.faults = place.faults
        ((self.of, *_),) = sites(kind.variant, group, [NAME], [SHAPE])
        self.exact = self.of.exact().float()
        dist.barrier()
        self.calls(1)

    def call(self) -> torch.Tensor:
        """Make one call and wait for its end."""
        result = self.of.run()
        torch.cuda.synchronize()
        return result

    def calls(self, count: int) -> None:
        """Make calls in which all ranks take part, and check their results."""
        for _ in range(count):
            self.check(self.call())

    def is_right(self, result: torch.Tensor) -> bool:
        return bool((result.float() - self.exact).abs().max() < 2e-2 * self.exact.abs().max())

    def check(self, result: torch.Tensor) -> None:
        assert self.is_right(result)

    def check_unless_told(self, result: torch.Tensor) -> None:
        """Without an error on this rank, the result must be right. With an error, each element must be right or NaN."""
        told = self.faults.error()
        assert told is not None or self.is_right(result), "a wrong result, and no error"
        assert self.is_right(torch.where(result.isnan(), self.exact, result.float())), f"a wrong number: {told}"


@dataclass
class Rank:
    """One rank of a scenario."""

    rank: int
    world_size: int
    folder: Path
    lateness: float
    kind: Kind
    site: Site

    @property
    def fails(self) -> bool:
        """Whether this rank is killed, is late, or makes no call."""
        return self.rank == self.world_size - 1

    def say(self, error: object, start: float) -> None:
        """Write the error and the seconds since ``start`` to a file for ``check_faults``."""
        found = {"error": str(error), "seconds": time.monotonic() - start}
        (self.folder / f"said_{self.rank}.json").write_text(json.dumps(found))

    def part(self) -> None:
        """Wait until all ranks are here. Then kill the last rank."""
        dist.barrier()
        if self.fails:
            # The barrier's last messages may still be on their way to other ranks.
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    def await_error(self) -> TransferError:
        """Call twice while the last rank makes no call, and return the error of the second call. The first call's wait
        times out, or an abort ends it."""
        start = time.monotonic()
        self.site.call()
        try:
            self.site.call()
        except TransferError as error:
            self.say(error, start)
            return error
        raise AssertionError("the call after a call without a peer raised no error")

    def await_told(self) -> None:
        """Make no call until a peer's abort gives this rank an error. The next call must raise the error."""
        start = time.monotonic()
        while self.site.faults.error() is None and time.monotonic() < start + PATIENT_SECONDS:
            time.sleep(0.02)
        self.raises(start)

    def raises(self, start: float) -> None:
        try:
            self.site.call()
        except TransferError as error:
            self.say(error, start)
            return
        raise AssertionError("a call of a group that was aborted raised no error")

    def well(self) -> None:
        start = time.monotonic()
        self.site.calls(CALLS - 1)
        self.say("", start)

    def killed(self) -> None:
        self.site.calls(CALLS - 1)
        self.part()
        raise self.await_error()

    def skipped(self) -> None:
        self.site.calls(CALLS - 1)
        if self.fails:
            self.await_told()
        else:
            self.await_error()

    def uneven(self) -> None:
        """Rank 0's wait times out, and its abort ends the waits of other ranks. The last rank calls only after the
        abort, and this call must raise the error. On the other ranks, the next call must raise it. No rank may get a
        wrong result."""
        self.site.calls(CALLS - 1)
        dist.barrier()
        start = time.monotonic()
        if self.fails:
            time.sleep(TIMEOUT_SECONDS + 2)
        else:
            self.site.check_unless_told(self.site.call())
        self.raises(start)

    def uneven_replays(self) -> None:
        """``uneven`` with a CUDA graph. A replay does not run the op's host code, which would raise the error. So
        replays go on after the abort."""
        result = torch.empty(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self.site.of.run()

        def replay() -> None:
            result.zero_()
            graph.replay()
            torch.cuda.synchronize()

        for _ in range(CALLS - 1):
            replay()
            self.site.check(result)
        dist.barrier()
        start = time.monotonic()
        if self.fails:
            time.sleep(TIMEOUT_SECONDS + 2)
        for _ in range(3):
            replay()
            self.site.check_unless_told(result)
        self.raises(start)

    def late(self) -> None:
        self.site.calls(CALLS - 1)
        dist.barrier()
        start = time.monotonic()
        if self.fails:
            time.sleep(self.lateness)
        self.site.calls(2)
        self.say("", start)

    def replays(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self.site.of.run()
        for _ in range(CALLS - 1):
            result.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            self.site.check(result)
        self.part()
        while True:
            graph.replay()
            torch.cuda.synchronize()

    def ended(self) -> None:
        """After a call without the last rank, destroy the groups and end. Every process must end with exit status 1."""
        self.site.calls(CALLS - 1)
        if not self.fails:
            self.site.call()

    def behind(self) -> None:
        """Destroy the group while the last call is in flight, then read its result. Every process must end with exit
        status 1."""
        self.site.calls(CALLS - 1)
        if not self.fails:
            result = self.site.of.run()
            dist.destroy_process_group(self.site.group)
            result.float().sum().item()

    def again(self) -> None:
        """After a skipped call, all ranks make and use a new group. The watchdog must not end them."""
        self.skipped()
        dist.barrier()
        dist.destroy_process_group(self.site.group)
        self.site = Site(self.kind, TIMEOUT_SECONDS)
        self.site.calls(CALLS)
        time.sleep(GRACE_SECONDS + 1)

    def aborted(self) -> None:
        """Rank 0 aborts its group while kernels wait for the last rank. The waits must end long before they time
        out."""
        self.site.calls(CALLS - 1)
        if self.rank == 0:
            threading.Timer(1.0, self.site.faults.abort).start()
        if self.fails:
            self.await_told()
        else:
            self.await_error()


def probe(folder: Path) -> None:
    """Check that the ended processes do not occupy a GPU: multiply on every GPU. Writes the seconds of the slowest GPU
    to a file for ``check_faults``."""
    slowest = 0.0
    for index in range(torch.cuda.device_count()):
        start = time.monotonic()
        x = torch.ones(4096, 4096, device=f"cuda:{index}", dtype=torch.bfloat16)
        assert float((x @ x).mean()) == 4096.0
        slowest = max(slowest, time.monotonic() - start)
    (folder / "said_0.json").write_text(json.dumps({"seconds": round(slowest, 1)}))


def start_rank(rank: int, world_size: int, folder: Path, share: bool) -> None:
    """Join the process group. ``share``: several ranks may use one GPU."""
    store = dist.FileStore(str(folder / "store"), world_size)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if share:
        allow_sharing()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    else:
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, device_id=device())


def wait_for(path: Path) -> None:
    """Wait until the file exists. If it never exists, ``check_faults`` ends this process."""
    while not path.exists():
        time.sleep(0.02)


def main(
    scenario: str,
    ranks: str,
    folder_name: str,
    late: str,
    schedule: str,
    pattern: str,
    way: str,
    share: str,
    number: str,
) -> int:
    rank, world_size, folder = int(number), int(ranks), Path(folder_name)
    watchdog.GRACE_SECONDS = GRACE_SECONDS
    # A process that aborts must not write a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wait_for(folder / "prepare")
    if scenario.startswith("probe"):
        probe(folder)
        return 0
    start_rank(rank, world_size, folder, share == "share")
    # In ``late``, no wait may time out before the late call. In ``aborted``, none may time out before the abort.
    patience = {"late": float(late) + 15, "aborted": PATIENT_SECONDS, "well": PATIENT_SECONDS}.get(
        scenario, TIMEOUT_SECONDS
    )
    if scenario.startswith("uneven") and rank > 0:
        patience = PATIENT_SECONDS
    kind = Kind(schedule, pattern, way)
    here = Rank(rank, world_size, folder, float(late), kind, Site(kind, patience))
    dist.barrier()
    (folder / f"ready_{rank}").touch()
    wait_for(folder / "go")
    getattr(here, scenario)()
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
