# SPDX-License-Identifier: Apache-2.0
"""fp8 sites (``_scaled_mm``) of schedule ``chunked``: scales, workspace and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Iterator

import pytest
import torch
from torch import fx

from overlap_inductor.facts.machine import machine_for
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.sites import sizes as site_sizes
from tests.compile.scaled_graphs import BF16
from tests.compile.scaled_graphs import FP8
from tests.compile.scaled_graphs import FP8_WIDE
from tests.compile.scaled_graphs import convert
from tests.compile.scaled_graphs import fp8
from tests.compile.scaled_graphs import gather_site
from tests.compile.scaled_graphs import gathered_scales
from tests.compile.scaled_graphs import multiply
from tests.compile.scaled_graphs import reduce_site
from tests.compile.scaled_graphs import scatter_site
from tests.compile.scaled_graphs import two_weights
from tests.compile.scaled_graphs import weight
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

pytestmark = pytest.mark.usefixtures("reachable")


SITES: dict[str, Callable[[], HandGraph]] = {
    **{f"{name}{', row-wise' * row_wise}": (lambda site=site, row_wise=row_wise: site(row_wise))  # type: ignore[misc]
       for name, site in (("gather", gather_site), ("scatter", scatter_site), ("reduce", reduce_site))
       for row_wise in (False, True)},
    "two weights": two_weights,
    "gathered tensor used": lambda: two_weights(True),
    "gathered scales": gathered_scales,
}  # fmt: skip


@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize("world_size", [2, 8])
def test_ranks_have_one_text(kind: str, world_size: int) -> None:
    texts = set()
    for rank in sorted({0, world_size // 2, world_size - 1}):
        with fake_group(world_size, rank):
            report = SITES[kind]().run(schedule="chunked")
            assert [p.schedule for s in report.sites for p in s.decision.plan] == ["chunked"], report.notices
            texts.add((report.before, report.after, report.plan_hash, report.to_json()))
    assert len(texts) == 1


def op_of(made: HandGraph, pattern: str) -> fx.Node:
    (op,) = (
        n
        for n in made.graph.nodes
        if n.target is getattr(torch.ops.overlap_inductor, f"chunked_scaled_{pattern}").default
    )
    return op


def test_gathered_bytes_are_multiplied_as_fp8_and_returned_as_bytes() -> None:
    """The op returns the gathered tensor only if another node reads it. The view of the bytes as fp8 is no such
    node."""
    for used in (False, True):
        with fake_group(2):
            made = two_weights(used)
            made.run(schedule="chunked")
        op = op_of(made, "all_gather_matmul")
        assert op.args[1].meta["val"].dtype == FP8 and op.args[8] is used
        assert op.args[6:8] == (["bfloat16", "bfloat16"], [False, False])
        bits = [n for n in made.graph.nodes if n.target is aten.view.dtype and n.args[1] is torch.uint8]
        assert len(bits) == used


def test_an_op_is_placed_after_the_gather_of_its_scales() -> None:
    with fake_group(2):
        made = gathered_scales()
        report = made.run(schedule="chunked")
    order = list(made.graph.nodes)
    op = op_of(made, "all_gather_matmul")
    (scales,) = op.args[4]
    assert order.index(scales) < order.index(op) and scales.target is torch.ops._c10d_functional.wait_tensor.default
    (miss,) = report.near_misses
    assert miss.reason.code == "no_matmul" and "moves a scale of" in miss.reason.text


def test_scales_are_in_the_order_of_the_rows() -> None:
    """If ``[batch, tokens, features]`` is gathered or scattered along the tokens, the op takes the rows of rank 0
    first, then those of rank 1. So the scales must also be ordered by rank."""
    with fake_group(2):
        made = HandGraph()
        flat = made.view(made.gather_on(fp8(made, 3, 32, 32), 1), 192, 32)
        made.output(multiply(made, flat, weight(made), True))
        made.run(schedule="chunked")
        op = op_of(made, "all_gather_matmul")
        (scale,) = op.args[4]
        assert op.args[8] is False, (
            "pieces of the gathered tensor that are joined before the matmul do not count as another reader"
        )
        scattered = HandGraph()
        product = multiply(scattered, scattered.view(fp8(scattered, 3, 64, 32), 192, 32), weight(scattered), True)
        scattered.output(scattered.scatter_on(scattered.view(product, 3, 64, 48), 1)).run(schedule="chunked")
        other = op_of(scattered, "matmul_reduce_scatter").args[4]
    for node in (scale, other):
        # The scales are permuted from [batch, rank, row] to [rank, batch, row].
        permuted = node.args[0]
        assert (
            permuted.target is aten.permute.default
            and permuted.args[1][:3] == [1, 0, 2]
            and permuted.args[0].args[0].name == "scale_a"
        )


def test_scales_change_sides_if_the_product_is_transposed() -> None:
    with fake_group(2):
        made = HandGraph()
        product = multiply(made, fp8(made, 48, 32), weight(made, 32, 64), True)
        made.output(made.scatter_on(product, 1)).run(schedule="chunked")
        op = op_of(made, "matmul_reduce_scatter")
    assert [tuple(n.meta["val"].shape) for n in op.args[1:3]] == [(64, 32), (32, 48)]
    assert [(tuple(n.meta["val"].shape), n.args[0].name) for n in op.args[4:6]] == [
        ((64, 1), "scale_b"),
        ((1, 48), "scale_a"),
    ]


def workspace_of(made: HandGraph) -> int:
    """The bytes of workspace that the graph's only site requests."""
    (agree,) = (n for n in made.graph.nodes if n.target is torch.ops.overlap_inductor.agree.default)
    ((_, nbytes, _),) = json.loads(agree.args[3])
    return int(nbytes)


def test_the_plan_requests_workspace_for_the_bytes_that_are_sent() -> None:
    """A gather sends fp8, and a reduction sends bf16."""
    for site, nbytes in ((gather_site, 64 * 32), (scatter_site, 64 * 48 * 2), (reduce_site, 2 * 64 * 48 * 2)):
        with fake_group(2):
            made = site()
            made.run(schedule="chunked")
        assert workspace_of(made) == nbytes


def test_a_dynamic_token_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace fits the largest number of rows. Below the break-even row count, the plain collective runs. The
    break-even depends on the matmul rate of fp8."""
    with fake_group(2):
        made = gathered_scales(16, (0,))
        (forced,) = made.run(schedule="chunked", max_tokens=1000).sites
    assert [(p.schedule, p.tokens) for p in forced.decision.plan] == [("chunked", (0, 1000)), ("keep", (1001, None))]
    assert workspace_of(made) == 1000 * 4096
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(2):
        (site,) = gathered_scales(4096, (0,)).run(schedule="auto", max_tokens=2**16).sites
    below, moving, above = site.decision.plan
    assert [p.schedule for p in site.decision.plan] == ["keep", "chunked", "keep"]
    assert (
        moving.tokens == (below.tokens[1] + 1, 2**16)
        and json.loads(moving.parameters["settings"])["min_rows"] == moving.tokens[0]
    )
    flops = 2 * 8192 * 4096 * 4096
    assert moving.estimate_us["matmul"] == pytest.approx(flops / machine_for("cuda").matmul_flops[1] * 1e6, abs=0.1)


def test_auto_takes_chunks_if_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(2):
        (large,) = gather_site(True, 8192, 8192, 8192).run(schedule="auto").sites
        (small,) = gather_site(True).run(schedule="auto").sites
    assert [p.schedule for p in large.decision.plan] == ["chunked"] and "fused" not in large.decision.plan[
        0
    ].estimate_us
    assert small.decision.reasons[0].code == "too_small" and "us in chunks" in small.decision.reasons[0].text


def refused_sites() -> Iterator[tuple[str, Callable[[], HandGraph], str]]:
    def of_two_kinds() -> HandGraph:
        made = HandGraph()
        gathered = made.gather(made.input(32, 32, name="x", dtype=BF16))
        plain = made.mm(gathered, made.input(32, 48, name="v", dtype=BF16))
        return made.output(plain, multiply(made, made.call(convert, gathered, FP8), weight(made)))

    def made_fp8_behind_the_gather() -> HandGraph:
        made = HandGraph()
        gathered = made.gather(made.input(32, 32, name="x", dtype=BF16))
        return made.output(multiply(made, made.call(convert, gathered, FP8), weight(made)))

    def weight_in_rows() -> HandGraph:
        made = HandGraph()
        return made.output(multiply(made, made.gather(fp8(made, 32, 32)), fp8(made, 32, 48, name="w")))

    def weight_with_gaps() -> HandGraph:
        made = HandGraph()
        cut = made.call(aten.slice.Tensor, weight(made, 40), 0, 0, 32)
        return made.output(multiply(made, made.gather(fp8(made, 32, 32)), cut))

    def sums_of_fp32() -> HandGraph:
        made = HandGraph()
        return made.output(made.reduce(multiply(made, fp8(made, 64, 32), weight(made), out=torch.float32)))

    def of_two_dtypes_transposed() -> HandGraph:
        made = HandGraph()
        return made.output(made.scatter_on(multiply(made, fp8(made, 48, 32, dtype=FP8_WIDE), weight(made, 32, 64)), 1))

    def of_odd_rows_transposed() -> HandGraph:
        made = HandGraph()
        return made.output(made.scatter_on(multiply(made, fp8(made, 40, 32), weight(made, 32, 64)), 1))

    def with_something_between() -> HandGraph:
        made = HandGraph()
        return made.output(made.scatter(made.call(aten.relu.default, multiply(made, fp8(made, 64, 32), weight(made)))))

    def of_two_matmuls() -> HandGraph:
        made = HandGraph()
        pair = [
            multiply(made, fp8(made, 64, 32, name=f"x{i}"), weight(made, name=f"w{i}"), of=f"{i}") for i in range(2)
        ]
        return made.output(made.reduce(made.call(aten.add.Tensor, *pair)))

    def of_dynamic_width() -> HandGraph:
        made = HandGraph()
        gathered = made.gather(fp8(made, 32, 32))
        w = made.call(aten.permute.default, fp8(made, 48, 32, name="w", dynamic=(0,)), [1, 0])
        return made.output(multiply(made, gathered, w))

    yield "two kinds", of_two_kinds, "of the kinds mm and scaled_mm"
    yield (
        "bf16 is gathered",
        made_fp8_behind_the_gather,
        "the collective gathers torch.bfloat16, which is cast to torch.float8_e4m3fn after it",
    )
    yield "weight in rows", weight_in_rows, "strides [48, 1]; expected contiguous columns, which start a multiple"
    yield "weight with gaps", weight_with_gaps, "strides [1, 40]; expected contiguous columns, which start a multiple"
    yield "fp32 sums", sums_of_fp32, "partial sums of torch.float32"
    yield "odd K", lambda: gather_site(inner=24), "rows of 24 and of 48 elements"
    yield "odd N", lambda: gather_site(columns=40), "rows of 32 and of 40 elements"
    yield (
        "two dtypes, transposed",
        of_two_dtypes_transposed,
        "transposed product of torch.float8_e4m3fn and torch.float8_e5m2",
    )
    yield "odd rows that are columns", of_odd_rows_transposed, "rows of 32 and of 40 elements"
    yield "activation", with_something_between, "an unsupported op between matmul and collective"
    yield "two matmuls", of_two_matmuls, "2 matmuls are added into one reduction"
    yield "dynamic columns", of_dynamic_width, "only known at run time"


@pytest.mark.parametrize(("site", "text"), [pytest.param(f, t, id=n) for n, f, t in refused_sites()])
def test_a_site_that_no_op_supports_is_refused_with_a_reason(site: Callable[[], HandGraph], text: str) -> None:
    with fake_group(2):
        report = site().run(schedule="chunked")
    (found,) = report.sites
    assert (found.decision.status, found.decision.reasons[0].code) == (
        "refused",
        "schedule_not_available",
    ), found.decision
    assert text in found.decision.reasons[0].text and report.before == report.after


@pytest.mark.parametrize(("schedule", "noun"), [("fused", "fused kernel"), ("wave_groups", "signalling matmul")])
def test_schedules_without_such_ops_say_so(schedule: str, noun: str) -> None:
    with fake_group(2):
        (site,) = reduce_site().run(schedule=schedule).sites
    assert f"no {noun} multiplies fp8 with scales" in site.decision.reasons[0].text


def test_a_scale_that_needs_the_gathered_tensor_makes_no_site() -> None:
    """The op would need its own result as an operand."""
    with fake_group(2):
        made = HandGraph()
        gathered = made.gather(fp8(made, 32, 32))
        scale = made.call(
            aten.amax.default, made.call(aten.abs.default, made.call(convert, gathered, torch.float32)), [1], True
        )
        report = made.output(
            multiply(made, gathered, weight(made), scales=(scale, made.input(1, 48, name="scale_b")))
        ).run(schedule="chunked")
    (miss,) = report.near_misses
    assert (
        miss.reason.code == "weight_depends_on_collective" and "the scale of" in miss.reason.text and report.sites == []
    )


def test_the_scale_of_another_matmul_may_need_the_gathered_tensor() -> None:
    """One of two matmuls has a scale that needs the whole gathered tensor. This matmul stays in the graph, and reads
    the tensor that the op returns."""
    with fake_group(2):
        made = HandGraph()
        gathered = made.gather(fp8(made, 32, 32))
        scale = made.call(
            aten.amax.default, made.call(aten.abs.default, made.call(convert, gathered, torch.float32)), [1], True
        )
        first = multiply(made, gathered, weight(made))
        second = multiply(made, gathered, weight(made, name="v"), scales=(scale, made.input(1, 48, name="columns")))
        (site,) = made.output(first, second).run(schedule="chunked").sites
    assert (
        site.decision.status == "overlapped"
        and len(site.facts.matmuls) == 1
        and op_of(made, "all_gather_matmul").args[8] is True
    )


def test_sizes_that_the_library_rejects_are_refused() -> None:
    assert (
        chunked_plan.why_not(FP8, 16, 16, scaled=True) is None
        and chunked_plan.why_not(FP8_WIDE, 16, 16, scaled=True) is None
    )
    assert all(chunked_plan.why_not(FP8, *sizes, scaled=True) for sizes in ((8, 16), (16, 8), (0, 16)))
    assert "fp8 with scales here, not torch.bfloat16" in str(chunked_plan.why_not(BF16, 16, 16, scaled=True))
