# SPDX-License-Identifier: Apache-2.0
"""Sites of schedule ``fused`` in the graph: refusals and rewritten graphs. Some tests also run other schedules."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator

import pytest
import torch
from torch import fx

from overlap_inductor.facts.machine import machine_for
from overlap_inductor.sites import sizes as site_sizes
from tests.compile.fused_graphs import BF16
from tests.compile.fused_graphs import SITES
from tests.compile.fused_graphs import gather_site
from tests.compile.fused_graphs import operand
from tests.compile.fused_graphs import reduce_site
from tests.compile.fused_graphs import scatter_site
from tests.compile.fused_graphs import trained_gather_site
from tests.compile.fused_graphs import used_gather_site
from tests.support.fake_group import fake_group
from tests.support.golden import check_golden
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

pytestmark = pytest.mark.usefixtures("reachable")


@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_ranks_have_one_text(kind: str, world_size: int) -> None:
    texts = set()
    for rank in sorted({0, world_size // 2, world_size - 1}):
        with fake_group(world_size, rank):
            report = SITES[kind]().run(schedule="fused")
            assert [p.schedule for s in report.sites for p in s.decision.plan] == ["fused"], report.notices
            texts.add((report.before, report.after, report.plan_hash, report.to_json()))
    assert len(texts) == 1


@pytest.mark.parametrize("schedule", ["ring", "fused", "chunked"])
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_a_second_wait_is_erased_with_the_site(kind: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``all_gather_tensor`` also waits, so ``wait_tensor(all_gather_tensor(x))`` waits twice. If the first wait stayed
    in the graph, the collective would stay, too, and the rewrite would fail."""
    wait = HandGraph.wait
    monkeypatch.setattr(HandGraph, "wait", lambda made, x: wait(made, wait(made, x)))
    with fake_group(8, 0):
        report = SITES[kind]().run(schedule=schedule)
    assert [p.schedule for s in report.sites for p in s.decision.plan] == [schedule], report.notices
    assert "wait_tensor" in report.before and "wait_tensor" not in report.after


def refused_sites() -> Iterator[tuple[str, Callable[[], HandGraph], str]]:
    def without_multiples() -> HandGraph:
        return gather_site(columns=12)

    def of_fp32() -> HandGraph:
        return gather_site(dtype=torch.float32)

    def of_odd_strides() -> HandGraph:
        made = HandGraph()
        gathered = made.gather(operand(made, 24, 16, "x"))
        every_other = made.call(aten.slice.Tensor, operand(made, 16, 80), 1, 0, 80, 2)
        return made.output(made.mm(gathered, every_other))

    def of_two_matmuls() -> HandGraph:
        made = HandGraph()
        pair = [made.mm(operand(made, 48, 16, f"x{i}"), operand(made, 16, 40, f"w{i}")) for i in range(2)]
        return made.output(made.scatter(made.call(aten.add.Tensor, *pair)))

    def of_dynamic_columns() -> HandGraph:
        made = HandGraph()
        gathered = made.gather(operand(made, 24, 16, "x"))
        return made.output(made.mm(gathered, made.input(16, 40, name="w", dtype=BF16, dynamic=[1])))

    def contracted() -> HandGraph:
        made = HandGraph()
        joined = made.gather_on(operand(made, 24, 8, "x"), 1)
        return made.output(made.mm(joined, operand(made, 16, 40)))

    def head() -> HandGraph:
        made = HandGraph()
        return made.output(made.gather(made.mm(operand(made, 24, 16, "x"), operand(made, 16, 40))))

    yield "columns", without_multiples, "rows of 16 and of 12 elements"
    yield "fp32", of_fp32, "the matrices are torch.float32; expected fp16 or bf16"
    yield "strides", of_odd_strides, "with strides [80, 2]"
    yield "two matmuls", of_two_matmuls, "2 matmuls are added into one reduction"
    yield "dynamic columns", of_dynamic_columns, "only known at run time"
    yield "contracted dim", contracted, "contracts the dim that is divided among the ranks"
    yield "gathered output", head, "no fused kernel computes matmul_all_gather"


@pytest.mark.parametrize(("site", "text"), [pytest.param(f, t, id=n) for n, f, t in refused_sites()])
def test_a_site_that_no_kernel_supports_is_refused_with_a_reason(site: Callable[[], HandGraph], text: str) -> None:
    with fake_group(2):
        report = site().run(schedule="fused")
    (found,) = report.sites
    assert (found.decision.status, found.decision.reasons[0].code) == ("refused", "schedule_not_available")
    assert text in found.decision.reasons[0].text and report.before == report.after


@pytest.mark.parametrize("schedule", ["fused", "chunked"])
def test_matmuls_that_an_op_leaves_are_reported_and_counted(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(2):
        (site,) = trained_gather_site().run(schedule=schedule).sites
        (alone,) = gather_site().run(schedule=schedule).sites
    (piece,), (without,) = site.decision.plan, alone.decision.plan
    assert (
        piece.parameters["matmuls"] == "1 of 2" and "matmuls" not in without.parameters and len(site.facts.matmuls) == 2
    )
    behind = piece.estimate_us["keep"] - without.estimate_us["keep"]
    # The gathered tensor is also copied out of the workspace.
    assert behind <= piece.estimate_us[schedule] - without.estimate_us[schedule] <= behind + 0.2


@pytest.mark.parametrize("schedule", ["fused", "chunked"])
@pytest.mark.parametrize("left_first", [True, False])
def test_a_token_count_that_is_dynamic_only_for_the_op_stays_dynamic(schedule: str, left_first: bool) -> None:
    """The batch size is dynamic, and the sequence dim is gathered. The site's overlap op computes the plain matmul,
    whose number of rows is dynamic. The batched matmul stays outside the op, and its number of rows is static."""
    with fake_group(2):
        made = HandGraph()
        gathered = made.gather_on(made.input(5, 24, 16, dtype=BF16, dynamic=[0]), 1)
        batch = gathered.meta["val"].shape[0]
        weight, w = operand(made, 16, 40), made.input(1, 16, 8, name="v", dtype=BF16)

        def batched() -> fx.Node:
            return made.call(aten.bmm.default, gathered, made.call(aten.expand.default, w, [batch, 16, 8]))

        def plain() -> fx.Node:
            return made.mm(made.view(gathered, batch * 48, 16), weight)

        made.output(*([batched(), plain()] if left_first else [plain(), batched()]))
        before = len(made.shapes.guards)
        report = made.run(schedule=schedule)
        (site,) = report.sites
        assert [p.schedule for p in site.decision.plan] == [schedule, "keep"] and site.decision.plan[0].parameters[
            "max_tokens"
        ] == 16384, report.notices
        assert site.decision.plan[0].parameters["matmuls"] == "1 of 2" and len(made.shapes.guards) == before


def test_dynamic_tokens_that_are_columns_are_refused() -> None:
    """``fused`` supports dynamic sizes only for the left operand's rows. In the transposed product, tokens are columns
    of the right operand."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(48, 16, name="x", dtype=BF16, dynamic=[0])
        product = made.mm(operand(made, 40, 16), made.call(aten.permute.default, x, [1, 0]))
        (site,) = made.output(made.scatter_on(product, 1)).run(schedule="fused").sites
    assert (site.decision.status, site.decision.reasons[0].code) == ("refused", "schedule_not_available"), site.decision


def golden(made: HandGraph) -> str:
    report = made.run(schedule="fused")
    return report.after


def test_gather_golden() -> None:
    """The graph has no collective and no gathered tensor."""
    with fake_group(2):
        check_golden(golden(gather_site()), "fused_graph/gather.txt")


def test_gathered_tensor_used_golden() -> None:
    with fake_group(2):
        check_golden(golden(used_gather_site()), "fused_graph/gathered_tensor_used.txt")


def test_a_weights_gradient_reads_the_gathered_tensor_golden() -> None:
    with fake_group(2):
        check_golden(golden(trained_gather_site()), "fused_graph/a_weights_gradient_reads_the_gathered_tensor.txt")


def test_scatter_golden() -> None:
    with fake_group(2):
        check_golden(golden(scatter_site()), "fused_graph/scatter.txt")


def test_reduce_golden() -> None:
    with fake_group(2):
        check_golden(golden(reduce_site()), "fused_graph/reduce.txt")
