# SPDX-License-Identifier: Apache-2.0
"""A pattern and a schedule that are registered from outside the package (``tests.support.toy_all_to_all``).

Sites of the pattern are found, planned, rewritten and reported. The exchange plan names the schedule. The doctor shows
both names, and the bench offers them.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from bench.operators import cases
from bench.operators import parsed
from bench.providers import chosen
from overlap_inductor.cli.doctor import collect
from overlap_inductor.config import OverlapConfig
from overlap_inductor.errors import ConfigError
from overlap_inductor.inductor.fingerprint import fingerprint
from overlap_inductor.report.html.page import render_html
from overlap_inductor.report.text import render_text
from tests.support import toy_all_to_all as toy
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of


def _layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(funcol.all_to_all_single((x @ w).cumsum(1), None, None, dist.group.WORLD))


def _operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 8), torch.randn(8, 12)


@pytest.mark.parametrize("schedule", ["auto", toy.SCHEDULE])
def test_an_outside_site_is_planned_rewritten_and_reported(schedule: str) -> None:
    with toy.registered(), fake_group(4):
        report = report_of(_layer, *_operands(), schedule=schedule)
    (site,) = report.sites
    assert (site.facts.pattern, site.decision.status) == (toy.PATTERN, "overlapped")
    assert site.decision.moving.schedule == toy.SCHEDULE
    assert "all_to_all_single" in report.before and "all_to_all_single" not in report.after
    assert "overlap_toy.cumsum_all_to_all" in report.after
    assert json.loads(report.exchange)["steps"] == [
        "g0: all_to_all float32 [16, 12] cut [16] in cumsum_all_to_all by pairs/p2p (pairs=4)"
    ]
    for text in (render_text(report), render_html(report), json.dumps(report.to_dict())):
        assert toy.PATTERN in text and toy.SCHEDULE in text
    assert report.counters()[f"schedule.{toy.SCHEDULE}"] == 1


def test_the_ring_refuses_an_outside_pattern() -> None:
    with toy.registered(), fake_group(4):
        report = report_of(_layer, *_operands(), schedule="ring")
    (site,) = report.sites
    assert [r.text for r in site.decision.reasons] == [
        "OVERLAP_INDUCTOR_SCHEDULE=ring: no ring computes cumsum_all_to_all"
    ]


def test_without_registration_the_collective_is_a_near_miss() -> None:
    with fake_group(4):
        report = report_of(_layer, *_operands())
    assert not report.sites
    assert [m.reason.code for m in report.near_misses] == ["op_between"]


def test_switches_know_outside_names_while_they_are_registered() -> None:
    chosen_switches = {"schedule": toy.SCHEDULE, "patterns": toy.PATTERN}
    with toy.registered():
        config = OverlapConfig(**chosen_switches)
        assert config.patterns == (toy.PATTERN,)
        assert toy.PATTERN in OverlapConfig().patterns
    with pytest.raises(ConfigError, match=toy.SCHEDULE):
        OverlapConfig(schedule=toy.SCHEDULE)
    with pytest.raises(ConfigError, match=toy.PATTERN):
        OverlapConfig(patterns=(toy.PATTERN,))


def test_a_registered_pattern_and_schedule_change_the_cache_key() -> None:
    config = OverlapConfig(patterns=("all_gather_matmul",))
    before = fingerprint(config)
    with toy.registered():
        assert fingerprint(config) != before
    assert fingerprint(config) == before


def test_the_doctor_shows_outside_names() -> None:
    with toy.registered():
        checks = collect()
    shown = {(check.section, check.name): check.value for check in checks}
    (here,) = [c.answer for c in checks if c.section.endswith("run here") and c.name == toy.SCHEDULE]
    assert shown["Patterns", toy.PATTERN] == "found at all_to_all"
    assert shown["Schedules", toy.SCHEDULE] == f"computes {toy.PATTERN}; over p2p"
    assert toy.SCHEDULE in shown["Transports", "p2p"]
    assert here == "yes"


def test_the_bench_offers_outside_names() -> None:
    with toy.registered():
        arguments = parsed(["--shapes", "tiny", "--tokens", "64", "--patterns", toy.PATTERN])
        assert toy.SCHEDULE in arguments.schedules
        (case,) = cases(arguments, 4)
        assert chosen(arguments.schedules, [], case, torch.device("cpu")) == ["keep", "pairs/p2p", "auto"]
    with pytest.raises(SystemExit):
        parsed(["--patterns", toy.PATTERN])
