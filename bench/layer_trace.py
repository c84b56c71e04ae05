# SPDX-License-Identifier: Apache-2.0
"""Divides the time of a step on this rank among kinds of work, in total and for each site.

The kinds are waits for a peer, sends, collectives, matmuls, ops that compute a whole site, and the rest.
``bench.layers --trace FOLDER`` profiles some steps of each variant, except ``no collectives``.

The rows also hold the bars of a picture (``bench.trace_plot``).

The profiler's ranges of overlap ops carry the site's id. A site is open from its first range to its last one. A range
without id (a matmul or plain collective) counts for the open site that was opened last. If no site is open, the range
counts as outside of sites.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from torch.profiler import profile

from bench.layer_programs import Program

KINDS = {
    "overlap_inductor::gather_step": "wait",
    "overlap_inductor::exchange_wait": "wait",
    "overlap_inductor::exchange_start": "send",
    "overlap_inductor::gather_start": "send",
    "overlap_inductor::exchange_send": "send",
    "overlap_inductor::reduce_tail": "collective",
    "_c10d_functional::wait_tensor": "collective",
    "aten::mm": "matmul",
    "aten::addmm": "matmul",
    "aten::bmm": "matmul",
}
"""The kind of each op, by the first word of its range's name. Any other range with a site's id has kind ``loop``: its
op computes the whole site."""
OUTSIDE = "outside of sites"
SHORTEST_GAP = 0.2
"""Milliseconds. A shorter gap between two bars of one kind is not drawn."""


@dataclass(frozen=True)
class Span:
    """A range of a profile. Times are microseconds."""

    name: str
    begin: float
    end: float


def _kind(span: Span) -> str:
    op, _, site = span.name.partition(" ")
    return KINDS.get(op, "loop" if op.startswith("overlap_inductor::") and site else "")


def shares(spans: Iterable[Span]) -> dict[str, dict[str, float]]:
    """``{site: {kind: milliseconds}}``. ``OUTSIDE`` is the key for time outside all sites.

    Key ``span`` of a site holds the time from its first op to its last op. A kind's name plus ``s``, for example
    ``waits``, holds the number of its ranges. A range inside a counted range is not counted.
    """
    ordered = sorted(spans, key=lambda s: (s.begin, -s.end))
    bounds: dict[str, list[float]] = {}
    for span in ordered:
        op, _, site = span.name.partition(" ")
        if op.startswith("overlap_inductor::") and site:
            first = bounds.setdefault(site, [span.begin, span.end])
            first[1] = max(first[1], span.end)
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    covered = float("-inf")
    for span in ordered:
        kind, site = _kind(span), span.name.partition(" ")[2]
        if not kind or span.begin < covered:
            continue
        covered = span.end
        open_sites = [s for s, (begin, end) in bounds.items() if begin <= span.begin < end]
        owner = site or max(open_sites, key=lambda s: bounds[s][0], default=OUTSIDE)
        found[owner][kind] += (span.end - span.begin) / 1e3
        found[owner][f"{kind}s"] += 1
    for site, (begin, end) in bounds.items():
        found[site]["span"] = (end - begin) / 1e3
    return {site: dict(kinds) for site, kinds in found.items()}


def bars(spans: Iterable[Span]) -> list[tuple[str, float, float]]:
    """``(kind, begin, end)`` of each range with a kind, in order of time. Times are milliseconds from the begin of the
    first range. A range inside an earlier one is left out. What follows a bar at once and has its kind extends it."""
    found: list[tuple[str, float, float]] = []
    ordered = sorted(spans, key=lambda s: (s.begin, -s.end))
    for span in ordered:
        kind = _kind(span)
        begin, end = ((t - ordered[0].begin) / 1e3 for t in (span.begin, span.end))
        if not kind or found and begin < found[-1][2]:
            continue
        if found and found[-1][0] == kind and begin - found[-1][2] < SHORTEST_GAP:
            found[-1] = (kind, found[-1][1], end)
        else:
            found.append((kind, begin, end))
    return [(kind, round(begin, 2), round(end, 2)) for kind, begin, end in found]


def traced(folder: Path, program: Program, functions: Mapping[str, Any], steps: int) -> None:
    """Profile ``steps`` steps of each function. All ranks call this together.

    Each rank adds rows to ``FOLDER/<phase>_<n>_ranks_rank_<r>.jsonl``: the times and bars of each step of each variant.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{program.phase}_{dist.get_world_size()}_ranks_rank_{dist.get_rank()}.jsonl"
    with path.open("a") as file:
        for number in range(steps):
            for name, function in functions.items():
                dist.barrier()
                activities = [ProfilerActivity.CPU]
                with profile(activities=activities) as profiler, torch.profiler.record_function("bench step"):
                    program.step(function)
                spans = [Span(e.name, e.time_range.start, e.time_range.end) for e in profiler.events()]
                (step,) = (s for s in spans if s.name == "bench step")
                sites = shares(s for s in spans if s is not step)
                total: dict[str, float] = defaultdict(float)
                for kinds in sites.values():
                    for kind in ("wait", "send", "collective", "matmul", "loop"):
                        total[kind] += kinds.get(kind, 0.0)
                whole = (step.end - step.begin) / 1e3
                row = {"variant": name, "number": number, "step": whole, **total, "rest": whole - sum(total.values())}
                drawn = {"sites": {s: _rounded(k) for s, k in sites.items()}, "bars": bars(spans)}
                file.write(json.dumps({**_rounded(row), **drawn}) + "\n")


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in values.items()}
