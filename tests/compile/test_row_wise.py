# SPDX-License-Identifier: Apache-2.0
"""Sites with a row-wise op between a matmul and a collective, or with a batched or int8 matmul.

A row-wise op computes the same rows from slices of rows as from the whole tensor. The sites are found. A schedule that
cannot compute a site says why.
"""

from __future__ import annotations

import pytest
import torch

from tests.compile.readings import codes
from tests.compile.readings import facts
from tests.compile.readings import traced
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_by_fields
from tests.support.row_wise_programs import PROGRAMS
from tests.support.row_wise_programs import TRAINED
from tests.support.row_wise_programs import arguments
from tests.support.row_wise_programs import reduce


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in TRAINED])
@pytest.mark.usefixtures("two")
def test_site_is_found(name: str) -> None:
    """If the pass did not know an op of the program, the collective would be a near miss."""
    function, _, (pattern, matmuls) = PROGRAMS[name]
    report = report_of(function, *arguments(name, 2, torch.Generator()))
    ((found, theirs, status),) = facts(report)
    assert (found, sorted(theirs), status) == (pattern, matmuls, "overlapped")
    assert report.near_misses == [] and report.notices == [] and "_c10d_functional" not in report.after


@pytest.mark.parametrize(
    "name",
    [
        "rms norm",
        "experts, reduced",
        "columns of two matmuls concatenated, reduced",
        "a loop of experts, reduced",
        "gathered along the batch",
        "int8, reduced",
    ],
)
def test_other_schedules_refuse(name: str) -> None:
    """A schedule that cannot compute a site must refuse the site. Otherwise the results would be wrong."""
    schedules = ("fused", "chunked", "wave_groups", "small_message")
    with fake_group(2), torch.no_grad():
        found = reports_by_fields(
            PROGRAMS[name][0],
            *arguments(name, 2, torch.Generator()),
            several=[{"schedule": schedule} for schedule in schedules],
        )
    for schedule, (report,) in zip(schedules, found, strict=True):
        (site,) = report.sites
        assert site.decision.status == "refused" and site.decision.reasons[0].code == "schedule_not_available"
        assert report.before == report.after
        between = name not in ("gathered along the batch", "int8, reduced") and not (
            name == "rms norm" and schedule in ("wave_groups", "small_message")
        )
        assert (" matmuls and the collective" in site.decision.reasons[0].text) is between, schedule


@pytest.mark.parametrize("dim", [1, 2], ids=["rows", "columns"])
def test_matmuls_in_different_orders(dim: int) -> None:
    """The rows (or columns) of the second matmul are permuted before the matmuls are added. Pieces of both matmuls
    would add the wrong rows."""

    def fn(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        permuted = (y @ w).unflatten(dim, (2, 4)).transpose(dim, dim + 1).flatten(dim, dim + 1)
        return reduce((x @ w + permuted).sum(0))

    report = traced(fn, (3, 8, 16), (3, 8, 16), (3, 16, 8))
    assert facts(report) == [] and codes(report) == ["layout"] and report.before == report.after
