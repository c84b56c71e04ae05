# SPDX-License-Identifier: Apache-2.0
"""The switch ``machine``: decisions with the user's facts about the machine, and the error for a bad file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.errors import ConfigError
from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.machine import BOXES
from overlap_inductor.inductor.fingerprint import fingerprint
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.switch import install
from overlap_inductor.torch_compat.target import planning_for
from tests.compile.fused_graphs import gather_site
from tests.support.fake_group import fake_group

SLOW = '{"link_bytes": 6.25e7}'


def decision(machine: str | None, rows: int = 64, inner: int = 1024, columns: int = 1024) -> Decision:
    made = gather_site(rows, inner, columns, torch.float32)
    (site,) = made.run(schedule="auto", machine=machine).sites
    return site.decision


@pytest.mark.usefixtures("two")
def test_auto_overlaps_if_the_users_file_names_a_slow_link(tmp_path: Path) -> None:
    """64 x 1024 fp32 take 0.3 ms at 1 GB/s. A ring's four steps cost 0.4 ms, so the site is kept. At 62.5 MB/s, the
    transfer takes 4 ms, and the matmul hides most of it."""
    path = tmp_path / "machine.json"
    path.write_text(SLOW)
    shipped, slow = decision(None), decision(str(path))
    assert (shipped.status, shipped.reasons[0].code) == ("kept", "too_small")
    assert (slow.status, slow.source, slow.plan[0].schedule) == ("overlapped", "analytic", "ring")
    sent = 64 * 1024 * 4
    assert slow.plan[0].estimate_us["collective"] == pytest.approx(200 + sent / 62.5, abs=0.1)
    assert shipped.plan[0].estimate_us["collective"] == pytest.approx(200 + sent / 1000, abs=0.1)
    assert slow.plan[0].estimate_us["matmul"] == shipped.plan[0].estimate_us["matmul"]


@pytest.mark.usefixtures("two")
def test_a_users_matmul_rate_counts_for_its_element_size_alone() -> None:
    def matmul(dtype: torch.dtype, machine: str | None) -> float:
        (site,) = gather_site(64, 1024, 1024, dtype).run(schedule="auto", machine=machine).sites
        return site.decision.plan[0].estimate_us["matmul"]

    half = '{"matmul_flops": {"4": 2.5e10}}'
    assert matmul(torch.float32, half) == pytest.approx(2 * matmul(torch.float32, None), rel=1e-3)
    assert matmul(torch.bfloat16, half) == matmul(torch.bfloat16, None)


def test_facts_of_the_user_replace_those_of_the_machine_that_is_planned_for() -> None:
    box = BOXES["h200"]
    with fake_group(8), planning_for(box):
        (site,) = gather_site(1024, 8192, 3584).found().sites
        machine = machine_of(site, OverlapConfig(machine=SLOW))
    assert (machine.link_bytes, machine.matmul_flops) == (6.25e7, box.machine.matmul_flops)


def test_the_fingerprint_depends_on_the_facts() -> None:
    """A cache must not return code that was planned for a link of another speed."""
    uuids = {fingerprint(OverlapConfig(machine=m)) for m in (None, SLOW, '{"link_bytes": 1e8}')}
    assert len(uuids) == 3 and fingerprint(OverlapConfig(machine=' { "link_bytes" : 62500000 } ')) in uuids


@pytest.mark.usefixtures("two")
def test_the_report_shows_the_facts() -> None:
    report = gather_site(64, 1024, 1024, torch.float32).run(schedule="auto", machine=SLOW)
    assert report.config["machine"] == '{"link_bytes": 62500000.0}'
    assert '{"link_bytes": 62500000.0}' in report.to_text()


@pytest.mark.usefixtures("two")
def test_a_bad_file_fails_the_first_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error must come at the first compile, not from ``enable_from_environment``."""
    monkeypatch.setenv("OVERLAP_INDUCTOR", "on")
    monkeypatch.setenv("OVERLAP_INDUCTOR_MACHINE", str(tmp_path / "machine.json"))
    torch.compiler.reset()
    install.enable_from_environment()
    try:
        with pytest.raises(ConfigError, match="OVERLAP_INDUCTOR_MACHINE=.*cannot be read"):
            torch.compile(lambda x: x + 1)(torch.ones(2))
    finally:
        overlap_inductor.disable()
        torch.compiler.reset()
