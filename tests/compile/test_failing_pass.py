# SPDX-License-Identifier: Apache-2.0
"""A pass that fails: the model still compiles, and its report holds the failure."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config

from overlap_inductor.errors import StrictError
from overlap_inductor.passes import overlap_pass
from overlap_inductor.passes.find import SiteFinder
from overlap_inductor.report import publish
from overlap_inductor.report.text import render_text
from tests.support import reduced_blocks
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.hand_graph import HandGraph


def test_a_failing_pass_does_not_fail_the_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """If finding sites fails, the graph is unchanged, the report holds the failure, and only strict mode raises."""
    monkeypatch.setattr(SiteFinder, "run", lambda self: 1 / 0)
    with fake_group(2):
        made = HandGraph()
        made.output(made.mm(made.gather(made.input(4, 16)), made.input(16, 8, name="w")))
        before = made.text()
        report = made.run()
        assert made.text() == before == report.before == report.after
        assert report.sites == [] and report.counters()["failed"] == 1
        assert "ZeroDivisionError" in report.notices[0] and "overlap-inductor bugreport" in report.notices[0]
        (failure,) = report.failures
        assert (failure.stage, failure.sites) == ("pass", [])
        assert 'File "overlap_inductor/passes/overlap_pass.py"' in failure.traceback
        assert failure.traceback in render_text(report)
        assert "\nthe overlap pass failed: nothing is overlapped\n" in render_text(report)
        assert publish.summary(report).endswith(": the overlap pass failed: nothing is overlapped")
        publish.activate(report)
        strict = made.run(mode="strict")
        with pytest.raises(StrictError, match="(?s)ZeroDivisionError.*overlap-inductor bugreport"):
            publish.activate(strict)


def test_a_pass_that_fails_after_the_rewrite_undoes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says that nothing is overlapped, and other ranks compare its plan. So the graph must not overlap."""
    shown = overlap_pass.readable

    def fails_if_rewritten(graph: fx.Graph) -> str:
        assert not any("overlap_inductor" in str(node.target) for node in graph.nodes)
        return shown(graph)

    with fake_group(2):
        made = HandGraph()
        made.output(made.mm(made.gather(made.input(4, 16)), made.input(16, 8, name="w")))
        before = made.text()
        monkeypatch.setattr(overlap_pass, "readable", fails_if_rewritten)
        report = made.run(schedule="ring")
        assert made.text() == before == report.before == report.after
    assert report.failures[0].stage == "pass" and report.sites == []


def test_the_report_of_a_failure_keeps_the_inputs_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stretches of the sequence-parallel pass stay rewritten. They are right only if the ranks' inputs are equal,
    so the ranks must still compare the inputs."""
    found = []
    for fails in (False, True):
        if fails:
            monkeypatch.setattr(overlap_pass, "_report", lambda *args: 1 / 0)
        with fake_group(2), inductor_config.patch(fallback_by_default=True), torch.no_grad():
            model = reduced_blocks.Layers(2)
            x = reduced_blocks.input_of(reduced_blocks.TOKENS, reduced_blocks.HIDDEN)
            found += reports_of(model, x, sequence_parallel="on")
    right, failed = found
    assert right.stretches and right.same_inputs and right.failures == []
    assert failed.failures[0].stage == "pass" and failed.sites == []
    assert failed.same_inputs == right.same_inputs
    assert [s.status for s in failed.stretches] == [s.status for s in right.stretches] == ["rewritten"]


def test_a_graph_that_cannot_be_shown_still_has_a_report_of_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failing step may be the one that writes the graph as text. The report must not fail for the same reason."""
    monkeypatch.setattr(overlap_pass, "readable", lambda graph: 1 / 0)
    with fake_group(2):
        made = HandGraph()
        made.output(made.mm(made.gather(made.input(4, 16)), made.input(16, 8, name="w")))
        report = made.run()
    assert report.failures[0].stage == "pass" and report.sites == []
    assert report.before == "the graph cannot be shown as text: ZeroDivisionError: division by zero\n"
