"""The rewritten graph: one text for every rank, a bounded number of nodes, and the steps word for word."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import TestCase
from torch import fx

from overlap_inductor.report.report import OverlapReport
from tests.compile.spellings import second_weight
from tests.compile.spellings import weight
from tests.compile.spellings import world
from tests.compile.spellings import x3
from tests.fake_group import all_gather
from tests.fake_group import fake_group
from tests.fake_group import reduce_scatter
from tests.fake_group import report_of
from tests.hand_graph import HandGraph

# The same text on every rank; a bounded number of nodes.


def hand_made(kind: str, world_size: int) -> HandGraph:
    made = HandGraph()
    x, w = made.input(2, 2 * world_size, 16), made.input(16, 4 * world_size, name="w")
    rows = 4 * world_size
    if kind in ("gather", "gather inner dim"):
        gathered = made.gather(x) if kind == "gather" else made.gather_on(x, 1)
        return made.output(made.mm(made.view(gathered, rows * world_size, 16), w))
    y = made.mm(made.view(x, rows, 16), w)
    if kind in ("scatter inner dim", "scatter hidden", "reduce"):
        y = made.view(y, 2, 2 * world_size, 4 * world_size)
    result: fx.Node = {
        "scatter": lambda: made.scatter(y),
        "scatter inner dim": lambda: made.scatter_on(y, 1),
        "scatter hidden": lambda: made.scatter_on(y, 2),
        "reduce": lambda: made.reduce(y),
        "head": lambda: made.gather(y),
    }[kind]()
    return made.output(result)


def test_one_text_whatever_a_rank_calls_its_device() -> None:
    """``cuda:1`` in a node's arguments is a rank number like any other."""
    texts = set()
    for rank in (0, 3):
        with fake_group(4, rank):
            made = HandGraph()
            x, w = (
                made.on(f"cuda:{rank}", 4096, 1024, dtype=torch.bfloat16),
                made.on(f"cuda:{rank}", 1024, 512, dtype=torch.bfloat16, name="w"),
            )
            y = made.mm(made.gather(x), w)
            report = made.output(y, made.reduce(made.mm(x, w))).run()
            assert [s.decision.status for s in report.sites] == ["overlapped"] * 2, report.notices
            texts.add((report.before, report.after, report.plan_hash, report.to_json()))
            assert "cuda" not in report.after
    assert len(texts) == 1


HAND_MADE = ["gather", "gather inner dim", "scatter", "scatter inner dim", "scatter hidden", "reduce", "head"]


@pytest.mark.parametrize("kind", HAND_MADE)
@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_one_text_for_every_rank(kind: str, world_size: int) -> None:
    """A rank number in the graph: ranks would compile different code and miss each other's caches, or hang."""
    texts = set()
    for rank in sorted({0, 1, world_size // 2, world_size - 1}):
        with fake_group(world_size, rank):
            report = hand_made(kind, world_size).run(sub_chunks=2 if world_size < 64 else 1)
            assert [s.decision.status for s in report.sites] == ["overlapped"], report.notices
            texts.add((report.before, report.after, report.plan_hash, report.to_json()))
    assert len(texts) == 1


@pytest.mark.parametrize("world_size", [2, 8])
def test_one_text_for_every_rank_when_traced(world_size: int) -> None:
    """The same through Dynamo, whose own tracing must not bring the rank in either."""
    texts = set()
    for rank in (0, world_size - 1):
        with fake_group(world_size, rank), torch.no_grad():
            fn = lambda x, w, v: reduce_scatter((all_gather(x, 1, world()) @ w).relu() @ v, "sum", 1, world())  # noqa: E731
            texts.add(report_of(fn, x3(), weight(), second_weight()).to_json(graphs=True))
    assert len(texts) == 1


OPS = {
    "gather": "all_gather_matmul",
    "scatter": "matmul_reduce_scatter",
    "reduce": "matmul_all_reduce",
    "head": "matmul_all_gather",
}


@pytest.mark.parametrize("kind", HAND_MADE)
def test_node_count_is_bounded_in_a_large_world(kind: str) -> None:
    """Unrolled steps of 1024 ranks would be thousands of nodes a site; the bound must not be reached by refusing
    either."""
    with fake_group(1024, 77):
        made = hand_made(kind, 1024)
        before = len(made.graph.nodes)
        report = made.run()
        after = len(made.graph.nodes)
    assert [s.decision.status for s in report.sites] == ["overlapped"]
    assert kind == "head" or f"overlap_inductor.{OPS[kind.split()[0]]}.default" in report.after
    assert after <= before + 32


# Golden texts.


def after(report: OverlapReport) -> str:
    return re.sub(r"plan [0-9a-f]{16}", "plan ...", report.after)


def golden(report: OverlapReport) -> str:
    return f"{report.before}----\n{after(report)}"


class TestGolden(TestCase):
    """The graph before and after, word for word; run with EXPECTTEST_ACCEPT=1 after an intended change and read the
    difference."""

    maxDiff = None

    def test_gather(self) -> None:
        """Steps in another order, copies where views were, a reshape that was not there."""
        with fake_group(2):
            self.assertExpectedInline(
                golden(hand_made("gather", 2).run(sub_chunks=1)),
                """\
x: float32[2, 4, 16] = input
w: float32[16, 8] = input
all_gather_into_tensor_default: float32[4, 4, 16] = _c10d_functional.all_gather_into_tensor.default(x, 2, '0')
wait_tensor_default: float32[4, 4, 16] = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
reshape_default: float32[16, 16] = aten.reshape.default(wait_tensor_default, [16, 16])
mm_default: float32[16, 8] = aten.mm.default(reshape_default, w)
return [mm_default]
----
x: float32[2, 4, 16] = input
w: float32[16, 8] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x)
gather_start_default: float32[4, 4, 16] = overlap_inductor.gather_start.default(agree_default, x, [0, 128], 'ring', \
'0', 'all_gather_matmul-8b13f19e')
reshape_default_1: float32[4, 64] = aten.reshape.default(gather_start_default, [4, 64])
take_default: float32[2, 64] = overlap_inductor.take.default(reshape_default_1, 0, 0, 2, 0, 2, '0')
reshape_default_2: float32[8, 16] = aten.reshape.default(take_default, [8, 16])
mm_default_1: float32[8, 8] = aten.mm.default(reshape_default_2, w)
gather_step_default: uint8[1] = overlap_inductor.gather_step.default(agree_default, gather_start_default, [0, 128], 0, \
'ring', '0', 'all_gather_matmul-8b13f19e')
reshape_default_3: float32[4, 64] = aten.reshape.default(gather_start_default, [4, 64])
take_default_1: float32[2, 64] = overlap_inductor.take.default(reshape_default_3, 0, -1, 2, 0, 2, '0')
reshape_default_4: float32[8, 16] = aten.reshape.default(take_default_1, [8, 16])
mm_default_2: float32[8, 8] = aten.mm.default(reshape_default_4, w)
assemble_default: float32[16, 8] = overlap_inductor.assemble.default([mm_default_1, mm_default_2], [16, 8], 0, 8, \
[0, -1], [0, 0, 0, 0], '0')
return [assemble_default]
""",
            )

    def test_gather_on_an_inner_dim_in_parts(self) -> None:
        """Which rows of which rank each piece is."""
        with fake_group(3, 1):
            self.assertExpectedInline(
                golden(hand_made("gather inner dim", 3).run(sub_chunks=2)),
                """\
x: float32[2, 6, 16] = input
w: float32[16, 12] = input
all_gather_into_tensor_default: float32[6, 6, 16] = _c10d_functional.all_gather_into_tensor.default(x, 3, '0')
wait_tensor_default: float32[6, 6, 16] = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
split_tensor = aten.split.Tensor(wait_tensor_default, 2)
getitem: float32[2, 6, 16] = <built-in function getitem>(split_tensor, 0)
getitem_1: float32[2, 6, 16] = <built-in function getitem>(split_tensor, 1)
getitem_2: float32[2, 6, 16] = <built-in function getitem>(split_tensor, 2)
cat_default: float32[2, 18, 16] = aten.cat.default([getitem, getitem_1, getitem_2], 1)
reshape_default: float32[36, 16] = aten.reshape.default(cat_default, [36, 16])
mm_default: float32[36, 12] = aten.mm.default(reshape_default, w)
return [mm_default]
----
x: float32[2, 6, 16] = input
w: float32[16, 12] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x)
gather_start_default: float32[6, 6, 16] = overlap_inductor.gather_start.default(agree_default, x, [0, 96, 192], \
'ring', '0', 'all_gather_matmul-8b13f19e')
reshape_default_1: float32[6, 96] = aten.reshape.default(gather_start_default, [6, 96])
take_default: float32[2, 96] = overlap_inductor.take.default(reshape_default_1, 0, 0, 2, 0, 2, '0')
reshape_default_2: float32[12, 16] = aten.reshape.default(take_default, [12, 16])
mm_default_1: float32[12, 12] = aten.mm.default(reshape_default_2, w)
gather_step_default: uint8[1] = overlap_inductor.gather_step.default(agree_default, gather_start_default, \
[0, 96, 192], 0, 'ring', '0', 'all_gather_matmul-8b13f19e')
reshape_default_3: float32[6, 96] = aten.reshape.default(gather_start_default, [6, 96])
take_default_1: float32[1, 96] = overlap_inductor.take.default(reshape_default_3, 0, -1, 2, 0, 1, '0')
reshape_default_4: float32[6, 16] = aten.reshape.default(take_default_1, [6, 16])
mm_default_2: float32[6, 12] = aten.mm.default(reshape_default_4, w)
gather_step_default_1: uint8[1] = overlap_inductor.gather_step.default(agree_default, gather_start_default, \
[0, 96, 192], 1, 'ring', '0', 'all_gather_matmul-8b13f19e')
reshape_default_5: float32[6, 96] = aten.reshape.default(gather_start_default, [6, 96])
take_default_2: float32[1, 96] = overlap_inductor.take.default(reshape_default_5, 0, -1, 2, 1, 1, '0')
reshape_default_6: float32[6, 16] = aten.reshape.default(take_default_2, [6, 16])
mm_default_3: float32[6, 12] = aten.mm.default(reshape_default_6, w)
gather_step_default_2: uint8[1] = overlap_inductor.gather_step.default(agree_default, gather_start_default, \
[0, 96, 192], 2, 'ring', '0', 'all_gather_matmul-8b13f19e')
reshape_default_7: float32[6, 96] = aten.reshape.default(gather_start_default, [6, 96])
take_default_3: float32[1, 96] = overlap_inductor.take.default(reshape_default_7, 0, -2, 2, 0, 1, '0')
reshape_default_8: float32[6, 16] = aten.reshape.default(take_default_3, [6, 16])
mm_default_4: float32[6, 12] = aten.mm.default(reshape_default_8, w)
gather_step_default_3: uint8[1] = overlap_inductor.gather_step.default(agree_default, gather_start_default, \
[0, 96, 192], 3, 'ring', '0', 'all_gather_matmul-8b13f19e')
reshape_default_9: float32[6, 96] = aten.reshape.default(gather_start_default, [6, 96])
take_default_4: float32[1, 96] = overlap_inductor.take.default(reshape_default_9, 0, -2, 2, 1, 1, '0')
reshape_default_10: float32[6, 16] = aten.reshape.default(take_default_4, [6, 16])
mm_default_5: float32[6, 12] = aten.mm.default(reshape_default_10, w)
reshape_default_11: float32[2, 6, 12] = aten.reshape.default(mm_default_1, [2, 6, 12])
reshape_default_12: float32[1, 6, 12] = aten.reshape.default(mm_default_2, [1, 6, 12])
reshape_default_13: float32[1, 6, 12] = aten.reshape.default(mm_default_3, [1, 6, 12])
reshape_default_14: float32[1, 6, 12] = aten.reshape.default(mm_default_4, [1, 6, 12])
reshape_default_15: float32[1, 6, 12] = aten.reshape.default(mm_default_5, [1, 6, 12])
assemble_default: float32[2, 18, 12] = overlap_inductor.assemble.default([reshape_default_11, reshape_default_12, \
reshape_default_13, reshape_default_14, reshape_default_15], [2, 18, 12], 1, 6, [0, -1, -1, -2, -2], \
[0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0], '0')
reshape_default_16: float32[36, 12] = aten.reshape.default(assemble_default, [36, 12])
return [reshape_default_16]
""",
            )

    def test_scatter(self) -> None:
        """Own slice last, one sum in fp32, sends before the next matmul."""
        with fake_group(2):
            self.assertExpectedInline(
                golden(hand_made("scatter inner dim", 2).run(sub_chunks=1)),
                """\
x: float32[2, 4, 16] = input
w: float32[16, 8] = input
reshape_default: float32[8, 16] = aten.reshape.default(x, [8, 16])
mm_default: float32[8, 8] = aten.mm.default(reshape_default, w)
reshape_default_1: float32[2, 4, 8] = aten.reshape.default(mm_default, [2, 4, 8])
split_tensor = aten.split.Tensor(reshape_default_1, 2, 1)
getitem: float32[2, 2, 8] = <built-in function getitem>(split_tensor, 0)
getitem_1: float32[2, 2, 8] = <built-in function getitem>(split_tensor, 1)
cat_default: float32[4, 2, 8] = aten.cat.default([getitem, getitem_1])
reduce_scatter_tensor_default: float32[2, 2, 8] = _c10d_functional.reduce_scatter_tensor.default(cat_default, 'sum', \
2, '0')
wait_tensor_default: float32[2, 2, 8] = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_default)
return [wait_tensor_default]
----
x: float32[2, 4, 16] = input
w: float32[16, 8] = input
reshape_default: float32[8, 16] = aten.reshape.default(x, [8, 16])
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x)
exchange_start_default: float32[1, 32] = overlap_inductor.exchange_start.default(agree_default, [1, 32], [0, 32], \
torch.float32, 'owner', '0', 'matmul_reduce_scatter-36c7b4a1')
reshape_default_2: float32[2, 4, 16] = aten.reshape.default(reshape_default, [2, 4, 16])
take_default: float32[2, 2, 16] = overlap_inductor.take.default(reshape_default_2, 1, 1, 2, 0, 2, '0')
reshape_default_3: float32[4, 16] = aten.reshape.default(take_default, [4, 16])
mm_default_1: float32[4, 8] = aten.mm.default(reshape_default_3, w)
exchange_send_default: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, \
mm_default_1, [0, 32], 0, 'owner', '0', 'matmul_reduce_scatter-36c7b4a1')
reshape_default_4: float32[2, 4, 16] = aten.reshape.default(reshape_default, [2, 4, 16])
take_default_1: float32[2, 2, 16] = overlap_inductor.take.default(reshape_default_4, 1, 0, 2, 0, 2, '0')
reshape_default_5: float32[4, 16] = aten.reshape.default(take_default_1, [4, 16])
mm_default_2: float32[4, 8] = aten.mm.default(reshape_default_5, w)
after_default: float32[4, 8] = overlap_inductor.after.default(mm_default_2, exchange_send_default)
exchange_wait_default: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, \
[mm_default_1, after_default], [0, 32], [0], 'owner', '0', 'matmul_reduce_scatter-36c7b4a1')
reshape_default_6: float32[1, 4, 8] = aten.reshape.default(exchange_start_default, [1, 4, 8])
sum_dim_int_list: float32[4, 8] = aten.sum.dim_IntList(reshape_default_6, [0])
add_tensor: float32[4, 8] = aten.add.Tensor(after_default, sum_dim_int_list)
reshape_default_7: float32[2, 2, 8] = aten.reshape.default(add_tensor, [2, 2, 8])
return [reshape_default_7]
""",
            )

    def test_travelling_accumulator(self) -> None:
        """Only under allow_hop_rounding; an accumulator visits every rank once."""
        with fake_group(3):
            self.assertExpectedInline(
                golden(hand_made("scatter", 3).run(sub_chunks=1, numerics="allow_hop_rounding")),
                """\
x: float32[2, 6, 16] = input
w: float32[16, 12] = input
reshape_default: float32[12, 16] = aten.reshape.default(x, [12, 16])
mm_default: float32[12, 12] = aten.mm.default(reshape_default, w)
reduce_scatter_tensor_default: float32[4, 12] = _c10d_functional.reduce_scatter_tensor.default(mm_default, 'sum', 3, \
'0')
wait_tensor_default: float32[4, 12] = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_default)
return [wait_tensor_default]
----
x: float32[2, 6, 16] = input
w: float32[16, 12] = input
reshape_default: float32[12, 16] = aten.reshape.default(x, [12, 16])
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x)
exchange_start_default: float32[2, 48] = overlap_inductor.exchange_start.default(agree_default, [2, 48], [0, 48], \
torch.float32, 'travel', '0', 'matmul_reduce_scatter-4a1dc493')
take_default: float32[4, 16] = overlap_inductor.take.default(reshape_default, 0, -1, 4, 0, 4, '0')
mm_default_1: float32[4, 12] = aten.mm.default(take_default, w)
exchange_send_default: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, \
mm_default_1, [0, 48], 0, 'travel', '0', 'matmul_reduce_scatter-4a1dc493')
take_default_1: float32[4, 16] = overlap_inductor.take.default(reshape_default, 0, -2, 4, 0, 4, '0')
mm_default_2: float32[4, 12] = aten.mm.default(take_default_1, w)
after_default: float32[4, 12] = overlap_inductor.after.default(mm_default_2, exchange_send_default)
exchange_wait_default: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, \
[mm_default_1, after_default], [0, 48], [0], 'travel', '0', 'matmul_reduce_scatter-4a1dc493')
select_int: float32[48] = aten.select.int(exchange_start_default, 0, 0)
reshape_default_1: float32[4, 12] = aten.reshape.default(select_int, [4, 12])
add_tensor: float32[4, 12] = aten.add.Tensor(reshape_default_1, after_default)
after_default_1: float32[4, 12] = overlap_inductor.after.default(add_tensor, exchange_send_default)
exchange_send_default_1: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, \
after_default_1, [0, 48], 1, 'travel', '0', 'matmul_reduce_scatter-4a1dc493')
take_default_2: float32[4, 16] = overlap_inductor.take.default(reshape_default, 0, -3, 4, 0, 4, '0')
mm_default_3: float32[4, 12] = aten.mm.default(take_default_2, w)
after_default_2: float32[4, 12] = overlap_inductor.after.default(mm_default_3, exchange_send_default_1)
exchange_wait_default_1: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, \
[after_default_1, after_default_2], [0, 48], [1], 'travel', '0', 'matmul_reduce_scatter-4a1dc493')
select_int_1: float32[48] = aten.select.int(exchange_start_default, 0, 1)
reshape_default_2: float32[4, 12] = aten.reshape.default(select_int_1, [4, 12])
add_tensor_1: float32[4, 12] = aten.add.Tensor(reshape_default_2, after_default_2)
after_default_3: float32[4, 12] = overlap_inductor.after.default(add_tensor_1, exchange_send_default_1)
return [after_default_3]
""",
            )

    def test_reduce(self) -> None:
        """The second leg under the next band's matmuls."""
        with fake_group(2):
            self.assertExpectedInline(
                golden(hand_made("reduce", 2).run(sub_chunks=2)),
                """\
x: float32[2, 4, 16] = input
w: float32[16, 8] = input
reshape_default: float32[8, 16] = aten.reshape.default(x, [8, 16])
mm_default: float32[8, 8] = aten.mm.default(reshape_default, w)
reshape_default_1: float32[2, 4, 8] = aten.reshape.default(mm_default, [2, 4, 8])
all_reduce_default: float32[2, 4, 8] = _c10d_functional.all_reduce.default(reshape_default_1, 'sum', '0')
wait_tensor_default: float32[2, 4, 8] = _c10d_functional.wait_tensor.default(all_reduce_default)
return [wait_tensor_default]
----
x: float32[2, 4, 16] = input
w: float32[16, 8] = input
reshape_default: float32[8, 16] = aten.reshape.default(x, [8, 16])
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x)
exchange_start_default: float32[1, 32] = overlap_inductor.exchange_start.default(agree_default, [1, 32], [0, 16, 32], \
torch.float32, 'owner', '0', 'matmul_all_reduce-f0fa2a82')
exchange_start_default_1: float32[8, 8] = overlap_inductor.exchange_start.default(agree_default, [8, 8], [0, 16, 32], \
torch.float32, 'broadcast', '0', 'matmul_all_reduce-f0fa2a82')
take_default: float32[2, 16] = overlap_inductor.take.default(reshape_default, 0, 1, 4, 0, 2, '0')
mm_default_1: float32[2, 8] = aten.mm.default(take_default, w)
exchange_send_default: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, \
mm_default_1, [0, 16, 32], 0, 'owner', '0', 'matmul_all_reduce-f0fa2a82')
take_default_1: float32[2, 16] = overlap_inductor.take.default(reshape_default, 0, 0, 4, 0, 2, '0')
mm_default_2: float32[2, 8] = aten.mm.default(take_default_1, w)
after_default: float32[2, 8] = overlap_inductor.after.default(mm_default_2, exchange_send_default)
take_default_2: float32[2, 16] = overlap_inductor.take.default(reshape_default, 0, 1, 4, 2, 2, '0')
mm_default_3: float32[2, 8] = aten.mm.default(take_default_2, w)
after_default_1: float32[2, 8] = overlap_inductor.after.default(mm_default_3, exchange_send_default)
exchange_send_default_1: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, \
after_default_1, [0, 16, 32], 1, 'owner', '0', 'matmul_all_reduce-f0fa2a82')
take_default_3: float32[2, 16] = overlap_inductor.take.default(reshape_default, 0, 0, 4, 2, 2, '0')
mm_default_4: float32[2, 8] = aten.mm.default(take_default_3, w)
after_default_2: float32[2, 8] = overlap_inductor.after.default(mm_default_4, exchange_send_default_1)
exchange_wait_default: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, \
[mm_default_1, after_default, after_default_2], [0, 16, 32], [0], 'owner', '0', 'matmul_all_reduce-f0fa2a82')
slice_tensor: float32[1, 16] = aten.slice.Tensor(exchange_start_default, 1, 0, 16)
reshape_default_2: float32[1, 2, 8] = aten.reshape.default(slice_tensor, [1, 2, 8])
sum_dim_int_list: float32[2, 8] = aten.sum.dim_IntList(reshape_default_2, [0])
add_tensor: float32[2, 8] = aten.add.Tensor(after_default, sum_dim_int_list)
exchange_send_default_2: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default_1, \
add_tensor, [0, 16, 32], 0, 'broadcast', '0', 'matmul_all_reduce-f0fa2a82')
exchange_wait_default_1: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, \
[after_default_1, after_default_2], [0, 16, 32], [1], 'owner', '0', 'matmul_all_reduce-f0fa2a82')
slice_tensor_1: float32[1, 16] = aten.slice.Tensor(exchange_start_default, 1, 16, 32)
reshape_default_3: float32[1, 2, 8] = aten.reshape.default(slice_tensor_1, [1, 2, 8])
sum_dim_int_list_1: float32[2, 8] = aten.sum.dim_IntList(reshape_default_3, [0])
add_tensor_1: float32[2, 8] = aten.add.Tensor(after_default_2, sum_dim_int_list_1)
exchange_send_default_3: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default_1, \
add_tensor_1, [0, 16, 32], 1, 'broadcast', '0', 'matmul_all_reduce-f0fa2a82')
exchange_wait_default_2: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default_1, \
[], [0, 16, 32], [0, 1], 'broadcast', '0', 'matmul_all_reduce-f0fa2a82')
reshape_default_4: float32[2, 4, 8] = aten.reshape.default(exchange_start_default_1, [2, 4, 8])
return [reshape_default_4]
""",
            )

    def test_head(self) -> None:
        """Bands of rows, each sent to all ranks."""
        with fake_group(2):
            self.assertExpectedInline(
                golden(hand_made("head", 2).run(sub_chunks=2)),
                """\
x: float32[2, 4, 16] = input
w: float32[16, 8] = input
reshape_default: float32[8, 16] = aten.reshape.default(x, [8, 16])
mm_default: float32[8, 8] = aten.mm.default(reshape_default, w)
all_gather_into_tensor_default: float32[16, 8] = _c10d_functional.all_gather_into_tensor.default(mm_default, 2, '0')
wait_tensor_default: float32[16, 8] = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
return [wait_tensor_default]
----
x: float32[2, 4, 16] = input
w: float32[16, 8] = input
reshape_default: float32[8, 16] = aten.reshape.default(x, [8, 16])
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x)
exchange_start_default: float32[16, 8] = overlap_inductor.exchange_start.default(agree_default, [16, 8], [0, 32, 64], \
torch.float32, 'broadcast', '0', 'matmul_all_gather-88fa769c')
slice_tensor: float32[4, 16] = aten.slice.Tensor(reshape_default, 0, 0, 4)
mm_default_1: float32[4, 8] = aten.mm.default(slice_tensor, w)
exchange_send_default: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, \
mm_default_1, [0, 32, 64], 0, 'broadcast', '0', 'matmul_all_gather-88fa769c')
slice_tensor_1: float32[4, 16] = aten.slice.Tensor(reshape_default, 0, 4, 8)
mm_default_2: float32[4, 8] = aten.mm.default(slice_tensor_1, w)
after_default: float32[4, 8] = overlap_inductor.after.default(mm_default_2, exchange_send_default)
exchange_send_default_1: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, \
after_default, [0, 32, 64], 1, 'broadcast', '0', 'matmul_all_gather-88fa769c')
exchange_wait_default: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, [], \
[0, 32, 64], [0, 1], 'broadcast', '0', 'matmul_all_gather-88fa769c')
return [exchange_start_default]
""",
            )

    def test_looping(self) -> None:
        """One op for the site where the steps do not fit the budget."""
        with fake_group(2):
            self.assertExpectedInline(
                after(hand_made("gather", 2).run(step_node_budget=1)),
                """\
x: float32[2, 4, 16] = input
w: float32[16, 8] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x)
reshape_default_1: float32[8, 16] = aten.reshape.default(x, [8, 16])
all_gather_matmul_default = overlap_inductor.all_gather_matmul.default(agree_default, reshape_default_1, [w], [None], \
'lhs M', 2, 0, 'ring', '0', 'all_gather_matmul-8b13f19e')
getitem = <built-in function getitem>(all_gather_matmul_default, 0)
getitem_3: float32[16, 8] = <built-in function getitem>(getitem, 0)
return [getitem_3]
""",
            )
