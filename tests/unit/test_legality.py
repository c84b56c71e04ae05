# SPDX-License-Identifier: Apache-2.0
"""Every reason code has a graph. The graph's last site, its only near miss or its only stretch has this code and no
other code."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch

import overlap_inductor
from overlap_inductor.errors import StrictError
from overlap_inductor.passes import check as legality
from overlap_inductor.passes.rewrite import Rewriter
from overlap_inductor.passes.sequence import check as stretch_check
from overlap_inductor.report import publish
from overlap_inductor.report.failure import BUG_REPORT
from overlap_inductor.sites.placement import Placement
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph
from tests.unit import near_miss_reasons  # noqa: F401  (registers its graphs)
from tests.unit import site_reasons  # noqa: F401
from tests.unit import stretch_reasons  # noqa: F401
from tests.unit.reasons import CASES
from tests.unit.reasons import WORLD_SIZES
from tests.unit.reasons import reduce_site
from tests.unit.reasons import weight


@pytest.mark.parametrize("name", CASES)
def test_reason(name: str) -> None:
    """The site, near miss or stretch must have the expected reason. If no site is overlapped, the graph must not
    change."""
    code, status, function = CASES[name]
    with fake_group(WORLD_SIZES.get(code, 2)):
        report = function()
    if status == "near_miss":
        assert [m.reason.code for m in report.near_misses] == [code] and report.sites == []
        reasons = [m.reason for m in report.near_misses]
    elif status.startswith("stretch "):
        (stretch,) = report.stretches
        assert (f"stretch {stretch.status}", [r.code for r in stretch.reasons]) == (status, [code])
        reasons = list(stretch.reasons)
    else:
        site = report.sites[-1]
        assert (site.decision.status, [r.code for r in site.decision.reasons]) == (status, [code])
        reasons = site.decision.reasons
    assert all(r.text for r in reasons)
    if all(s.decision.status != "overlapped" for s in report.sites):
        assert report.before == report.after


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dtype matmul", "multiplies torch.int32; expected bfloat16, float16, float32 or float64"),
        ("dtype collective", "the collective moves torch.int8; expected bfloat16, float16, "),
        ("hoist over an accepted site", "another overlapped site would compute mm_default, "),
        ("hoist over an accepted site", " only after this site's steps need them"),
        ("hoist of an accepted site", " only after another overlapped site needs them"),
    ],
)
def test_the_reason_says_what_is_in_the_way(name: str, text: str) -> None:
    with fake_group(2):
        (reason,) = CASES[name][2]().sites[-1].decision.reasons
    assert text in reason.text


def test_every_code_has_a_case() -> None:
    """Fails if a reason code has no case, or if a case names a code that does not exist."""
    package = Path(overlap_inductor.__file__).parent
    files = (p for folder in ("passes", "sites", "lowerings") for p in (package / folder).rglob("*.py"))
    sources = "".join(p.read_text() for p in files)
    written = set(re.findall(r'Reason\(\s*"(\w+)"', sources)) | {
        code for code, _ in [*legality.CHECKS, *stretch_check.CHECKS]
    }
    assert written == {code for code, _, _ in CASES.values()}


def test_the_first_failing_check_gives_the_reason() -> None:
    """The user's switches are checked before the site's properties."""
    with fake_group(2):
        (site,) = reduce_site("max").run(patterns=("all_gather_matmul",)).sites
    assert [r.code for r in site.decision.reasons] == ["switched_off"]


@pytest.mark.parametrize("point", ["apply", "placing", "half way", "order", "lint"])
def test_failed_rewrite_restores_the_graph(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the rewrite fails as a whole, the graph is restored, every node has a ``val``, and all sites have failed. If
    it fails at one site, the other site is still rewritten."""
    with fake_group(2):
        made = HandGraph()
        y = made.mm(made.gather(made.input(4, 16)), weight(made))
        result = made.reduce(made.mm(made.input(4, 16, name="z"), weight(made, name="v")))
        made.output(y, result)
        before = made.text()
        if point == "apply":
            monkeypatch.setattr(Rewriter, "apply", lambda self, sites: 1 / 0)
        elif point == "placing":
            monkeypatch.setattr(Placement, "apply", lambda self: 1 / 0)
        elif point == "half way":
            original = Rewriter._site
            monkeypatch.setattr(Rewriter, "_site", lambda self, s, a: 1 / 0 if self.emitted else original(self, s, a))
        elif point == "order":
            monkeypatch.setattr(
                Rewriter,
                "apply",
                lambda self, sites: (sites[0].matmuls[0].lhs.append(sites[0].matmuls[0].lhs.args[0]), 1 / 0),
            )
        else:
            monkeypatch.setattr(torch.fx.Graph, "lint", lambda self: 1 / 0)
        report = made.run()
        monkeypatch.undo()
        assert report.before == before
        assert report.notices[-1] == BUG_REPORT and report.counters()["failed"] == len(report.failures) >= 1
        assert all(f.stage == "rewrite" and "ZeroDivisionError" in f.traceback for f in report.failures)
        assert {i for f in report.failures for i in f.sites} == {
            s.facts.id for s in report.sites if s.decision.status == "failed"
        }
        failed = [
            (s.decision.status, s.decision.reasons[0].code) for s in report.sites if s.decision.status == "failed"
        ]
        if point == "placing":
            # Only the gather calls ``Placement.apply``, so only the gather fails.
            assert failed == [("failed", "rewrite_failed")] and report.sites[1].decision.status == "overlapped"
            return
        if point == "half way":
            # Only the second site fails.
            assert failed == [("failed", "rewrite_failed")] and report.sites[0].decision.status == "overlapped"
            assert report.after.count("all_reduce_default") > 1 and "gather_step" in report.after
            return
        assert made.text() == before == report.after
        assert failed == [("failed", "rewrite_failed")] * 2
        assert "ZeroDivisionError" in report.notices[0]
        assert all("val" in n.meta for n in made.graph.nodes if n.op != "output")
        made.graph.lint()
        assert [s.decision.status for s in made.run().sites] == ["overlapped"] * 2


@pytest.mark.parametrize(
    ("name", "raises"),
    [
        ("switched_off pattern", False),
        ("switched_off schedule", False),
        ("world_size_one", False),
        ("too_small", False),
        ("report_mode", False),
        ("op_between gather", False),
        ("reduce_op", True),
        ("too_many_steps", True),
        ("rewrite_failed", True),
    ],
)
def test_strict_mode_raises_only_for_refused_and_failed_sites(name: str, raises: bool) -> None:
    """Strict mode does not raise for a near miss or a kept site. For example, a site may be kept because it is switched
    off, moves no data or does not pay, or because the mode is ``report``."""
    code, _, function = CASES[name]
    with fake_group(WORLD_SIZES.get(code, 2)):
        report = function()
    report.mode = "strict"
    with pytest.raises(StrictError, match=code) if raises else contextlib.nullcontext():
        publish.activate(report)
