# SPDX-License-Identifier: Apache-2.0
"""A matmul between two collectives belongs to two sites. The site that is estimated to save more takes it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_inductor.facts.machine import machine_for
from overlap_inductor.passes import shared_matmuls
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites import sizes as site_sizes
from tests.compile.fused_graphs import BF16
from tests.compile.fused_graphs import operand
from tests.support.fake_group import fake_group
from tests.support.golden import check_golden
from tests.support.golden import report_text
from tests.support.hand_graph import HandGraph

pytestmark = pytest.mark.usefixtures("reachable")
FRONT, BEHIND, SCATTER = "all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter"
TOKENS, HIDDEN = 8192, 8192


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))


def head(columns: int, heads: int = 1) -> HandGraph:
    """The head of a language model whose hidden states are divided by tokens. ``columns``: of all ranks."""
    made = HandGraph()
    x = made.gather(operand(made, TOKENS // made.world_size, HIDDEN, "x"))
    found = [
        made.gather_on(made.mm(x, operand(made, HIDDEN, columns // made.world_size, f"w{i}")), 1) for i in range(heads)
    ]
    return made.output(*found)


@dataclass(frozen=True)
class _Matmul:
    name: str


def overlapped(report: OverlapReport) -> list[str]:
    return [s.facts.pattern for s in report.sites if s.decision.status == "overlapped"]


def run(columns: int, heads: int = 1, world_size: int = 4, **fields: Any) -> OverlapReport:
    with fake_group(world_size):
        return head(columns, heads).run(**{"schedule": "auto", **fields})


def test_golden() -> None:
    """The report names the site that has the matmul, and both estimates."""
    check_golden(report_text(run(32000)), "report/shared_matmul.txt")


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_larger_gather_is_overlapped(world_size: int) -> None:
    """The logits have more bytes than the hidden states, or fewer."""
    for columns, winner in ((32000, BEHIND), (4096, FRONT)):
        report = run(columns, world_size=world_size)
        front, behind = report.sites
        assert overlapped(report) == [winner] and report.notices == []
        (reason,) = (behind if winner == FRONT else front).decision.reasons
        owner = front if winner == FRONT else behind
        assert reason.code == "shares_nodes" and owner.facts.id in reason.text


def test_two_sites_may_save_more_than_one() -> None:
    """Two matmuls read one gathered tensor. Each result has half as many columns as would win alone."""
    alone, both = run(9216), run(9216, heads=2)
    assert overlapped(alone) == [FRONT] and overlapped(both) == [BEHIND, BEHIND]


@pytest.mark.parametrize(
    "fields", [{"workspace_limit": 200}, {"patterns": (FRONT,)}, {"schedule": "fused"}], ids=lambda f: next(iter(f))
)
def test_a_site_that_cannot_be_overlapped_takes_no_matmul(fields: dict[str, Any]) -> None:
    """The second gather has no workspace, is switched off, or has no kernel. Then the first one is overlapped."""
    report = run(32000, world_size=2, **fields)
    assert overlapped(report) == [FRONT] and report.notices == []


def test_a_site_whose_rewrite_failed_takes_no_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    from overlap_inductor.lowerings.one_op import reduce_rows

    def fail(*arguments: object) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr(reduce_rows, "gathered_output", fail)
    report = run(32000)
    assert [s.decision.status for s in report.sites] == ["overlapped", "failed"]


def test_a_gather_and_a_reduce_scatter_around_one_matmul() -> None:
    """The partial sums are wider or narrower than the rows that are gathered."""
    for columns, winner in ((16384, SCATTER), (4096, FRONT)):
        with fake_group(4):
            made = HandGraph()
            x = made.gather(made.input(TOKENS // 4, HIDDEN, name="x", dtype=BF16))
            report = made.output(made.scatter(made.mm(x, operand(made, HIDDEN, columns)))).run(schedule="auto")
        assert overlapped(report) == [winner]


def decided(name: str, saved: float, matmuls: str) -> Any:
    """A site that holds one matmul for each letter of ``matmuls``, and is estimated to save ``saved`` microseconds."""
    moving = SimpleNamespace(schedule="ring", estimate_us={"keep": 100.0, "ring": 100.0 - saved})
    nodes = [SimpleNamespace(node=_Matmul(letter)) for letter in matmuls]
    decision = SimpleNamespace(status="overlapped", moving=moving)
    return SimpleNamespace(facts=SimpleNamespace(id=name), decision=decision, matmuls=nodes)


@pytest.mark.parametrize(
    ("sites", "lost"),
    [
        # The first site shares no matmul with the one that is kept, so it is not lost to it.
        ([("a", -3.0, "m"), ("c", 10.0, "n"), ("b", 5.0, "mn")], {"b"}),
        # No site saves anything, as with a forced schedule. Then the sites are decided in graph order.
        ([("a", -3.0, "m"), ("b", -1.0, "m")], set()),
        # The later site must save clearly more.
        ([("a", 10.0, "m"), ("b", 12.0, "m")], {"b"}),
        ([("a", 10.0, "m"), ("b", 13.0, "m")], {"a"}),
    ],
)
def test_sites_that_leave_a_matmul(sites: list[tuple[str, float, str]], lost: set[str]) -> None:
    assert shared_matmuls.losers([[decided(*site) for site in sites]]).keys() == lost


def test_one_text_on_all_ranks() -> None:
    texts = set()
    for rank in (0, 3):
        with fake_group(4, rank):
            report = head(32000).run(schedule="auto")
            texts.add((report.after, report.plan_hash, str([s.decision.reasons for s in report.sites])))
    assert len(texts) == 1


def test_a_matmul_with_a_dynamic_token_count() -> None:
    with fake_group(4):
        made = HandGraph()
        x = made.gather(made.input(2048, HIDDEN, name="x", dtype=BF16, dynamic=[0]))
        y = made.mm(x, operand(made, HIDDEN, 8000))
        report = made.output(made.gather_on(y, 1)).run(schedule="auto")
    assert overlapped(report) == [BEHIND] and report.notices == []
    assert isinstance(y.meta["val"].shape[0], torch.SymInt)
