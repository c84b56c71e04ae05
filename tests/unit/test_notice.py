# SPDX-License-Identifier: Apache-2.0
"""The line about a compiled graph. Without configured logging, users see the line. With logging, they see it at most
once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._logging import _internal as torch_logging

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.report import notice
from overlap_inductor.report import publish
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat import telemetry
from tests.unit import sample_reports as samples

log = logging.getLogger("overlap_inductor")


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A new root logger, as in a process without configured logging."""
    made = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(log, "parent", made)
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(telemetry, "global_rank", lambda: 0)
    log.setLevel(logging.NOTSET)
    publish.forget_reports()
    yield made
    log.setLevel(logging.NOTSET)
    publish.forget_reports()


class Listener(logging.Handler):
    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def listener(logger: logging.Logger, level: int = logging.NOTSET, by_torch: bool = False) -> Listener:
    made = Listener(level)
    logger.addHandler(torch_logging._track_handler(made) if by_torch else made)
    return made


def test_without_any_configuration_it_is_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    notice.show("graph 100% done")
    assert capsys.readouterr().err == "overlap_inductor: graph 100% done\n"


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING])
def test_a_handler_of_the_user_gets_it_once(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], level: int
) -> None:
    """``WARNING`` is the root logger's default level, so the user may not have chosen it. The line has level
    ``INFO``, and is shown even if the root logger's level is ``WARNING``."""
    root.setLevel(level)
    heard = listener(root)
    notice.show("line")
    assert heard.lines == ["INFO line"] and capsys.readouterr().err == ""


def test_torchs_own_handler_gets_it_only_if_the_user_set_a_level(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``TORCH_LOGS=overlap_inductor`` sets a level. Without a level, the line is printed without torch's prefix."""
    heard = listener(log, by_torch=True)
    log.propagate = False
    notice.show("unasked")
    assert heard.lines == [] and capsys.readouterr().err == "overlap_inductor: unasked\n"
    log.setLevel(logging.INFO)
    notice.show("asked")
    assert heard.lines == ["INFO asked"] and capsys.readouterr().err == ""


def test_a_level_without_a_handler_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    log.setLevel(logging.INFO)
    notice.show("line")
    assert capsys.readouterr().err == "overlap_inductor: line\n"


def test_a_level_of_its_own_silences_it(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """If the package's logger has level ERROR, the line is not shown. ``TORCH_LOGS=-overlap_inductor`` sets this
    level."""
    log.setLevel(logging.ERROR)
    heard = listener(root)
    notice.show("line")
    assert heard.lines == [] and capsys.readouterr().err == ""


def test_logging_that_is_disabled_silences_it(capsys: pytest.CaptureFixture[str]) -> None:
    logging.disable(logging.INFO)
    try:
        notice.show("line")
    finally:
        logging.disable(logging.NOTSET)
    assert capsys.readouterr().err == ""


ON = OverlapConfig()


def kept(number: int, code: str, text: str) -> list[samples.SiteReport]:
    decision = Decision("kept", "analytic", [PlanPiece("keep")], [Reason(code, text)])
    return [samples.site(f"{code}{i}", decision) for i in range(number)]


def reported() -> OverlapReport:
    report = samples.empty(mode="report")
    decision = Decision("kept", "analytic", [samples.RING], [Reason("report_mode", "leaves the graph alone")])
    report.sites = [samples.site("lm_head", decision)]
    return report


def test_the_line_has_sites_estimate_and_the_way_to_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    publish.activate(samples.llama(2), ON)
    assert capsys.readouterr().err == (
        "overlap_inductor: graph 0_0 inference: 5 sites found, 4 overlapped (4 ring), 1 refused (other_users), 2 near"
        " misses, estimated 5368 us -> 3606 us, 1.49x; report: set OVERLAP_INDUCTOR_DUMP=FOLDER\n"
    )


def test_the_line_names_the_report_that_was_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path begins with the folder as the user spelled it."""
    publish.activate(samples.llama(1), OverlapConfig(dump=str(tmp_path / "a")), from_cache=True)
    text = capsys.readouterr().err
    head, name = text.rstrip("\n").split("; report: ")
    assert head.endswith(" [from cache]")
    assert name == str(tmp_path / "a" / "rank_0" / "0_0_inference" / "report.txt") and Path(name).is_file()
    monkeypatch.chdir(tmp_path)
    publish.activate(samples.llama(1), OverlapConfig(dump="b"))
    assert capsys.readouterr().err.endswith("; report: b/rank_0/0_0_inference/report.txt\n")
    publish.activate(samples.llama(1), OverlapConfig(dump="/proc/none"))
    assert "; report: not written, see the warning\n" in capsys.readouterr().err


def test_the_line_gives_the_main_reason_if_nothing_is_overlapped(capsys: pytest.CaptureFixture[str]) -> None:
    report = samples.empty(graph="0_0", phase="forward")
    report.sites = [*kept(1, "hoist", "one cannot move"), *kept(2, "too_small", "estimated 140 us against 95 us")]
    publish.activate(report, ON)
    assert capsys.readouterr().err == (
        "overlap_inductor: graph 0_0 forward: 3 sites found, 0 overlapped, 3 kept (hoist, too_small): estimated 140 us"
        " against 95 us; report: set OVERLAP_INDUCTOR_DUMP=FOLDER\n"
    )
    report.sites, report.near_misses = [], samples.llama(1).near_misses
    publish.activate(report, ON)
    assert "0 sites found, 0 overlapped, 1 near miss: aten.relu stands between" in capsys.readouterr().err


def test_mode_report_estimates_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    publish.activate(reported(), OverlapConfig(mode="report"))
    assert "1 kept (report_mode), would be estimated 1342 us -> 902 us, 1.49x;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("report", "config", "rank"),
    [
        (samples.empty(), ON, 0),
        (samples.llama(1), OverlapConfig(notice="off"), 0),
        (samples.llama(1), None, 0),
        (samples.llama(1), ON, 3),
    ],
    ids=["no collective", "switched off", "no switches", "another rank"],
)
def test_graphs_without_a_line(
    report: OverlapReport,
    config: OverlapConfig | None,
    rank: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry, "global_rank", lambda: rank)
    publish.activate(report, config)
    assert capsys.readouterr().err == ""


def test_switched_off_it_is_still_in_the_log() -> None:
    log.setLevel(logging.INFO)
    heard = listener(log)
    publish.activate(samples.llama(1), OverlapConfig(notice="off"))
    assert [line[:40] for line in heard.lines][0] == "INFO graph 0_0 inference: 3 sites found,"
