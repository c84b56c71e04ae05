# SPDX-License-Identifier: Apache-2.0
"""fp8 sites (``_scaled_mm``) of schedule ``chunked``: the graph before and after, word for word."""

from __future__ import annotations

import pytest

from tests.compile.scaled_graphs import gather_site
from tests.compile.scaled_graphs import reduce_site
from tests.compile.scaled_graphs import scatter_site
from tests.support.fake_group import fake_group
from tests.support.golden import check_golden
from tests.support.hand_graph import HandGraph

pytestmark = pytest.mark.usefixtures("reachable")


def golden(made: HandGraph) -> str:
    report = made.run(schedule="chunked")
    return f"before\n{report.before}after\n{report.after}"


def test_gather_golden() -> None:
    """Catches a gathered tensor that no node reads, and a collective that is still in the graph."""
    with fake_group(2):
        check_golden(golden(gather_site()), "scaled_graph/gather_2_ranks.txt")
    with fake_group(8):
        check_golden(golden(gather_site(True)), "scaled_graph/gather_8_ranks.txt")


def test_scatter_golden() -> None:
    with fake_group(2):
        check_golden(golden(scatter_site(True)), "scaled_graph/scatter_2_ranks.txt")
    with fake_group(8):
        check_golden(golden(scatter_site()), "scaled_graph/scatter_8_ranks.txt")


def test_reduce_golden() -> None:
    with fake_group(2):
        check_golden(golden(reduce_site()), "scaled_graph/reduce_2_ranks.txt")
    with fake_group(8):
        check_golden(golden(reduce_site(True)), "scaled_graph/reduce_8_ranks.txt")
