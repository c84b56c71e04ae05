# SPDX-License-Identifier: Apache-2.0
"""Writes the report's values as short texts, for ``report.txt`` and ``index.html``. The docstring of a function shows
examples of its texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING
from typing import Any

from overlap_inductor.facts import names
from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.site import Collective
from overlap_inductor.facts.site import Matmul
from overlap_inductor.facts.site import SiteFacts

if TYPE_CHECKING:
    from overlap_inductor.report.report import OverlapReport

WOULD = "would be overlapped"
"""The status to show for a site that is kept only because the mode is ``report``."""
STATUSES = ("overlapped", WOULD, "kept", "refused", "failed")

STATUS_MEANING = {
    "overlapped": "its transfers run in pieces under the matmuls, or in a faster kernel after them (small_message)",
    WOULD: "runs as written, because mode report changes nothing; the plan shows how mode on would overlap it",
    "kept": "runs as written: the estimated gain is too small, or the reason names what else keeps it",
    "refused": "runs as written: overlapping it is not supported, exceeds a limit, or could change the result",
    "failed": "runs as written: the rewrite raised an error, and the graph was restored",
}

SOURCES = {
    "analytic": "estimate from the shipped machine profile",
    "profile": "estimate from the measured machine profile",
    "measured": "measurement",
    "forced": "forced by the configuration",
}

_SHORT_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4m3",
    "float8_e5m2": "fp8e5m2",
}


def count(number: int, noun: str) -> str:
    """``1 site``, ``2 sites``. The plural is the noun with ``s`` appended."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def dtype(name: str) -> str:
    """``bf16`` for ``torch.bfloat16`` or ``bfloat16``. A dtype without a short name keeps its own: ``int8``."""
    return _SHORT_TYPES.get(name.removeprefix("torch."), name.removeprefix("torch."))


def matmul(value: Matmul) -> str:
    """``mm [s0 x 8192 x 3584] bf16``: M x N x K of the rank's own matmul. With a batch: ``bmm [4 x 64 x 64 x 256]
    fp32``."""
    batch = "" if value.batch == 1 else f"{value.batch} x "
    return f"{value.kind} [{batch}{value.m} x {value.n} x {value.k}] {dtype(value.dtype)}"


def matmuls(facts: SiteFacts) -> str:
    """``mm [64 x 64 x 256] fp32 (x2)``: all matmuls of a site."""
    counts = Counter(matmul(m) for m in facts.matmuls)
    return ", ".join(text if n == 1 else f"{text} (x{n})" for text, n in counts.items())


def size_in_bytes(value: int | str) -> str:
    """``4.0 MiB``; ``8192*s0 B`` for a symbolic size."""
    if isinstance(value, str):
        return f"{value} B"
    number = float(value)
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def memory(report: OverlapReport) -> list[str]:
    """``symmetric memory: 96.0 MiB on each of 8 ranks; the limit is 4.0 GiB for each group``. One line for each
    workspace."""
    most = size_in_bytes(report.config["workspace_limit"] << 20) if report.workspaces else ""
    return [
        f"symmetric memory: {size_in_bytes(held['bytes'])} on each of {count(len(held['ranks']), 'rank')}; the limit is"
        f" {most} for each group"
        for held in report.workspaces
    ]


def collective(value: Collective) -> str:
    """``all_reduce(sum) of 16.0 MiB bf16 over 8 ranks (tp)``."""
    operation = f"{value.kind}({value.reduce_op})" if value.reduce_op else value.kind
    where = f" on dim {value.dim}" if value.dim is not None else ""
    role = f" ({value.role})" if value.role else ""
    mesh = f" ({value.mesh_dim})" if value.mesh_dim else ""
    ranks = count(value.world_size, "rank")
    return f"{operation}{where}{role} of {size_in_bytes(value.bytes)} {dtype(value.dtype)} over {ranks}{mesh}"


def schedule(piece: PlanPiece) -> str:
    """``ring/p2p S=4``, ``ring/p2p S=4 bidirectional``: schedule, transport, sub-chunks and direction."""
    shown = [f"{piece.schedule}/{piece.transport}" if piece.transport else piece.schedule]
    if "sub_chunks" in piece.parameters:
        shown.append(f"S={piece.parameters['sub_chunks']}")
    if piece.parameters.get("route") == "bidirectional":
        shown.append("bidirectional")
    return " ".join(shown)


def status(decision: Decision) -> str:
    """The decision's status, or ``WOULD``."""
    return WOULD if any(reason.code == "report_mode" for reason in decision.reasons) else decision.status


def outcome(decision: Decision) -> str:
    """``overlapped: ring/p2p S=4``, ``kept: too_small``, ``overlapped: ring/p2p S=4 (tokens >= 513)``."""
    moving = [piece for piece in decision.plan if piece.schedule != "keep"]
    several = len(decision.plan) > 1
    plan = "; ".join(schedule(piece) + (f" (tokens {tokens(piece)})" if several else "") for piece in moving)
    codes = list(dict.fromkeys(r.code for r in decision.reasons))
    shown = plan if status(decision) in ("overlapped", WOULD) else ", ".join(codes)
    return f"{status(decision)}: {shown}" if shown else status(decision)


def tokens(piece: PlanPiece) -> str:
    """``any``, ``<= 512``, ``513 to 4096``, ``>= 4097``: the token counts that a piece of a plan serves."""
    first, last = piece.tokens
    if last is None:
        return "any" if first <= 1 else f">= {first}"
    return f"<= {last}" if first <= 1 else f"{first} to {last}"


def microseconds(value: float, longest: float = 0.0) -> str:
    """``12.3 us``, ``1342 us``, ``12.50 ms``, ``2.10 s``: a time given in microseconds.

    Args:
        longest: the longest time with which the reader compares ``value``. Its unit is used if ``value`` is at least a
            tenth of the unit.
    """
    for unit, name, least in ((1e6, "s", 1e6), (1e3, "ms", 1e4)):
        if value >= least or (longest >= least and value >= unit / 10):
            return f"{value / unit:.2f} {name}"
    return f"{value:.1f} us" if value < 100 else f"{value:.0f} us"


PARTS = ("matmul", "collective")
"""Keys of ``estimate_us`` that are parts of ``keep`` and not schedules."""


def estimates(piece: PlanPiece) -> str:
    """``ring 902 us, keep 1342 us (matmul 644 us, collective 698 us)``: the estimates of a piece of a plan, cheapest
    schedule first."""
    ordered = sorted(piece.estimate_us.items(), key=lambda item: (item[1], item[0]))
    times = {name: microseconds(value, ordered[-1][1]) for name, value in ordered}
    schedules = ", ".join(f"{name} {time}" for name, time in times.items() if name not in PARTS)
    parts = ", ".join(f"{name} {times[name]}" for name in PARTS if name in times)
    return f"{schedules} ({parts})" if parts else schedules


def parameters(piece: PlanPiece) -> str:
    """``route=owner sub_chunks=4 unrolled=True``: the parameters of a piece of a plan, by name."""
    return " ".join(f"{name}={value}" for name, value in sorted(piece.parameters.items()))


def headline(report: OverlapReport) -> str:
    """``5 sites found: 4 overlapped, 1 refused; 2 near misses``."""
    if pass_failed(report):
        text = "the overlap pass failed: nothing is overlapped"
    elif not report.sites:
        text = "no sites found"
    else:
        statuses = Counter(status(s.decision) for s in report.sites)
        parts = [f"{statuses[s]} {s}" for s in STATUSES if statuses[s]]
        text = f"{count(len(report.sites), 'site')} found: " + ", ".join(parts)
    if report.near_misses:
        text += f"; {count(len(report.near_misses), 'near miss').replace('misss', 'misses')}"
    return text


def mode_on(report: OverlapReport) -> str:
    """What mode ``on`` would do, in a report of mode ``report``: ``; mode on would run the plan below``. Empty if it
    would change nothing."""
    if any(reason.code == "report_mode" for stretch in report.stretches for reason in stretch.reasons):
        return "; mode on would first rewrite a stretch, so the graph would have other sites and plans"
    return "; mode on would run the plan below" if any(map(_planned, (s.decision for s in report.sites))) else ""


def pass_failed(report: OverlapReport) -> bool:
    return any(failure.stage == "pass" for failure in report.failures)


def reason_codes(report: OverlapReport) -> list[str]:
    """The reason codes of all sites, stretches and near misses, each once, in the report's order."""
    reasons = [r for site in report.sites for r in site.decision.reasons]
    reasons += [r for stretch in report.stretches for r in stretch.reasons]
    return list(dict.fromkeys(r.code for r in [*reasons, *(miss.reason for miss in report.near_misses)]))


def switches(report: OverlapReport) -> list[tuple[str, str, str]]:
    """Every switch as (name, requested value, effective value in this graph). A site with status ``WOULD`` counts as
    overlapped."""
    effective = {
        "schedule": _tally(_main_schedule(s.decision) for s in report.sites),
        "transport": _tally(p.transport for p in _moving_pieces(report) if p.transport),
        "sequence_parallel": _tally(s.status for s in report.stretches) or None,
        "patterns": _tally(s.facts.pattern for s in report.sites if _planned(s.decision)),
        "sub_chunks": _tally(
            p.parameters["sub_chunks"] for p in _moving_pieces(report) if "sub_chunks" in p.parameters
        ),
        "ring_direction": _tally(
            _direction(p.parameters["route"]) for p in _moving_pieces(report) if "route" in p.parameters
        ),
    }
    rows = []
    for name, requested in report.config.items():
        found = effective.get(name)
        rows.append((name, _plain(requested), _plain(requested) if found is None else found or "nothing overlapped"))
    return rows


def _planned(decision: Decision) -> bool:
    return status(decision) in ("overlapped", WOULD)


def _main_schedule(decision: Decision) -> str:
    names = [p.schedule for p in decision.plan if p.schedule != "keep"] if _planned(decision) else []
    return "/".join(dict.fromkeys(names)) or "keep"


def _direction(route: str) -> str:
    """How sub-chunks travel on a route. The switch ``ring_direction`` decides this only for gathers."""
    return {
        "ring": "unidirectional",
        "owner": "straight to the owner",
        "broadcast": "straight to all",
        "direct": "straight to each rank",
    }.get(route, route)


def _moving_pieces(report: OverlapReport) -> list[PlanPiece]:
    sites = [s for s in report.sites if _planned(s.decision)]
    return [piece for site in sites for piece in site.decision.plan if piece.schedule != "keep"]


def _tally(values: Iterable[Any]) -> str:
    counts = Counter(str(v) for v in values)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({n})" for name, n in sorted(counts.items()))


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        if sorted(value) == sorted(names.PATTERNS.known()):
            return f"all {len(value)}"
        return ", ".join(str(v) for v in value) or "none"
    return "not set" if value is None else str(value)
