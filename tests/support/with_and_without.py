# SPDX-License-Identifier: Apache-2.0
"""Runs one computation three times on every rank: eagerly, compiled without overlap, and compiled with overlap.

The results with overlap are compared with those of the plain compile. (With ``close``, this compile may be left out.)
The difference between the plain compile and eager PyTorch shows the effect of rounding. A result that is only rounding
errors, for example a gradient near zero, cannot be compared.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report import publish as reporting
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import compile_anew
from tests.support.heard import Heard
from tests.support.interpreted import interpreted

Compiler = Callable[[Any], Any]
Computation = Callable[[Any], Mapping[str, torch.Tensor]]
"""Takes a backend of ``torch.compile`` (``"eager"`` compiles nothing) and returns named results."""

LIMIT = 1e-4
"""The largest allowed error of an fp32 result, relative to its largest element. Ten times the rounding error of the
plain compile is also allowed."""
COMPARABLE = 1e-2
"""If a result's rounding error in the plain compile is larger than this, the result counts as rounding errors only."""
TIMEOUT = 100.0
"""Seconds that a rank waits for the other ranks' plans."""
STAGES = ("built", "run eagerly", "compiled without overlap", "overlapped")


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    if found.shape != exact.shape:
        return float("inf")
    return float((found - exact).abs().max() / exact.abs().max().clamp_min(1e-12)) if exact.numel() else 0.0


def compared(
    build: Callable[[], Computation], generated: bool = False, close: float | None = None, **fields: Any
) -> dict[str, Any]:
    """Run the computation that ``build`` makes. Returns this rank's row: the error of the worst result, and counts of
    sites and reasons. If ``build`` or the computation raises, the row holds the error, and ``could_not_be`` names the
    stage.

    Args:
        generated: whether Inductor's code runs. If not, an interpreter runs the graphs.
        close: if all ranks' results with overlap differ from eager PyTorch by less than this, the plain compile is
            left out. Eager PyTorch's results take its place.
        fields: fields of ``OverlapConfig``.
    """
    compile_anew()
    heard, reports = Heard(), []
    config = {"schedule": "ring", "agreement_timeout": TIMEOUT, **fields}
    results: dict[str, dict[str, torch.Tensor]] = {}
    found: dict[str, Any] = {}
    built, eager, plain, overlapped = STAGES
    stage = built
    try:
        computation = build()
        for stage in (eager, plain, overlapped) if close is None else (eager, overlapped, plain):
            if stage == plain and close is not None and _all_ranks_close(results[overlapped], results[eager], close):
                results[plain] = results[eager]
                break
            torch._dynamo.reset()
            reporting.forget_reports()
            torch._dynamo.utils.counters.clear()
            reports = []
            results[stage] = {
                name: _whole(r) for name, r in computation(_backend(stage, config, reports, generated)).items()
            }
            if stage == overlapped:
                found = _found(reporting.all_reports() if generated else reports)
    except Exception as error:  # noqa: BLE001  (the row reports any error of the model)
        trace = {"trace": traceback.format_exc()[-2500:]} if stage == overlapped else {}
        return {"could_not_be": stage, "error_text": f"{type(error).__name__}: {str(error)[:300]}", **trace}
    return {**_figures(results), **found, "warnings": heard.texts}


def _all_ranks_close(found: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], close: float) -> bool:
    """Whether each result of every rank is off by less than ``close``. All ranks call this together and get one
    answer."""
    far = found.keys() != exact.keys() or not all(off(found[name], exact[name]) < close for name in exact)
    count = torch.tensor(int(far))
    dist.all_reduce(count)
    return not count


def _backend(stage: str, config: dict[str, Any], reports: list[OverlapReport], generated: bool) -> Any:
    if stage == "run eagerly":
        return "eager"
    if stage == "compiled without overlap":
        return "inductor" if generated else interpreted(OverlapConfig(mode="off"), [])
    if generated:
        return lambda gm, inputs: overlap_inductor.switch.backend.overlap_inductor(gm, inputs, options=config)
    return interpreted(OverlapConfig(**config), reports, compared=True)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def _figures(results: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    eager, plain, overlapped = (results[s] for s in STAGES[1:])
    missing = sorted(set(plain) ^ set(overlapped))
    if missing:
        return {"error": float("inf"), "rounding": 0.0, "worst": f"results in only one of the two compiles: {missing}"}
    rows = [
        {"error": off(overlapped[name], plain[name]), "rounding": off(plain[name], eager[name]), "worst": name}
        for name in plain
    ]
    return max(rows, key=_badness)


def _badness(row: Mapping[str, Any]) -> tuple[int, float]:
    """A sort key: the row with the largest key is the worst. A wrong result is worse than a result of rounding
    errors."""
    ratio = row["error"] / max(row["rounding"], LIMIT)
    return (0 if _is_right(row) else 1 if _is_rounding(row) else 2), ratio if ratio == ratio else float("inf")


def _found(reports: Sequence[OverlapReport]) -> dict[str, Any]:
    sites = [s for r in reports for s in r.sites]
    reasons = Counter(
        f"{s.decision.status}: {reason.code}"
        for s in sites
        if s.decision.status != "overlapped"
        for reason in s.decision.reasons
    )
    return {
        "graphs": len(reports),
        "sites": dict(Counter(f"{s.facts.pattern} {s.decision.status}" for s in sites)),
        "reasons": dict(reasons),
        "near_misses": dict(Counter(m.reason.code for r in reports for m in r.near_misses)),
        **all_reduces(reports),
        "fell_back": torch._dynamo.utils.counters["overlap_inductor"]["reason.ranks_differ"],
        "notices": [notice for r in reports for notice in r.notices],
    }


def all_reduces(reports: Sequence[OverlapReport]) -> dict[str, Any]:
    """The numbers of all-reduces in the stretches: of all, of those that the sequence-parallel rewrite replaced, and of
    the others by status and reason. A stretch that is in both a forward and its backward graph counts once."""
    stretches = {(r.graph, s.id): s for r in reports for s in r.stretches}.values()
    left: Counter[str] = Counter()
    for stretch in stretches:
        if stretch.status != "rewritten":
            left[f"{stretch.status}: {', '.join(r.code for r in stretch.reasons)}"] += stretch.all_reduces
    return {
        "all_reduces": sum(s.all_reduces for s in stretches),
        "rewritten": sum(s.all_reduces for s in stretches if s.status == "rewritten"),
        "left": dict(left),
    }


def outcome(rows: Iterable[Any]) -> str:
    """The outcome of all ranks' rows: ``right``, ``wrong``, ``fell back`` (right, but without overlap because ranks
    differed), ``nothing to compare``, ``does not run without overlap`` or ``nothing overlapped``."""
    rows = list(rows)
    if any(not isinstance(r, dict) for r in rows):
        return "wrong"
    stages = [r["could_not_be"] for r in rows if "could_not_be" in r]
    if any(s != STAGES[-1] for s in stages):
        return "does not run without overlap"
    if stages or any("failed" in notice for r in rows for notice in r["notices"]):
        return "wrong"
    if not all(_is_right(r) for r in rows):
        return "nothing to compare" if all(_is_right(r) or _is_rounding(r) for r in rows) else "wrong"
    if any(r["fell_back"] for r in rows):
        return "fell back"
    return "right" if any("overlapped" in site for r in rows for site in r["sites"]) else "nothing overlapped"


def _is_right(row: Mapping[str, Any]) -> bool:
    return row["error"] <= max(LIMIT, 10 * row["rounding"]) and row["rounding"] <= COMPARABLE


def _is_rounding(row: Mapping[str, Any]) -> bool:
    return COMPARABLE < row["rounding"] < float("inf") and row["error"] < float("inf")
