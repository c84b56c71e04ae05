"""What one rank does in a scenario of ``tests.gpu.check_faults``, which starts it: ``<scenario> <ranks> <folder> <late> <schedule> <pattern> <rank>``."""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._inductor.compile_fx
import torch.distributed as dist

from overlap_inductor.errors import TransferError
from overlap_inductor.transports import watchdog
from overlap_inductor.transports.workspace import workspace_of
from tests.fake_group import all_gather
from tests.fake_group import all_reduce
from tests.fake_group import reduce_scatter
from tests.gpu.check_fused import compiled_as
from tests.gpu.ranks import device

TIMEOUT_SECONDS = 6.0
"""Timeout of the group whose site is overlapped: the patience of its kernels."""
GRACE_SECONDS = 3.0
PATIENT_SECONDS = 60.0
CALLS = 3
"""Calls with every peer before the fault."""
ROWS, INNER, COLUMNS = 128, 1024, 512


@dataclass(frozen=True)
class Kind:
    """A site's schedule, and what its matmul is beside."""

    schedule: str
    pattern: str

    def function(self, group: dist.ProcessGroup, world_size: int) -> tuple[Callable[..., torch.Tensor], tuple[tuple[int, int], ...]]:
        """The site over ``group``, and the shapes of its operands."""
        shapes = (ROWS * world_size, INNER), (INNER, COLUMNS)
        if self.pattern == "all_gather_matmul":
            return lambda x, w: all_gather(x, 0, group) @ w, ((ROWS, INNER), shapes[1])
        if self.pattern == "matmul_reduce_scatter":
            return lambda x, w: reduce_scatter(x @ w, "sum", 0, group), shapes
        return lambda x, w: all_reduce(x @ w, "sum", group), shapes


class Site:
    """A site of ``kind`` over a group of its own, whose timeout is ``seconds``; called once."""

    def __init__(self, kind: Kind, seconds: float, rank: int, world_size: int) -> None:
        self.group = group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
        generator = torch.Generator().manual_seed(rank)
        function, shapes = kind.function(group, world_size)
        self.inputs = [torch.randn(shape, generator=generator).to(device(), torch.float16) for shape in shapes]

        self.plain = function(*self.inputs).float()
        torch._dynamo.reset()
        self.compiled = compiled_as(kind.schedule, function)
        dist.barrier()
        self.calls(1)

    def call(self) -> torch.Tensor:
        """One call, to its end on the GPU."""
        result = self.compiled(*self.inputs)
        torch.cuda.synchronize()
        return result

    def calls(self, count: int) -> None:
        """Calls with every peer, whose results must be right."""
        for _ in range(count):
            self.check(self.call())

    def check(self, result: torch.Tensor) -> None:
        assert (result.float() - self.plain).abs().max() < 2e-2 * self.plain.abs().max()


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
        """Whether this is the rank that is killed, late or away."""
        return self.rank == self.world_size - 1

    def say(self, error: object, start: float) -> None:
        """Leave for ``check_faults`` what the program was told, and how long after ``start``."""
        found = {"error": str(error), "seconds": time.monotonic() - start}
        (self.folder / f"said_{self.rank}.json").write_text(json.dumps(found))

    def part(self) -> None:
        """Here the last rank is killed."""
        dist.barrier()
        if self.fails:
            # (Its part of the barrier may still be on its way to the others.)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    def await_error(self) -> TransferError:
        """Call once without the peer, and again: the error of the second call. (The first result is what the kernel left behind that gave up.)"""
        start = time.monotonic()
        self.site.call()
        try:
            self.site.call()
        except TransferError as error:
            self.say(error, start)
            return error
        raise AssertionError("a call whose peer was not there was followed by one that raised nothing")

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
        if not self.fails:
            self.await_error()

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
            result = self.site.compiled(*self.site.inputs)
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
        """The program ends behind the call that found no peer, and destroys its groups as one that is well would."""
        self.site.calls(CALLS - 1)
        if not self.fails:
            self.site.call()

    def again(self) -> None:
        """The survivors of a skipped call make a new group; nothing ends them afterwards."""
        self.site.calls(CALLS - 1)
        if not self.fails:
            self.await_error()
        dist.barrier()
        dist.destroy_process_group(self.site.group)
        self.site = Site(self.kind, TIMEOUT_SECONDS, self.rank, self.world_size)
        self.site.calls(CALLS)
        time.sleep(GRACE_SECONDS + 1)

    def aborted(self) -> None:
        """Rank 0 aborts its own group while its kernel waits: the kernel ends long before its patience does."""
        self.site.calls(CALLS - 1)
        if self.rank == 0:
            faults = workspace_of(self.site.group, device()).faults
            threading.Timer(1.0, faults.abort).start()
            self.await_error()


def probe(folder: Path) -> None:
    """Multiply on every GPU: whether what ended before has left them free. Says how many seconds the slowest took."""
    slowest = 0.0
    for index in range(torch.cuda.device_count()):
        start = time.monotonic()
        x = torch.ones(4096, 4096, device=f"cuda:{index}", dtype=torch.bfloat16)
        assert float((x @ x).mean()) == 4096.0
        slowest = max(slowest, time.monotonic() - start)
    (folder / "said_0.json").write_text(json.dumps({"seconds": round(slowest, 1)}))


def start_rank(rank: int, world_size: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, device_id=device())


def wait_for(path: Path) -> None:
    """Until the file is there. (Who starts a rank ends it where that never comes.)"""
    while not path.exists():
        time.sleep(0.02)


def main(scenario: str, ranks: str, folder_name: str, late: str, schedule: str, pattern: str, number: str) -> int:
    rank, world_size, folder = int(number), int(ranks), Path(folder_name)
    watchdog.GRACE_SECONDS = GRACE_SECONDS
    # An aborted process need not write its memory to disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wait_for(folder / "prepare")
    if scenario.startswith("probe"):
        probe(folder)
        return 0
    start_rank(rank, world_size, folder)
    # A peer that is late is late within the patience; the kernel that is aborted has a long one.
    patience = {"late": float(late) + 15, "aborted": PATIENT_SECONDS, "well": PATIENT_SECONDS}.get(scenario, TIMEOUT_SECONDS)
    kind = Kind(schedule, pattern)
    here = Rank(rank, world_size, folder, float(late), kind, Site(kind, patience, rank, world_size))
    dist.barrier()
    (folder / f"ready_{rank}").touch()
    wait_for(folder / "go")
    getattr(here, scenario)()
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
