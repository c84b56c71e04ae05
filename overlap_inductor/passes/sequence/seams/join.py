# SPDX-License-Identifier: Apache-2.0
"""Decide which seams are written in bands, and write that into the decisions of their sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from overlap_inductor.config import OverlapConfig
from overlap_inductor.passes.sequence.seams import check
from overlap_inductor.passes.sequence.seams import cost
from overlap_inductor.passes.sequence.seams.find import Seam
from overlap_inductor.passes.sequence.seams.find import find
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.sizes import has_example


def join(sites: Sequence[DecidedSite], config: OverlapConfig) -> list[Seam]:
    """The seams among ``sites`` that are written in bands. The plans of their sites get the parameter ``bands``, and
    estimates that are shorter by what the bands save. If the schedule is forced, bands need not pay, and the estimates
    may become longer."""
    joined = []
    for seam in find(sites):
        bands = check.bands_of(seam)
        if bands is None or not all(has_example(s) for s in (seam.scatter, seam.gather)):
            continue
        saved = cost.saved(seam, bands, config)
        if not saved.pays and config.schedule == "auto":
            continue
        _cut(seam.scatter, bands, saved.scatter)
        _cut(seam.gather, bands, saved.gather)
        joined.append(seam)
    return joined


def _cut(site: DecidedSite, bands: int, seconds: float) -> None:
    piece = site.decision.moving
    estimate = dict(piece.estimate_us)
    if piece.schedule in estimate:
        estimate[piece.schedule] = round(max(estimate[piece.schedule] - seconds * 1e6, estimate["matmul"]), 1)
    parameters = {**piece.parameters, "bands": bands}
    if site.facts.pattern == "all_gather_matmul":
        parameters["route"] = "broadcast"
    site.decision.plan = [dataclasses.replace(piece, parameters=parameters, estimate_us=estimate)]
