"""Sites of schedule ``fused`` in the graph: when a kernel is chosen, what is written, and what workspace the plan asks
for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from collections.abc import Iterator

import pytest
import torch
from expecttest import TestCase
from torch import fx

from overlap_inductor.facts.machine import machine_for
from overlap_inductor.lowerings.chunked.cost import COST
from overlap_inductor.report.html.page import render_html
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.text import render_text
from overlap_inductor.runtime.arena import SLOTS
from overlap_inductor.runtime.arena import Request
from overlap_inductor.runtime.arena import planned_bytes
from overlap_inductor.sites import sizes as site_sizes
from overlap_inductor.torch_compat import symmetric
from tests.fake_group import fake_group
from tests.hand_graph import HandGraph
from tests.hand_graph import aten

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs of one machine."""
    monkeypatch.setattr(symmetric, "why_no_symmetric_memory", lambda ranks, device: None)


def operand(made: HandGraph, rows: int, columns: int, name: str = "w", dtype: torch.dtype = BF16) -> fx.Node:
    return made.input(rows, columns, name=name, dtype=dtype)


def gather_site(rows: int = 24, inner: int = 16, columns: int = 40, dtype: torch.dtype = BF16) -> HandGraph:
    made = HandGraph()
    gathered = made.gather(operand(made, rows, inner, "x", dtype))
    return made.output(made.mm(gathered, operand(made, inner, columns, dtype=dtype)))


def used_gather_site() -> HandGraph:
    made = HandGraph()
    gathered = made.gather(operand(made, 24, 16, "x"))
    biased = made.call(aten.addmm.default, made.input(8, name="bias", dtype=BF16), gathered, operand(made, 16, 8, "v"))
    return made.output(made.mm(gathered, operand(made, 16, 40)), biased, made.call(aten.add.Tensor, gathered, 1))


def trained_gather_site() -> HandGraph:
    """As a row-parallel layer's backward: what is gathered is multiplied by the weight, and contracted with activations
    into the weight's gradient."""
    made = HandGraph()
    gathered = made.gather(operand(made, 24, 16, "x"))
    activations = operand(made, 24 * made.world_size, 8, "activations")
    gradient = made.mm(made.call(aten.permute.default, gathered, [1, 0]), activations)
    return made.output(made.mm(gathered, operand(made, 16, 40)), gradient)


def summed_scatter_site(biased: int = 0) -> HandGraph:
    """As backward of three layers that read one tensor; the last ``biased`` of them with a bias."""
    made = HandGraph()
    rows, terms = 24 * made.world_size, []
    for i, inner in enumerate((16, 24, 8)):
        pair = operand(made, rows, inner, f"x{i}"), operand(made, inner, 40, f"w{i}")
        product = (
            made.call(aten.addmm.default, made.input(40, name=f"bias{i}", dtype=BF16), *pair)
            if i >= 3 - biased
            else made.mm(*pair)
        )
        terms.append(made.view(product, 1, rows, 40))
    total = made.call(aten.add.Tensor, made.call(aten.add.Tensor, terms[0], terms[1]), terms[2])
    return made.output(made.scatter_on(total, 1))


def scatter_site() -> HandGraph:
    made = HandGraph()
    return made.output(made.scatter(made.mm(operand(made, 24 * made.world_size, 16, "x"), operand(made, 16, 40))))


def reduce_site(rows: int = 24) -> HandGraph:
    made = HandGraph()
    return made.output(made.reduce(made.mm(operand(made, rows * made.world_size, 16, "x"), operand(made, 16, 40))))


SITES: dict[str, Callable[[], HandGraph]] = {
    "gather": gather_site,
    "gathered tensor used": used_gather_site,
    "a weight's gradient beside it": trained_gather_site,
    "scatter": scatter_site,
    "reduce": reduce_site,
}


@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_one_text_for_every_rank(kind: str, world_size: int) -> None:
    texts = set()
    for rank in sorted({0, world_size // 2, world_size - 1}):
        with fake_group(world_size, rank):
            report = SITES[kind]().run(schedule="fused")
            assert [p.schedule for s in report.sites for p in s.decision.plan] == ["fused"], report.notices
            texts.add((report.before, report.after, report.plan_hash, report.to_json()))
    assert len(texts) == 1


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
    yield "fp32", of_fp32, "fp16 or bf16, not torch.float32"
    yield "strides", of_odd_strides, "with strides [80, 2]"
    yield "two matmuls", of_two_matmuls, "2 matmuls are summed into one reduction"
    yield "dynamic columns", of_dynamic_columns, "only known when it runs"
    yield "contracted dim", contracted, "do not lie in the ranks' order"
    yield "gathered output", head, "no fused kernel computes matmul_all_gather"


@pytest.mark.parametrize(("site", "text"), [pytest.param(f, t, id=n) for n, f, t in refused_sites()])
def test_what_no_kernel_computes_is_refused_with_its_reason(site: Callable[[], HandGraph], text: str) -> None:
    with fake_group(2):
        report = site().run(schedule="fused")
    (found,) = report.sites
    assert (found.decision.status, found.decision.reasons[0].code) == ("refused", "schedule_not_available")
    assert text in found.decision.reasons[0].text and report.before == report.after


@pytest.mark.parametrize("schedule", ["fused", "chunked"])
def test_the_matmuls_that_an_op_leaves_are_said_and_count(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(2):
        (site,) = trained_gather_site().run(schedule=schedule).sites
        (alone,) = gather_site().run(schedule=schedule).sites
    (piece,), (without,) = site.decision.plan, alone.decision.plan
    assert (
        piece.parameters["matmuls"] == "1 of 2" and "matmuls" not in without.parameters and len(site.facts.matmuls) == 2
    )
    behind = piece.estimate_us["keep"] - without.estimate_us["keep"]
    # (And the gathered tensor is copied out of the workspace.)
    assert behind <= piece.estimate_us[schedule] - without.estimate_us[schedule] <= behind + 0.2


@pytest.mark.parametrize("schedule", ["fused", "chunked"])
@pytest.mark.parametrize("left_first", [True, False])
def test_a_count_that_only_the_op_sees_as_dynamic_stays_so(schedule: str, left_first: bool) -> None:
    """The batch is dynamic, the sequence is gathered: to a batched matmul, which is left behind, its rows are a number,
    to the op they are not."""
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


@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_one_text_of_a_sum_in_chunks(world_size: int) -> None:
    texts = set()
    for rank in (0, world_size - 1):
        with fake_group(world_size, rank):
            report = summed_scatter_site().run(schedule="chunked")
            assert [p.schedule for s in report.sites for p in s.decision.plan] == ["chunked"], report.notices
            texts.add((report.before, report.after, report.plan_hash, report.to_json()))
    assert len(texts) == 1


def test_a_sum_with_two_biases_is_refused() -> None:
    with fake_group(2):
        (site,) = summed_scatter_site(biased=2).run(schedule="chunked").sites
    assert (
        site.decision.status == "refused"
        and "2 of the matmuls that are summed into one reduction have a bias" in site.decision.reasons[0].text
    )


@pytest.mark.parametrize("read_elsewhere", [False, True])
def test_a_sum_that_inductor_made_one_matmul_is_a_sum(read_elsewhere: bool) -> None:
    """``addmm(x @ a, y, b)``, as it writes sums of 2-D tensors; with one more behind it, and a bias of one row in the
    first. Where a product is needed whole, too, it is none."""
    with fake_group(2):
        made = HandGraph()
        pairs = [
            (operand(made, 48, inner, f"x{i}"), operand(made, inner, 40, f"w{i}"))
            for i, inner in enumerate((16, 24, 8))
        ]
        first = total = made.call(aten.addmm.default, made.input(40, name="row", dtype=BF16), *pairs[0])
        for pair in pairs[1:]:
            total = made.call(aten.addmm.default, total, *pair)
        report = made.output(made.scatter(total), *([first] if read_elsewhere else [])).run(schedule="chunked")
    (site,) = report.sites
    assert len(site.facts.matmuls) == (2 if read_elsewhere else 3)
    if read_elsewhere:
        assert (
            site.decision.status == "refused"
            and "not plain ones with a bias of one row" in site.decision.reasons[0].text
        )
    else:
        line = next(line for line in report.after.splitlines() if "chunked_sum_matmul_reduce_scatter" in line)
        assert "[x0, x2, x1], [w0, w2, w1], row" in line and "mm.default" not in report.after, report.after


def test_auto_weighs_the_copy_of_what_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few columns hide a long gather, copying it costs more than is won."""
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
        # (Chunks hide most of it behind a quarter of the matmul.)
        assert [more("chunked", 2048), more("chunked", 256)] == pytest.approx(
            [COST.copy_exposed * copy, copy - 256 * quarter], abs=1
        )


def test_auto_takes_the_kernel_where_it_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_chunks_pay_earlier_where_a_calls_tensors_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays switched off, or one hardware queue, leave the host all launches."""
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


def workspace_of(report: OverlapReport, made: HandGraph) -> dict[str, list[list[int]]]:
    agree = next(n for n in made.graph.nodes if n.target is torch.ops.overlap_inductor.agree.default)
    # What all ranks of a group compare holds no group's needs: a rank's other groups have other names elsewhere.
    assert set(json.loads(agree.args[1])) == {
        "overlap_inductor",
        "mode",
        "config",
        "groups",
        "steps",
        "overlaps",
        "plan",
    }
    assert agree.args[4] == report.config["workspace_limit"]
    return {agree.args[0]: [numbers for _, *numbers in json.loads(agree.args[3])]}


def test_the_plan_asks_for_workspace() -> None:
    """Bytes: a gather the gathered tensor; a scatter every source's shard in whole tiles of 128 rows, an all-reduce
    twice that. Signals: a band each, of a gather a slice each."""
    for site, numbers in (
        (gather_site, [48 * 16 * 2, 4]),
        (scatter_site, [256 * 40 * 2, 1]),
        (reduce_site, [2 * 256 * 40 * 2, 2]),
    ):
        with fake_group(2):
            made = site()
            assert workspace_of(made.run(schedule="fused"), made) == {"0": [numbers]}


def test_the_report_says_what_memory_the_sites_hold() -> None:
    with fake_group(2):
        report = scatter_site().run(schedule="fused")
        kept = scatter_site().run(schedule="keep")
        planned = scatter_site().run(schedule="fused", mode="report")
    request = Request(report.sites[0].facts.id, 256 * 40 * 2, 1)
    held = planned_bytes([request], SLOTS, 2)
    assert (
        report.workspaces == [{"ranks": [0, 1], "bytes": held}]
        and held > request.nbytes
        and kept.workspaces == planned.workspaces == []
    )
    line = f"symmetric memory: {held / 1024:.1f} KiB on each of 2 ranks, of at most 4.0 GiB a group"
    assert line in render_text(report).splitlines() and line in render_html(report)
    assert OverlapReport.from_json(report.to_json(graphs=True)).workspaces == report.workspaces


def dynamic_site(rows: int = 48) -> HandGraph:
    made = HandGraph()
    return made.output(
        made.reduce(made.mm(made.input(rows, 8192, name="x", dtype=BF16, dynamic=[0]), operand(made, 8192, 4096)))
    )


@pytest.mark.parametrize("role", ["M", "N"])
def test_tiles_follow_the_tokens_wherever_they_lie(role: str) -> None:
    """128 x 256 each: of columns that are tokens, too (``W @ gathered.T``), and few tokens are one tile along."""
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


def test_one_of_several_symbolic_sizes_counts_the_tokens() -> None:
    """A batch and its rows that are both symbolic would be scaled twice."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(4, 256, 64, dtype=BF16, dynamic=[0, 1])
        sizes = [*x.meta["val"].shape[:2], 512]
    assert (
        site_sizes._scaled(sizes, 2.0) == [8, 256, 512]
        and site_sizes._scaled(sizes[1:], 0.5) == [128, 512]
        and site_sizes._scaled([256, 512], 2.0) == [256, 512]
    )


def test_a_dynamic_token_count_holds_workspace_up_to_the_planned_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_group(2):
        made = dynamic_site()
        report = made.run(schedule="fused", max_tokens=1000)
    # 500 rows a shard are four tiles of 128.
    assert workspace_of(report, made) == {"0": [[2 * 2 * 512 * 4096 * 2, 4]]}
    monkeypatch.setattr(site_sizes, "machine_for", lambda device_type: machine_for("cuda"))
    with fake_group(2):
        (site,) = dynamic_site(8192).run(schedule="auto", patterns=("matmul_all_reduce",), max_tokens=9000).sites
        (small,) = dynamic_site(16).run(schedule="auto", max_tokens=9000).sites
    # What serves few tokens and what serves many, whatever the example has (16 rows are one tile of 128, and 128 of
    # them no more).
    assert (
        [p.schedule for p in site.decision.plan]
        == ["small_message", "keep", "fused", "keep"]
        == [p.schedule for p in small.decision.plan]
    )
    few, between, many, beyond = site.decision.plan
    assert (few.tokens, between.tokens, many.tokens, beyond.tokens) == (
        (0, 1024),
        (1025, 2047),
        (2048, 9000),
        (9001, None),
    )
    assert few.parameters["beyond"] == ["fused", many.parameters["settings"]] and few.parameters["norm"] is False


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


def test_tokens_that_are_columns_are_not_taken_for_a_number() -> None:
    """The transposed product has them in its right operand, of which a kernel's tensor map is made."""
    with fake_group(2):
        made = HandGraph()
        x = made.input(48, 16, name="x", dtype=BF16, dynamic=[0])
        product = made.mm(operand(made, 40, 16), made.call(aten.permute.default, x, [1, 0]))
        (site,) = made.output(made.scatter_on(product, 1)).run(schedule="fused").sites
    assert (site.decision.status, site.decision.reasons[0].code) == ("refused", "schedule_not_available"), site.decision


def test_the_largest_sites_are_kept_where_workspace_is_short() -> None:
    with fake_group(2):
        (large,), (small,) = (
            m.run(schedule="fused", workspace_limit=1).sites
            for m in (gather_site(2**12, 128, 8), gather_site(2**10, 128, 8))
        )
    assert [large.decision.reasons[0].code, small.decision.status] == ["workspace", "overlapped"]


def golden(made: HandGraph) -> str:
    report = made.run(schedule="fused")
    return re.sub(r"plan [0-9a-f]{16}", "plan ...", report.after)


class TestGolden(TestCase):
    """The graph afterwards, word for word; run with EXPECTTEST_ACCEPT=1 after an intended change and read the
    difference."""

    maxDiff = None

    def test_gather(self) -> None:
        """A gathered tensor that nobody reads, or a collective that is still there."""
        with fake_group(2):
            self.assertExpectedInline(
                golden(gather_site()),
                """\
x: bfloat16[24, 16] = input
w: bfloat16[16, 40] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x, \
'[["all_gather_matmul-6b87b511", 1536, 4]]', 4096)
fused_all_gather_matmul_default = overlap_inductor.fused_all_gather_matmul.default(agree_default, x, [w], [None], \
False, '{"column_tiles": 1, "copies_from": 4194304, "halves": true, "parts": 4, "parts_from": 4096, "pushers": 12, \
"slices": 4, "slices_tiles": 132, "stages": 4}', '0', 'all_gather_matmul-6b87b511')
getitem = <built-in function getitem>(fused_all_gather_matmul_default, 0)
getitem_2: bfloat16[48, 40] = <built-in function getitem>(getitem, 0)
return [getitem_2]
""",
            )

    def test_gathered_tensor_used(self) -> None:
        with fake_group(2):
            self.assertExpectedInline(
                golden(used_gather_site()),
                """\
x: bfloat16[24, 16] = input
bias: bfloat16[8] = input
v: bfloat16[16, 8] = input
w: bfloat16[16, 40] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x, \
'[["all_gather_matmul-6b87b511", 1536, 4]]', 4096)
fused_all_gather_matmul_default = overlap_inductor.fused_all_gather_matmul.default(agree_default, x, [v, w], \
[bias, None], True, '{"column_tiles": 2, "copies_from": 4194304, "halves": true, "parts": 4, "parts_from": 4096, \
"pushers": 12, "slices": 4, "slices_tiles": 132, "stages": 4}', '0', 'all_gather_matmul-6b87b511')
getitem = <built-in function getitem>(fused_all_gather_matmul_default, 0)
getitem_2: bfloat16[48, 16] = <built-in function getitem>(getitem, 2)
getitem_3: bfloat16[48, 8] = <built-in function getitem>(getitem, 0)
getitem_4: bfloat16[48, 40] = <built-in function getitem>(getitem, 1)
add_tensor: bfloat16[48, 16] = aten.add.Tensor(getitem_2, 1)
return [getitem_4, getitem_3, add_tensor]
""",
            )

    def test_a_weights_gradient_reads_the_gathered_tensor(self) -> None:
        with fake_group(2):
            self.assertExpectedInline(
                golden(trained_gather_site()),
                """\
x: bfloat16[24, 16] = input
activations: bfloat16[48, 8] = input
w: bfloat16[16, 40] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x, \
'[["all_gather_matmul-6b87b511", 1536, 4]]', 4096)
fused_all_gather_matmul_default = overlap_inductor.fused_all_gather_matmul.default(agree_default, x, [w], [None], \
True, '{"column_tiles": 1, "copies_from": 4194304, "halves": true, "parts": 4, "parts_from": 4096, "pushers": 12, \
"slices": 4, "slices_tiles": 132, "stages": 4}', '0', 'all_gather_matmul-6b87b511')
getitem = <built-in function getitem>(fused_all_gather_matmul_default, 0)
getitem_2: bfloat16[48, 16] = <built-in function getitem>(getitem, 1)
getitem_3: bfloat16[48, 40] = <built-in function getitem>(getitem, 0)
permute_default: bfloat16[16, 48] = aten.permute.default(getitem_2, [1, 0])
mm_default: bfloat16[16, 8] = aten.mm.default(permute_default, activations)
return [getitem_3, mm_default]
""",
            )

    def test_a_sum_scattered_in_chunks(self) -> None:
        """A matmul of the sum that is still there, a bias that is added to another one."""
        with fake_group(2):
            report = summed_scatter_site(biased=1).run(schedule="chunked")
            self.assertExpectedInline(
                re.sub(r"plan [0-9a-f]{16}", "plan ...", report.after),
                """\
x0: bfloat16[48, 16] = input
w0: bfloat16[16, 40] = input
x1: bfloat16[48, 24] = input
w1: bfloat16[24, 40] = input
x2: bfloat16[48, 8] = input
w2: bfloat16[8, 40] = input
bias2: bfloat16[40] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x0, \
'[["matmul_reduce_scatter-fec50841", 3840, 1]]', 4096)
chunked_sum_matmul_reduce_scatter_default = overlap_inductor.chunked_sum_matmul_reduce_scatter.default(agree_default, \
[x2, x1, x0], [w2, w1, w0], bias2, '{"bands": 1, "transport": "auto"}', 'sum', '0', 'matmul_reduce_scatter-fec50841')
getitem_2: bfloat16[24, 40] = <built-in function getitem>(chunked_sum_matmul_reduce_scatter_default, 0)
reshape_default_3: bfloat16[1, 24, 40] = aten.reshape.default(getitem_2, [1, 24, 40])
return [reshape_default_3]
""",
            )

    def test_scatter(self) -> None:
        with fake_group(2):
            self.assertExpectedInline(
                golden(scatter_site()),
                """\
x: bfloat16[48, 16] = input
w: bfloat16[16, 40] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x, \
'[["matmul_reduce_scatter-fec50841", 20480, 1]]', 4096)
fused_matmul_reduce_scatter_default = overlap_inductor.fused_matmul_reduce_scatter.default(agree_default, x, w, None, \
'{"halves": true, "stages": 4, "stagger_ns": 150}', 'sum', '0', 'matmul_reduce_scatter-fec50841')
getitem: bfloat16[24, 40] = <built-in function getitem>(fused_matmul_reduce_scatter_default, 0)
return [getitem]
""",
            )

    def test_reduce(self) -> None:
        with fake_group(2):
            self.assertExpectedInline(
                golden(reduce_site()),
                """\
x: bfloat16[48, 16] = input
w: bfloat16[16, 40] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x, \
'[["matmul_all_reduce-2c2f6384", 40960, 2]]', 4096)
fused_matmul_all_reduce_default = overlap_inductor.fused_matmul_all_reduce.default(agree_default, x, w, None, \
'{"halves": true, "parts": 0, "pushers": 0, "stages": 4}', 'sum', '0', 'matmul_all_reduce-2c2f6384')
getitem: bfloat16[48, 40] = <built-in function getitem>(fused_matmul_all_reduce_default, 0)
return [getitem]
""",
            )
