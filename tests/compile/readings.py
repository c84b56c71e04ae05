# SPDX-License-Identifier: Apache-2.0
"""Functions that shorten a report to a few fields, and ``traced``, which makes a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overlap_inductor.report.report import OverlapReport
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of


def summary(report: OverlapReport) -> list[tuple[str, int | None, list[str], str]]:
    """``(pattern, logical dim of the collective, "kind role" of each matmul, status)`` of each site."""
    return [
        (s.facts.pattern, s.facts.collective.dim, [f"{m.kind} {m.role}" for m in s.facts.matmuls], s.decision.status)
        for s in report.sites
    ]


def misses(report: OverlapReport) -> list[tuple[str, str]]:
    """``(kind of the collective, reason code)`` of each near miss."""
    return [(m.collective.kind, m.reason.code) for m in report.near_misses]


def facts(report: OverlapReport) -> list[tuple[str, list[str], str]]:
    """``(pattern, "kind role" of each matmul, status)`` of each site."""
    return [(s.facts.pattern, [f"{m.kind} {m.role}" for m in s.facts.matmuls], s.decision.status) for s in report.sites]


def codes(report: OverlapReport) -> list[str]:
    """The reason code of each near miss."""
    return [m.reason.code for m in report.near_misses]


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...], world_size: int = 2, **fields: Any) -> OverlapReport:
    """The report of ``fn`` on random fp32 tensors of ``shapes``, in a fake group of ``world_size`` ranks. ``fields``
    are fields of ``OverlapConfig``."""
    with fake_group(world_size), torch.no_grad():
        return report_of(fn, *[torch.randn(s) for s in shapes], **fields)
