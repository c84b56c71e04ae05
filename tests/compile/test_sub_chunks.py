# SPDX-License-Identifier: Apache-2.0
"""Into how many sub-chunks and bands the ring cuts a shard, and when a rank waits for a band."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.errors import ConfigError
from overlap_inductor.lowerings.ring import looped_reduce_ops
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.transports import exchange as exchanges
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph


def _report(kind: str, device: str, world_size: int, **switches: Any) -> OverlapReport:
    with fake_group(world_size):
        made = HandGraph()
        x = made.on(device, 64 * world_size, 512, dtype=torch.bfloat16)
        w = made.on(device, 512, 256, dtype=torch.bfloat16, name="w")
        if kind == "gather":
            result = made.mm(made.gather(x), w)
        else:
            result = (made.scatter if kind == "scatter" else made.reduce)(made.mm(x, w))
        return made.output(result).run(**{"schedule": "ring", **switches})


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
@pytest.mark.parametrize(("world_size", "wanted"), [(2, 2), (3, 2), (4, 1), (8, 1)])
def test_forced_rings_on_a_cpu_have_few_pieces(kind: str, world_size: int, wanted: int) -> None:
    """An all-reduce keeps its bands, because the broadcast of a band is hidden by the next band only."""
    (site,) = _report(kind, "cpu", world_size).sites
    assert site.decision.moving.parameters["sub_chunks"] == (4 if kind == "reduce" else wanted)


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_a_gpu_and_a_number_are_not_limited(kind: str) -> None:
    for device, number, wanted in (("cuda", "auto", 4), ("cpu", 8, 8)):
        (site,) = _report(kind, device, 4, sub_chunks=number).sites
        assert site.decision.moving.parameters["sub_chunks"] == wanted


def test_auto_chooses_by_its_estimate() -> None:
    """A forced ring on an unknown machine would have one sub-chunk."""
    report = _report("gather", "cpu", 4, schedule="auto", machine=SLOW_LINK)
    assert report.sites[0].decision.moving.parameters["sub_chunks"] == 2


SLOW_LINK = json.dumps({"link_bytes": 1e6, "matmul_flops": {"2": 3e8}})
"""The transfer takes about as long as the matmul."""


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_a_forced_ring_on_a_known_machine_chooses_by_its_estimate(kind: str) -> None:
    """Without a known machine, it has one sub-chunk, or four if it computes an all-reduce."""
    found = [
        _report(kind, "cpu", 4, schedule=schedule, machine=SLOW_LINK).sites[0].decision.moving.parameters["sub_chunks"]
        for schedule in ("ring", "auto")
    ]
    assert found == [2, 2]


def test_a_forced_ring_that_does_not_pay_has_few_sub_chunks() -> None:
    """Its steps cost more than it hides, so it takes the fewest."""
    fast = json.dumps({"link_bytes": 1e12, "matmul_flops": {"2": 3e12}})
    for kind in ("gather", "scatter", "reduce"):
        (site,) = _report(kind, "cpu", 4, machine=fast).sites
        assert (site.decision.status, site.decision.moving.parameters["sub_chunks"]) == ("overlapped", 1)


def test_a_known_machine_changes_no_number_and_no_gpu() -> None:
    for device, number, wanted in (("cuda", "auto", 4), ("cpu", 8, 8)):
        (site,) = _report("gather", device, 4, sub_chunks=number, machine=SLOW_LINK).sites
        assert site.decision.moving.parameters["sub_chunks"] == wanted


@pytest.mark.parametrize("value", ["", "4.5", 0, "all"])
def test_other_values_are_an_error(value: object) -> None:
    with pytest.raises(ConfigError, match="expected a whole number of at least 1 or 'auto'"):
        OverlapConfig(sub_chunks=value)  # type: ignore[arg-type]
    assert OverlapConfig(sub_chunks="3").sub_chunks == 3


@pytest.mark.parametrize(
    ("device", "order"),
    [("cpu", "mm mm wait mm mm wait mm mm wait wait"), ("cuda", "mm mm mm mm wait mm mm wait wait wait")],
)
def test_when_an_all_reduce_waits_for_a_band(device: str, order: str) -> None:
    """Each of three bands has one matmul for the other rank and one for this rank. The last wait is for the
    broadcasts."""
    report = _report("reduce", device, 2, sub_chunks=3)
    found = re.findall(r"= (?:aten\.(mm)|overlap_inductor\.exchange_(wait))\.default\(", report.after)
    assert " ".join(a or b for a, b in found) == order


class _Noted:
    """Takes the place of an exchange, and notes what is called."""

    def __init__(self, buffer: torch.Tensor, route: str, events: list[str]) -> None:
        self.buffer, self.events, self.route = buffer, events, route

    def post(self, hop: int, *sent: torch.Tensor) -> None:
        self.events.append(f"post {self.route} {hop}")

    def wait(self, hop: int) -> None:
        self.events.append(f"wait {self.route} {hop}")

    def piece(self, slot: int, part: int) -> torch.Tensor:
        return torch.empty(8)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_looping_all_reduce_has_the_same_order(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(looped_reduce_ops, "on_gpu", lambda device: gpu)
    monkeypatch.setattr(exchanges, "open_exchange", lambda buffer, bounds, route, *_: _Noted(buffer, route, events))
    monkeypatch.setattr(exchanges, "close_exchange", lambda *_: None)

    def compute(rows: slice) -> torch.Tensor:
        return torch.zeros(rows.stop - rows.start, 4)

    with fake_group(2) as group:
        looped_reduce_ops.all_reduce_rows(
            compute, (12, 4), torch.zeros(1), 3, 0, torch.float32, "sum", group.group_name, "site"
        )
    bands = [[f"wait owner {b}", f"post broadcast {b}"] for b in range(3)]
    posts = [[f"post owner {b}"] for b in range(3)]
    order = [posts[0], bands[0], posts[1], bands[1], posts[2], bands[2]]
    later = [posts[0], posts[1], bands[0], posts[2], bands[1], bands[2]]
    assert events[:9] == [event for step in (later if gpu else order) for event in step]


def test_a_ring_without_a_looping_op_takes_fewer_sub_chunks_before_it_is_refused() -> None:
    """By its estimate, the ring has more sub-chunks than fit into the graph's budget of nodes."""
    found = {}
    for budget in (3000, 40):
        with fake_group(4):
            made = HandGraph()
            x, w = (made.on("cpu", *shape, dtype=torch.bfloat16, name=n) for n, shape in _OPERANDS.items())
            result = made.scatter(made.call(torch.ops.aten.relu.default, made.mm(x, w)))
            report = made.output(result).run(schedule="ring", step_node_budget=budget, machine=SLOW_LINK)
        (site,) = report.sites
        found[budget] = site.decision.status, site.decision.moving.parameters["sub_chunks"]
    assert found[3000][0] == found[40][0] == "overlapped"
    assert found[40][1] < found[3000][1]


_OPERANDS = {"x": (256, 512), "w": (512, 256)}
