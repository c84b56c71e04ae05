# SPDX-License-Identifier: Apache-2.0
"""One rank of ``bench.layers``. For each program, it compiles every variant, and compares the variant's results with
those of the eager program in fp32. Then it times the variants, whose steps take turns."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import rows
from bench.layer_programs import PHASES
from bench.layer_programs import Outputs
from bench.layer_programs import Program
from bench.layer_programs import Sizes
from bench.layer_programs import saved
from bench.layer_variants import AGAIN
from bench.layer_variants import LOCAL
from bench.layer_variants import PLAIN
from bench.layer_variants import Variant
from bench.layer_variants import compiled
from bench.layer_variants import counted
from bench.layer_variants import sites
from bench.layer_variants import stretches
from bench.layer_variants import variants
from bench.support import cores
from bench.timing import Clock
from bench.timing import greatest
from bench.timing import in_turn
from bench.timing import worst
from overlap_inductor.report import publish as reporting
from overlap_inductor.report.report import OverlapReport

FLOOR = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""For each dtype, an error that every variant may have. It is relative to a tensor's largest element."""
SLACK = 1.5
"""A variant's error may also be above ``FLOOR``, up to this factor times the error of plain ``torch.compile``."""


class Wrong(RuntimeError):
    """A variant's error is larger than allowed (``FLOOR``, ``SLACK``)."""


@dataclass(frozen=True)
class Settings:
    """The settings that ``bench.layers`` passes to each rank.

    Attributes:
        cases: ``(phase, sequences, tokens)`` of each program.
        schedule, machine, switches: see ``layer_variants.variants``.
        only: names of the variants to run besides ``plain``; empty: all variants.
        link: a description of the link between the ranks.
        repeats: the largest number of rounds. Each round takes one sample of each variant.
        seconds: about how long each program may be timed.
        dynamic: the number of tokens with which each variant is compiled first, with ``dynamic=True``. 0: each variant
            is compiled with ``dynamic=False``.
        cuda_graphs: whether steps of every program, and not only of a decode program, run as CUDA graphs (on GPUs).
        trace: the folder for the traces (``bench.layer_trace``), or empty.
        trace_steps: the number of steps of each variant to trace.
    """

    device: str
    sizes: Sizes
    cases: tuple[tuple[str, int, int], ...]
    schedule: str
    machine: str
    switches: dict[str, str]
    only: tuple[str, ...]
    link: str
    repeats: int
    seconds: float
    dynamic: int
    cuda_graphs: bool
    trace: str
    trace_steps: int

    @classmethod
    def from_json(cls, text: str) -> Settings:
        value = json.loads(text)
        lists = {"cases": tuple(map(tuple, value["cases"])), "only": tuple(value["only"])}
        return cls(**{**value, **lists, "sizes": Sizes(**value["sizes"])})

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


def error(found: Outputs, reference: Outputs) -> float:
    """The largest difference from ``reference`` (fp32, on the CPU) over all outputs and ranks, relative to each
    tensor's largest element. Infinite if names differ, a result is not finite, or a reference is zero everywhere."""
    if found.keys() != reference.keys():
        return greatest(float("inf"))
    largest = 0.0
    for name, right in reference.items():
        off = (found[name].detach().float().cpu() - right).abs().max() / right.abs().max()
        largest = max(largest, off.item() if off.isfinite() else float("inf"))
    return greatest(largest)


def memory_of(program: Program, function: Any, device: str) -> tuple[float, float]:
    """``(peak memory of one step, the part of it that the step adds)`` in MiB: allocated memory on GPUs, resident
    memory of the process on CPUs."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
        program.step(function)
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() / 2**20
    else:
        # Return to the system the memory that earlier steps have freed, and reset the recorded peak.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        program.step(function)
        most = _resident("VmHWM")
    return most, most - before


def _resident(name: str) -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) / 2**10


def reference_of(folder: Path, settings: Settings, case: tuple[str, int, int]) -> Outputs:
    """The results of the eager program in fp32."""
    phase, batch, tokens = case
    program = PHASES[phase](folder, settings.sizes, batch, tokens, torch.float32, settings.device)
    return {name: value.detach().float().cpu().clone() for name, value in program.step(program.model).items()}


def measure(folder: Path, settings: Settings, case: tuple[str, int, int]) -> Iterator[dict[str, Any]]:
    """The rows of one program. Errors are checked before the timing.

    Raises:
        Wrong: a variant's error is above ``FLOOR`` and above ``SLACK`` times the error of ``plain``.
    """
    phase, batch, tokens = case
    reference = reference_of(folder, settings, case)
    program = PHASES[phase](folder, settings.sizes, batch, tokens, settings.dtype, settings.device)
    chosen = [
        v
        for v in variants(settings.schedule, settings.machine, settings.switches)
        if v.name in (PLAIN, *settings.only) or not settings.only and v.name != AGAIN
    ]
    first = None
    if settings.dynamic:
        first = PHASES[phase](folder, settings.sizes, batch, settings.dynamic, settings.dtype, settings.device)
    functions: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    for variant in chosen:
        captured = (program.cuda_graphs or settings.cuda_graphs) and settings.device == "cuda"
        functions[variant.name] = compiled(variant, program.model, captured, first is not None)
        programs = [program] if first is None else [first, program]
        facts[variant.name] = _first_run(variant, programs, functions[variant.name], reference, settings)
        allowed = max(FLOOR[settings.dtype], SLACK * facts[PLAIN]["error"])
        if variant.right and not facts[variant.name]["error"] <= allowed:
            raise Wrong(f"{phase} {variant.name}: error {facts[variant.name]['error']:.3g}, allowed {allowed:.3g}")
    del reference
    kept = [f for f in facts.values() if not any(s["status"] == "rewritten" for s in f["stretches"])]
    written = next((f["collectives"] for f in kept if f["collectives"]), {})
    facts[PLAIN] |= {"collectives": written, "collectives_left": written}
    device = torch.device(settings.device, torch.cuda.current_device() if settings.device == "cuda" else None)
    calls = {name: partial(program.step, function) for name, function in functions.items()}
    load = os.getloadavg()[0]
    with _on_one_core(settings.device):
        times = in_turn(Clock(device), calls, settings.device == "cpu", settings.repeats, settings.seconds)
    load = max(load, os.getloadavg()[0])
    for name, time_ in times.items():
        seconds = time_.median / 1e6
        yield {
            "phase": phase,
            "variant": name,
            "batch": batch,
            "tokens": tokens,
            "median_ms": round(time_.median / 1e3, 3),
            "p20_ms": round(time_.p20 / 1e3, 3),
            "p80_ms": round(time_.p80 / 1e3, 3),
            "fastest_ms": round(time_.fastest / 1e3, 3),
            "speedup": round(times[PLAIN].median / time_.median, 3),
            "tokens_per_s": round(batch * tokens / seconds, 1),
            "repeats": time_.repeats,
            "load": round(load, 2),
            "dynamic": settings.dynamic,
            "cuda_graphs": program.cuda_graphs or settings.cuda_graphs,
            **facts[name],
        }
    if settings.trace:
        if settings.device == "cuda":
            from bench.layer_trace_gpu import traced
        else:
            from bench.layer_trace import traced
        with _on_one_core(settings.device):
            others = {name: f for name, f in functions.items() if name != LOCAL}
            traced(Path(settings.trace), program, others, settings.trace_steps)


@contextmanager
def _on_one_core(device: str) -> Iterator[None]:
    """On a CPU, keep this thread on a physical core of its own if there are enough cores. At the end, allow all cores
    again."""
    before = os.sched_getaffinity(0)
    if device == "cpu":
        os.sched_setaffinity(0, {cores.own_core(dist.get_rank(), dist.get_world_size(), cores.allowed_cores())})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _first_run(
    variant: Variant, programs: list[Program], function: Any, reference: Outputs, settings: Settings
) -> dict[str, Any]:
    """Run two steps of each program: the first compiles, and the second one of the last program is compared. Then run
    one more step of the last program, which is measured for memory. Returns figures for the row.

    With ``Settings.dynamic``, the first program has a model of its own, whose memory also counts."""
    program = programs[-1]
    reports: list[OverlapReport] = []
    dist.barrier()
    begin = time.perf_counter()
    for each in programs:
        reporting.forget_reports()
        each.step(function)
        # If no new graph was compiled, the graphs of the program before serve this one, too.
        if variant.switches is not None and (new := reporting.all_reports()):
            reports = new
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    for each in programs:
        found = each.step(function)
    # A first step compiles and runs. Its running time is taken to be that of the second step. (On GPUs, this is host
    # time, and with CUDA graphs the second step also records the graph.)
    first -= time.perf_counter() - begin
    off = error(found, reference)
    seconds, most, more = worst([first, *memory_of(program, function, settings.device)])
    return {
        "error": float(f"{off:.3g}") if variant.right else None,
        "compile_s": round(seconds, 1),
        "peak_mib": round(most, 1),
        "step_mib": round(more, 1),
        "collectives": counted([r.before for r in reports]),
        "collectives_left": counted([r.after for r in reports]),
        "sites": sites(reports),
        "stretches": stretches(reports),
        "switches": dict(variant.switches or {}),
    }


def run(settings: Settings, folder: Path, where: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of all programs. All ranks call this together, after ``init_process_group``."""
    torch._dynamo.config.recompile_limit = 64
    device = torch.device(settings.device, torch.cuda.current_device() if settings.device == "cuda" else None)
    shared = {"ranks": dist.get_world_size(), "link": settings.link, **vars(settings.sizes), **rows.environment(device)}
    model = saved(folder, settings.sizes, settings.dtype, settings.device)
    for case in settings.cases:
        for row in measure(model, settings, case):
            yield {**row, **shared, **where}
        torch._dynamo.reset()
        gc.collect()
        if settings.device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    """Run one of the processes that ``bench.layers`` starts for ranks on a slow link. Rank 0 writes each row to
    standard output, as a line of JSON."""
    settings, folder = Settings.from_json(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    where = {"cores": len(os.sched_getaffinity(0)), "physical_cores": len(cores.allowed_cores())}
    for row in run(settings, folder, where):
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
