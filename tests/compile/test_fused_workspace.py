# SPDX-License-Identifier: Apache-2.0
"""The symmetric memory that sites of ``fused`` request, in the graph and in the report."""

from __future__ import annotations

import json

import pytest
import torch

from overlap_inductor.facts.machine import machine_for
from overlap_inductor.report.html.page import render_html
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.text import render_text
from overlap_inductor.runtime.arena import SLOTS
from overlap_inductor.runtime.arena import Request
from overlap_inductor.runtime.arena import planned_bytes
from overlap_inductor.sites import sizes as site_sizes
from tests.compile.fused_graphs import dynamic_site
from tests.compile.fused_graphs import gather_site
from tests.compile.fused_graphs import reduce_site
from tests.compile.fused_graphs import scatter_site
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph

pytestmark = pytest.mark.usefixtures("reachable")


def workspace_of(report: OverlapReport, made: HandGraph) -> dict[str, list[list[int]]]:
    agree = next(n for n in made.graph.nodes if n.target is torch.ops.overlap_inductor.agree.default)
    # The compared plan does not list bytes by group, because a group's name may differ between ranks.
    assert set(json.loads(agree.args[1])) == {
        "overlap_inductor",
        "mode",
        "config",
        "groups",
        "steps",
        "overlaps",
        "plan",
    }
    assert agree.args[4] == report.config["workspace_limit"]
    return {agree.args[0]: [numbers for _, *numbers in json.loads(agree.args[3])]}


def test_the_plan_requests_workspace() -> None:
    """Workspace of each pattern:

    - gather: the gathered tensor, and a signal for each slice along K of each band;
    - scatter: one shard for each source rank, rounded up to tiles of 128 rows, and a signal for each band;
    - all-reduce: twice the bytes and signals of a scatter.
    """
    for site, numbers in (
        (gather_site, [48 * 16 * 2, 4]),
        (scatter_site, [256 * 40 * 2, 1]),
        (reduce_site, [2 * 256 * 40 * 2, 2]),
    ):
        with fake_group(2):
            made = site()
            assert workspace_of(made.run(schedule="fused"), made) == {"0": [numbers]}


def test_the_report_shows_the_memory_that_the_sites_hold() -> None:
    with fake_group(2):
        report = scatter_site().run(schedule="fused")
        kept = scatter_site().run(schedule="keep")
        planned = scatter_site().run(schedule="fused", mode="report")
    request = Request(report.sites[0].facts.id, 256 * 40 * 2, 1)
    held = planned_bytes([request], SLOTS, 2)
    assert (
        report.workspaces == [{"ranks": [0, 1], "bytes": held}]
        and held > request.nbytes
        and kept.workspaces == planned.workspaces == []
    )
    line = f"symmetric memory: {held / 1024:.1f} KiB on each of 2 ranks; the limit is 4.0 GiB for each group"
    assert line in render_text(report).splitlines() and line in render_html(report)
    assert OverlapReport.from_json(report.to_json(graphs=True)).workspaces == report.workspaces


def test_a_dynamic_token_count_holds_workspace_up_to_the_planned_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_group(2):
        made = dynamic_site()
        report = made.run(schedule="fused", max_tokens=1000)
    # 500 rows per shard are four tiles of 128.
    assert workspace_of(report, made) == {"0": [[2 * 2 * 512 * 4096 * 2, 4]]}
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(2):
        (site,) = dynamic_site(8192).run(schedule="auto", patterns=("matmul_all_reduce",), max_tokens=9000).sites
        (small,) = dynamic_site(16).run(schedule="auto", max_tokens=9000).sites
    # The schedules and their order do not depend on the example's token count. They are the same for 8192 rows and for
    # 16 rows, which do not fill one row of tiles.
    assert (
        [p.schedule for p in site.decision.plan]
        == ["small_message", "keep", "fused", "keep"]
        == [p.schedule for p in small.decision.plan]
    )
    few, between, many, beyond = site.decision.plan
    assert (few.tokens, between.tokens, many.tokens, beyond.tokens) == (
        (0, 1024),
        (1025, 2047),
        (2048, 9000),
        (9001, None),
    )
    assert few.parameters["beyond"] == ["fused", many.parameters["settings"]] and few.parameters["norm"] is False


def test_sites_that_do_not_fit_the_workspace_limit_are_refused() -> None:
    with fake_group(2):
        (large,), (small,) = (
            m.run(schedule="fused", workspace_limit=1).sites
            for m in (gather_site(2**12, 128, 8), gather_site(2**10, 128, 8))
        )
    assert [large.decision.reasons[0].code, small.decision.status] == ["workspace", "overlapped"]
