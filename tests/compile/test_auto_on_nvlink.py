# SPDX-License-Identifier: Apache-2.0
"""Which schedule ``auto`` chooses on GPUs of one machine, and which sizes enter its estimates."""

from __future__ import annotations

import json

import pytest
import torch

from overlap_inductor.facts.machine import machine_for
from overlap_inductor.lowerings.chunked.cost import COST
from overlap_inductor.sites import sizes as site_sizes
from overlap_inductor.torch_compat import symmetric
from tests.compile.fused_graphs import BF16
from tests.compile.fused_graphs import dynamic_site
from tests.compile.fused_graphs import gather_site
from tests.compile.fused_graphs import operand
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

pytestmark = pytest.mark.usefixtures("reachable")


def test_auto_counts_the_copy_of_a_gathered_tensor_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """If other ops read the gathered tensor, the estimates count its copy out of the workspace."""
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))

    def estimate(schedule: str, columns: int, used: bool) -> float:
        made = HandGraph()
        gathered = made.gather(operand(made, 8192, 8192, "x"))
        y = made.mm(gathered, operand(made, 8192, columns))
        (site,) = made.output(*((y, gathered) if used else (y,))).run(schedule="auto").sites
        return site.decision.plan[0].estimate_us[schedule]

    def more(schedule: str, columns: int) -> float:
        return estimate(schedule, columns, True) - estimate(schedule, columns, False)

    machine = machine_for("cuda")
    copy, quarter = (
        2 * 2 * 8192 * 8192 * 2 / machine.memory_bytes * 1e6,
        2 * 2 * 8192 * 8192 / machine.matmul_flops[2] / 4 * 1e6,
    )
    with fake_group(2):
        assert [more("fused", 2048), more("fused", 256)] == pytest.approx([copy, copy], abs=1)
        # The copy runs beside a quarter of the matmul. The exposed part is what outlasts this quarter, but at least
        # the fraction ``COST.copy_exposed`` of the copy.
        assert [more("chunked", 2048), more("chunked", 256)] == pytest.approx(
            [COST.copy_exposed * copy, copy - 256 * quarter], abs=1
        )


def test_auto_takes_the_kernel_if_it_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(8):
        (large,) = gather_site(1024, 8192, 3584).run(schedule="auto").sites
        (small,) = gather_site().run(schedule="auto").sites
        (over_p2p,) = gather_site(1024, 8192, 3584).run(schedule="auto", transport="p2p").sites
    assert (large.decision.plan[0].schedule, large.decision.plan[0].transport, large.decision.source) == (
        "fused",
        "sm_push or copy_engine",
        "analytic",
    )
    estimate = large.decision.plan[0].estimate_us
    assert estimate["fused"] < min(estimate["ring"], estimate["keep"])
    assert small.decision.reasons[0].code == "too_small" and "us in a fused kernel" in small.decision.reasons[0].text
    assert over_p2p.decision.plan[0].schedule == "keep" and "fused" not in over_p2p.decision.plan[0].estimate_us


def test_chunks_pay_earlier_if_calls_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without replays, or with one hardware queue, the host launches every chunk. Chunks then pay only in longer calls,
    and only with a larger gain over ``keep``."""
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))

    def taken(**switches: str) -> str:
        (site,) = gather_site(256, 8192, 7168).run(schedule="auto", **switches).sites
        return site.decision.plan[0].schedule

    with fake_group(4):
        assert (taken(), taken(replay="off")) == ("chunked", "fused")
        monkeypatch.setattr(symmetric, "one_queue", lambda: True)
        assert taken() == "fused"


@pytest.mark.parametrize("schedule", ["fused", "chunked", "small_message"])
def test_replays_can_be_switched_off(schedule: str) -> None:
    def settings(**switches: str) -> dict[str, object]:
        made = dynamic_site(8) if schedule == "small_message" else gather_site()
        (site,) = made.run(schedule=schedule, **switches).sites
        assert site.decision.plan[0].schedule == schedule
        return json.loads(site.decision.plan[0].parameters["settings"])

    with fake_group(2):
        assert settings(replay="off") == {**settings(), "replays": False}


@pytest.mark.parametrize("role", ["M", "N"])
def test_tiles_follow_the_tokens_wherever_they_lie(role: str) -> None:
    """Tiles are 128 x 256. Tokens may be rows or columns of the result. Few tokens fill only one row or column of
    tiles."""
    for example in (4096, 16):
        with fake_group(2):
            made = HandGraph()
            gathered, weight = (
                made.gather(made.call(aten.relu.default, made.input(example, 8192, dtype=BF16, dynamic=[0]))),
                made.input(8192, 8192, name="w", dtype=BF16),
            )
            made.output(
                made.mm(gathered, weight)
                if role == "M"
                else made.mm(weight, made.call(aten.permute.default, gathered, [1, 0]))
            )
            (site,) = made.found().sites
        counts = [site_sizes.sizes_at(site, tokens / (2 * example)).tiles for tokens in (16, 2048, 8192)]
        assert counts == ([32, 16 * 32, 64 * 32] if role == "M" else [64, 64 * 8, 64 * 32])


def test_only_the_number_of_tokens_is_scaled_of_several_symbolic_sizes() -> None:
    """If a batch and its rows are symbolic, scaling both would scale the token count twice."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(4, 256, 64, dtype=BF16, dynamic=[0, 1])
        sizes = [*x.meta["val"].shape[:2], 512]
    assert (
        site_sizes._scaled(sizes, 2.0) == [8, 256, 512]
        and site_sizes._scaled(sizes[1:], 0.5) == [128, 512]
        and site_sizes._scaled([256, 512], 2.0) == [256, 512]
    )


def test_one_op_serves_few_and_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(2):
        made = dynamic_site(8192)
        report = made.run(schedule="auto")
    (op,) = (
        n for n in made.graph.nodes if n.target is torch.ops.overlap_inductor.small_message_matmul_all_reduce.default
    )
    assert op.args[-2] == "fused" and json.loads(op.args[-1])["pushers"] == 0
    (agree,) = (n for n in made.graph.nodes if n.target is torch.ops.overlap_inductor.agree.default)
    (site, *_, protocol), (same, *_) = json.loads(agree.args[3])
    assert site == same == report.sites[0].facts.id and protocol == "halves"
