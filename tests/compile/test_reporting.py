# SPDX-License-Identifier: Apache-2.0
"""Uses of a graph's report: strict errors, log lines, trace artifacts, and the report of a failed compile."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import overlap_inductor
from overlap_inductor.report import publish as reporting
from tests.compile import fake_pass
from tests.compile.fake_pass import calls
from tests.compile.fake_pass import chain
from tests.compile.fake_pass import fake as fake
from tests.compile.fake_pass import inference
from tests.compile.fake_pass import ours_of

pytestmark = pytest.mark.usefixtures("fake")


def test_strict_raises_naming_site_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake_pass.STATUS, "status", "refused")
    overlap_inductor.enable(mode="strict")
    with pytest.raises(Exception) as error:
        inference()
    text = chain(error.value)
    assert "StrictError: OVERLAP_INDUCTOR=strict: 1 of 1 sites of graph 0_0 inference" in text
    assert "layers.s0_mm" in text and "made_up: the test asked for it" in text


@pytest.mark.parametrize("status", ["kept", "overlapped"])
def test_strict_does_not_raise_for_a_kept_or_overlapped_site(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    monkeypatch.setitem(fake_pass.STATUS, "status", status)
    overlap_inductor.enable(mode="strict")
    inference()
    assert len(calls) == 1


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_the_report_of_a_failed_compile_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str) -> None:
    """A StrictError must not hide the compile's own error."""
    from torch._inductor.graph import GraphLowering

    def broken(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("made up")

    monkeypatch.setattr(GraphLowering, "run", broken)
    monkeypatch.setitem(fake_pass.STATUS, "status", "refused")
    overlap_inductor.enable(mode=mode, dump=str(tmp_path))
    with pytest.raises(Exception, match="made up"):
        inference()
    assert len(reporting.all_reports()) == 1
    assert (tmp_path / "rank_0" / "0_0_inference" / "sites.json").exists()
    monkeypatch.undo()


def test_a_subgraph_has_a_report_of_its_own() -> None:
    """Inductor runs its passes on the branches of a cond first. The report of the graph itself must still come
    first."""
    overlap_inductor.enable()

    def fn(flag: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(flag, lambda x: x @ x, lambda x: x @ x @ x, (x,)) @ x @ x @ x

    torch.compile(fn)(torch.tensor(True), torch.ones(2, 2))
    found = [len(r.sites) for r in reporting.all_reports()]
    assert found[0] == 3 and sorted(found) == [1, 2, 3]


def test_log_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    overlap_inductor.enable()
    with caplog.at_level(logging.INFO, "overlap_inductor"):
        inference()
    assert [r.getMessage() for r in ours_of(caplog)] == [
        "graph 0_0 inference: 1 site found, 1 overlapped (1 ring); report: set OVERLAP_INDUCTOR_DUMP=FOLDER"
    ]
    caplog.clear()
    monkeypatch.setitem(fake_pass.STATUS, "status", "kept")
    with caplog.at_level(logging.DEBUG, "overlap_inductor"):
        inference()
    lines = [r.getMessage() for r in ours_of(caplog)]
    assert lines[0] == (
        "graph 0_0 inference: 1 site found, 0 overlapped, 1 kept (made_up): the test asked for it; report: set"
        " OVERLAP_INDUCTOR_DUMP=FOLDER"
    )
    assert lines[1].startswith("site s0_mm matmul_all_reduce layers.s0_mm: kept (analytic)")


def test_trace_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import _logging

    found = {}

    def record(kind: str, metadata_fn: Any = dict, payload_fn: Any = str, **_: Any) -> None:
        if kind == "artifact" and metadata_fn()["name"].startswith("overlap_inductor"):
            found[metadata_fn()["name"]] = (metadata_fn()["encoding"], payload_fn())

    overlap_inductor.enable()
    monkeypatch.setattr(_logging, "trace_structured", record)
    inference()
    assert found["overlap_inductor_report"][0] == "string" and "s0_mm" in found["overlap_inductor_report"][1]
    assert found["overlap_inductor_sites"][0] == "json" and '"schema_version": 1' in found["overlap_inductor_sites"][1]
