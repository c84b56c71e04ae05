# SPDX-License-Identifier: Apache-2.0
"""Into how many sub-chunks and bands the ring cuts a shard, and when a rank waits for a band."""

from __future__ import annotations

import re

import pytest
import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.errors import ConfigError
from overlap_inductor.report.report import OverlapReport
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph


def _report(kind: str, device: str, world_size: int, **switches: object) -> OverlapReport:
    with fake_group(world_size):
        made = HandGraph()
        x = made.on(device, 64 * world_size, 512, dtype=torch.bfloat16)
        w = made.on(device, 512, 256, dtype=torch.bfloat16, name="w")
        if kind == "gather":
            result = made.mm(made.gather(x), w)
        else:
            result = (made.scatter if kind == "scatter" else made.reduce)(made.mm(x, w))
        return made.output(result).run(schedule="ring", **switches)


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_shards_on_a_cpu_make_four_pieces_together(kind: str, world_size: int) -> None:
    """An all-reduce needs bands, because the broadcast of a band is hidden by the next band only."""
    (site,) = _report(kind, "cpu", world_size).sites
    wanted = 4 if kind == "reduce" else {2: 2}.get(world_size, 1)
    assert site.decision.moving.parameters["sub_chunks"] == wanted


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_a_gpu_and_a_number_are_not_limited(kind: str) -> None:
    for device, switches, wanted in (
        ("cuda", {}, 4),
        ("cuda", {"sub_chunks": "auto"}, 4),
        ("cpu", {"sub_chunks": 8}, 8),
    ):
        (site,) = _report(kind, device, 4, **switches).sites
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
