# SPDX-License-Identifier: Apache-2.0
"""One rank of the demo. It runs each model eagerly, compiled without overlap, and compiled with overlap. It compares
the results and times the compiled forms.

A model is compiled with overlap for ``auto``, and for each schedule that ``serving`` returns. A form that is compiled
with overlap is timed only if it overlaps a site.

Rank 0 writes one JSON object per line to standard output::

    {"step": ...}     a step begins
    {"part": ...}     the results of one model
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.lowerings.registry import SCHEDULES
from overlap_inductor.report import publish as reporting
from overlap_inductor.report import words as report_words
from overlap_inductor.report.groups import group_sites
from overlap_inductor.report.report import OverlapReport

REPEATS = 9
GROUP_TIMEOUT = timedelta(seconds=120)

# Largest allowed difference, relative to the largest value. A split matmul, or a sum in another order, has other
# rounding errors. These errors are largest in long sums and in bfloat16. The tolerances are far above them.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """The settings that the parent process (``cli.demo``) passes to a rank.

    Attributes:
        tokens: length of the whole sequence.
        parts: the models to run, by their names in ``PARTS``.
        folder: where the Llama's checkpoint and the reports are written.
    """

    device: str
    layers: int
    hidden: int
    tokens: int
    parts: tuple[str, ...]
    folder: str

    @classmethod
    def from_json(cls, text: str) -> Settings:
        value = json.loads(text)
        return cls(**{**value, "parts": tuple(value["parts"])})

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


def say(**record: Any) -> None:
    """Send one record, as a line of JSON, from rank 0 to the parent process."""
    if dist.get_rank() == 0:
        print(json.dumps(record), flush=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def quartiles_ms(calls: Mapping[str, Callable[[], Any]], device: str) -> dict[str, list[float]]:
    """``[first quartile, median, third quartile]`` of each call's times in milliseconds, each the maximum over the
    ranks. All ranks call this together. Calls take turns; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS + 1):
        for name, call in calls.items():
            dist.barrier()
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            if repeat:
                times[name].append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.quantiles(found, method="inclusive") for found in times.values()], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(times, (slowest * 1e3).tolist(), strict=True))


def compare(name: str, value: torch.Tensor, reference: torch.Tensor, tolerance: float) -> dict[str, Any]:
    """Compare ``value`` with ``reference`` on all ranks, which call this together. The check passes if the difference
    is at most ``tolerance`` times the reference's largest value, and ``value`` is finite."""
    difference = (value.float() - reference.float()).abs().max()
    largest = reference.float().abs().max()
    both = torch.stack([difference, largest])
    finite = torch.tensor(float(torch.isfinite(value).all()), device=value.device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    worst, scale = both.tolist()
    passed = bool(finite) and worst <= tolerance * scale
    return {"name": name, "difference": worst, "largest": scale, "tolerance": tolerance * scale, "passed": passed}


@dataclass(frozen=True)
class Compiled:
    """A model compiled with overlap.

    Attributes:
        name: the requested schedule, or ``auto``.
        checks: a result of ``compare`` for each output.
        reports: the overlap reports of its graphs.
    """

    name: str
    model: Any
    checks: list[dict[str, Any]]
    reports: list[OverlapReport]

    def overlaps(self) -> bool:
        return any(report.counters()["sites_overlapped"] for report in self.reports)


def run_part(part: str, model: Any, call: Callable[[Any], Outputs], settings: Settings) -> None:
    """Run, compare and time one model, and send the results to the parent process."""
    say(step=f"{part}: eager")
    eager = call(model)

    say(step=f"{part}: torch.compile, plain")
    torch.compiler.reset()
    plain = torch.compile(model, backend="inductor")
    expected = call(plain)

    tolerance = TOLERANCE[settings.dtype]
    compiled = []
    for name in ("auto", *serving(settings)):
        say(step=f"{part}: torch.compile with overlap, schedule {name}")
        reporting.forget_reports()
        options = {"mode": "on", "schedule": name, "dump": str(Path(settings.folder) / "reports" / part / name)}
        overlapped = torch.compile(model, backend=backend(), options=options)
        found = call(overlapped)
        checks = [compare(key, found[key], expected[key], tolerance) for key in expected]
        compiled.append(Compiled(name, overlapped, checks, reporting.all_reports()))

    say(step=f"{part}: timing")
    timed = {c.name: c.model for c in compiled if c.overlaps()}
    times = quartiles_ms(
        {name: partial(call, form) for name, form in {"plain": plain, **timed}.items()}, settings.device
    )
    noise = [compare(key, expected[key], eager[key], tolerance) for key in expected]
    forms = [
        {"name": c.name, "checks": c.checks, "ms": times.get(c.name), "graphs": [describe(r) for r in c.reports]}
        for c in compiled
    ]
    say(part=part, plain_ms=times["plain"], plain_against_eager=noise, forms=forms)


def serving(settings: Settings) -> list[str]:
    """Names of the schedules that can run between these ranks. ``early_start``, which has no transport, is left out:
    the demo's models have no site for it."""
    ranks, device = tuple(range(dist.get_world_size())), torch.device(settings.device)
    return [s.name for s in SCHEDULES if s.transports and s.why_not_between(ranks, device) is None]


def backend() -> Any:
    """The name of our backend, or its function if the package is not installed and so registers no backend."""
    from importlib.metadata import entry_points

    if entry_points(group="torch_dynamo_backends", name="overlap_inductor"):
        return "overlap_inductor"
    from overlap_inductor.switch.backend import overlap_inductor

    return overlap_inductor


def describe(report: OverlapReport) -> dict[str, Any]:
    """The parts of a report that the parent process prints, as JSON values."""
    counters = report.counters()
    rows = [
        [g.module, len(g.sites), g.facts.pattern, report_words.matmuls(g.facts), report_words.outcome(g.decision)]
        for g in group_sites(report)
    ]
    reasons = [reason.text for site in report.sites for reason in site.decision.reasons]
    return {
        "graph": report.graph,
        "phase": report.phase,
        "headline": report_words.headline(report),
        "found": len(report.sites),
        "overlapped": counters["sites_overlapped"],
        "reason": reasons[0] if reasons else "",
        "rows": rows,
    }


def llama(settings: Settings) -> None:
    """Inference of a Hugging Face model, loaded with ``tp_plan="auto"``."""
    from overlap_inductor.cli import demo_models

    folder = Path(settings.folder) / "llama"
    say(step="llama: saving random weights")
    if dist.get_rank() == 0:
        demo_models.save_llama(folder, settings.layers, settings.hidden, settings.tokens)
    dist.barrier()
    say(step='llama: from_pretrained(tp_plan="auto")')
    model = demo_models.load_llama(folder, settings.dtype)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, demo_models.VOCABULARY, (1, settings.tokens), generator=generator).to(settings.device)

    def call(m: Any) -> Outputs:
        with torch.no_grad():
            return {"logits": m(ids).logits}

    run_part("llama", model, call, settings)


def block(settings: Settings) -> None:
    """Forward and backward of a DTensor sequence-parallel block."""
    from overlap_inductor.cli import demo_models

    mesh = dist.init_device_mesh(settings.device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = demo_models.parallel_block(settings.hidden, mesh, settings.dtype)
    generator = torch.Generator().manual_seed(2 + dist.get_rank())
    shape = (1, settings.tokens // dist.get_world_size(), settings.hidden)
    x = torch.randn(shape, generator=generator).to(settings.device, settings.dtype).requires_grad_()

    def call(m: Any) -> Outputs:
        model.zero_grad(set_to_none=True)
        x.grad = None
        out = m(x)
        out.float().square().mean().backward()
        assert x.grad is not None
        gradients = {f"grad {name}": p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}
        return {"output": out.detach(), "grad input": x.grad, **gradients}

    run_part("block", model, call, settings)


PARTS = {"llama": llama, "block": block}


def main() -> None:
    settings = Settings.from_json(sys.argv[1])
    torch.set_num_threads(1)
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if settings.device == "cuda" else "gloo", timeout=GROUP_TIMEOUT)
    for part in settings.parts:
        PARTS[part](settings)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
