"""Every spelling of a gather or a scatter that frameworks give is one site, and what only looks like one is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor
import torch.nn.functional as F
from expecttest import TestCase
from torch import fx

from overlap_inductor.report import OverlapReport
from tests.fake_group import all_gather
from tests.fake_group import all_reduce
from tests.fake_group import fake_group
from tests.fake_group import reduce_scatter
from tests.fake_group import report_of
from tests.fake_group import reports_of
from tests.hand_graph import HandGraph
from tests.hand_graph import aten
from tests.hand_graph import c10d

Function = Callable[..., Any]


@pytest.fixture
def two() -> Iterator[None]:
    with fake_group(2), torch.no_grad():
        yield


def summary(report: OverlapReport) -> list[tuple[str, int | None, list[str], str]]:
    """``(pattern, logical dim, kind and role of every matmul, status)`` of every site."""
    return [
        (s.facts.pattern, s.facts.collective.dim, [f"{m.kind} {m.role}" for m in s.facts.matmuls], s.decision.status) for s in report.sites
    ]


def misses(report: OverlapReport) -> list[tuple[str, str]]:
    return [(m.collective.kind, m.reason.code) for m in report.near_misses]


def world() -> Any:
    return dist.group.WORLD


def x2() -> torch.Tensor:
    return torch.randn(4, 16)


def x3() -> torch.Tensor:
    return torch.randn(2, 4, 16)


def weight(k: int = 16, n: int = 8) -> torch.Tensor:
    return torch.randn(k, n)


def one_gather_two_matmuls(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gathered = all_gather(x, 1, world())
    return gathered @ q, gathered @ k, gathered


def uneven(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return all_gather(F.pad(x, (0, 0, 0, 1)), 0, world())[:9] @ w


def in_place_gather(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = torch.empty(8, 16)
    dist.all_gather_into_tensor(out, x)
    return out @ w


def in_place_scatter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = torch.empty(2, 8)
    dist.reduce_scatter_tensor(out, x @ w)
    return out


def in_place_reduce(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    dist.all_reduce(y)
    return torch.relu(y)


GATHER, SCATTER, REDUCE, HEAD = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather"
SPELLINGS: dict[str, tuple[Function, tuple[Callable[..., torch.Tensor], ...], tuple[str, int | None, list[str]]]] = {
    "A": (lambda x, w: all_gather(x, 0, world()) @ w, (x2, weight), (GATHER, 0, ["mm M"])),
    "A of three dims": (lambda x, w: all_gather(x, 0, world()) @ w, (x3, weight), (GATHER, 0, ["mm M"])),
    "B": (lambda x, w: all_gather(x, 1, world()) @ w, (x3, weight), (GATHER, 1, ["mm M"])),
    "B on the hidden dim": (lambda x, w: all_gather(x, 2, world()) @ w, (x3, lambda: weight(32)), (GATHER, 2, ["mm K"])),
    "C": (lambda x, w: all_gather(x, 1, world()) @ w, (lambda: torch.randn(1, 4, 16), weight), (GATHER, 0, ["mm M"])),
    "E": (uneven, (x2, weight), (GATHER, 0, ["mm M"])),
    "G": (lambda x, w: reduce_scatter(x @ w, "sum", 0, world()), (x2, weight), (SCATTER, 0, ["mm M"])),
    "G of three dims": (lambda x, w: reduce_scatter(x @ w, "sum", 0, world()), (x3, weight), (SCATTER, 0, ["mm M"])),
    "G flattened": (lambda x, w: reduce_scatter((x @ w).flatten(0, 1), "sum", 0, world()), (x3, weight), (SCATTER, 0, ["mm M"])),
    "H": (lambda x, w: reduce_scatter(x @ w, "sum", 1, world()), (x3, weight), (SCATTER, 0, ["mm M"])),
    "H on the hidden dim": (lambda x, w: reduce_scatter(x @ w, "sum", 2, world()), (x3, weight), (SCATTER, 1, ["mm N"])),
    "H of batch 1": (
        lambda x, w: reduce_scatter(x @ w, "sum", 1, world()),
        (lambda: torch.randn(1, 4, 16), weight),
        (SCATTER, 0, ["mm M"]),
    ),
    "H average": (lambda x, w: reduce_scatter(x @ w, "avg", 0, world()), (x2, weight), (SCATTER, 0, ["mm M"])),
    "J": (lambda x, w: all_reduce(x @ w, "sum", world()), (x2, weight), (REDUCE, None, ["mm M"])),
    "J of three dims": (lambda x, w: all_reduce(x @ w, "sum", world()), (x3, weight), (REDUCE, None, ["mm M"])),
    "M addmm before a reduction": (
        lambda x, w, b: all_reduce(torch.addmm(b, x, w), "sum", world()),
        (x2, weight, lambda: torch.randn(8)),
        (REDUCE, None, ["addmm M"]),
    ),
    "M addmm after a gather": (
        lambda x, w, b: torch.addmm(b, all_gather(x, 0, world()), w),
        (x2, weight, lambda: torch.randn(8)),
        (GATHER, 0, ["addmm M"]),
    ),
    "M bias after the collective": (
        lambda x, w, b: all_reduce(x @ w, "sum", world()) + b,
        (x2, weight, lambda: torch.randn(8)),
        (REDUCE, None, ["mm M"]),
    ),
    "N": (one_gather_two_matmuls, (x3, weight, lambda: weight(16, 6)), (GATHER, 1, ["mm M", "mm M"])),
    "P all_gather_into_tensor": (in_place_gather, (x2, weight), (GATHER, 0, ["mm M"])),
    "P reduce_scatter_tensor": (in_place_scatter, (x2, weight), (SCATTER, 0, ["mm M"])),
    "P all_reduce": (in_place_reduce, (x2, weight), (REDUCE, None, ["mm M"])),
}


@pytest.mark.parametrize("row", SPELLINGS)
@pytest.mark.usefixtures("two")
def test_spelling(row: str) -> None:
    """A spelling that is no longer seen through, or is taken for another dim, pattern or role."""
    fn, arguments, expected = SPELLINGS[row]
    report = report_of(fn, *[a() for a in arguments])
    assert summary(report) == [(*expected, "overlapped")]
    assert report.near_misses == [] and report.notices == []
    assert "_c10d_functional" in report.before and "_c10d_functional" not in report.after


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("fn", [lambda x, w: funcol.all_to_all_single(x, None, None, world()) @ w,
                                lambda x, w: funcol.all_to_all_single(x @ w, None, None, world())], ids=["before", "after"])  # fmt: skip
def test_row_l_all_to_all_is_a_near_miss(fn: Function) -> None:
    """An all-to-all dropped from the report without a word, or taken for a gather."""
    report = report_of(fn, x2(), weight())
    assert summary(report) == [] and misses(report) == [("all_to_all", "pattern_not_available")]


@pytest.mark.usefixtures("two")
def test_row_k_change_of_shards_is_a_near_miss() -> None:
    """``Shard(i) -> Shard(j)`` is an operator of its own and was not reported at all."""
    report = report_of(lambda x, w: torch.ops._dtensor.shard_dim_alltoall(x @ w, 0, 1, world().group_name), x2(), weight())
    assert summary(report) == [] and misses(report) == [("all_to_all", "pattern_not_available")]


class GatherTokens(torch.autograd.Function):
    """Sequence parallel: gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_gather(x, 0, world())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return reduce_scatter(grad.contiguous(), "sum", 0, world())


class ScatterTokens(torch.autograd.Function):
    """The other end: reduce-scatter forward, gather backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(x, "sum", 0, world())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return all_gather(grad.contiguous(), 0, world())


def test_row_o_backward_of_a_row_wise_layer() -> None:
    """One gathered gradient feeds dgrad (gathered on M) and wgrad (gathered on the contraction): both belong to the one site."""
    with fake_group(2):
        x, w = x2().requires_grad_(), weight().requires_grad_()
        forward, backward = reports_of(lambda x, w: ScatterTokens.apply(x.relu() @ w).relu(), x, w)
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert summary(forward) == [(SCATTER, 0, ["mm M"], "overlapped")]
    ((pattern, dim, matmuls, status),) = summary(backward)
    assert (pattern, dim, sorted(matmuls), status) == (GATHER, 0, ["mm K", "mm M"], "overlapped")


def test_backward_of_a_column_wise_layer() -> None:
    """The gathered activation is saved for backward, and the gradient is scattered there."""
    with fake_group(2):
        x, w = x2().requires_grad_(), weight().requires_grad_()
        forward, backward = reports_of(lambda x, w: (GatherTokens.apply(x) @ w).relu(), x, w)
    assert summary(forward) == [(GATHER, 0, ["mm M"], "overlapped")]
    assert summary(backward)[-1] == (SCATTER, 0, ["mm M"], "overlapped")


# fp8


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def as_bytes(x: torch.Tensor, dim: int) -> torch.Tensor:
    return all_gather(x.view(torch.uint8), dim, world()).view(torch.float8_e4m3fn)


def scaled(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(x, w, a, b, out_dtype=torch.bfloat16)


def scales(row_wise: bool, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.rand(rows, 1), torch.rand(1, columns)) if row_wise else (torch.tensor(0.5), torch.tensor(0.25))


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_row_f_fp8_gathered_as_bytes(row_wise: bool, dim: int) -> None:
    """fp8 travels as uint8: the views of the bits, and scales of rows that must be cut with the rows, hid the site."""
    def fn(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return scaled(as_bytes(x, dim).flatten(0, 1), w, a, b)

    report = report_of(fn, fp8(2, 16, 32), fp8(16, 32).t(), *scales(row_wise, 64, 16))
    assert summary(report) == [(GATHER, dim, ["scaled_mm M"], "overlapped")]
    pieces = re.findall(r"_scaled_mm\.default\(\w+, \w+, (\w+),", report.after)
    assert len(pieces) == 3 and (len(set(pieces)) == 3) is row_wise


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("row_wise", [False, True])
def test_fp8_before_a_scatter(row_wise: bool) -> None:
    """Row-wise scales must be cut with the rows that are sent."""
    report = report_of(lambda *a: reduce_scatter(scaled(*a), "sum", 0, world()), fp8(16, 32), fp8(16, 32).t(), *scales(row_wise, 16, 16))
    assert summary(report) == [(SCATTER, 0, ["scaled_mm M"], "overlapped")]


# Slices in hand-made graphs: what is a plain gather and what is not.


def sliced(spans: Sequence[tuple[int, int]], dim: int = 1) -> HandGraph:
    """``cat`` of row ranges of a gathered ``[2, 4, 16]`` shard, multiplied."""
    made = HandGraph()
    x, w = made.input(2, 4, 16), made.input(16, 8, name="w")
    gathered = made.gather(x)
    joined = made.call(aten.cat.default, [made.call(aten.slice.Tensor, gathered, 0, a, b) for a, b in spans], dim)
    return made.output(made.mm(made.view(joined, -1, 16), w))


@pytest.mark.parametrize("end", ["exact", "open"])
def test_row_d_slices_are_a_gather(end: str) -> None:
    """The spelling for sizes only known at run time; the last slice may be open ended."""
    with fake_group(3):
        report = sliced([(0, 2), (2, 4), (4, 6 if end == "exact" else 2**63 - 1)]).run()
    assert summary(report) == [(GATHER, 1, ["mm M"], "overlapped")]


NOT_PLAIN = {
    "wrong order": [(2, 4), (0, 2), (4, 6)],
    "overlap": [(0, 2), (1, 3), (4, 6)],
    "the same twice": [(0, 2), (0, 2), (4, 6)],
    "gap": [(0, 1), (2, 3), (4, 5)],
    "a shard missing": [(0, 2), (2, 4)],
    "one too many": [(0, 2), (2, 4), (4, 6), (0, 2)],
}


@pytest.mark.parametrize("spans", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_what_only_looks_like_a_gather(spans: list[tuple[int, int]]) -> None:
    """Any cat of slices taken for the plain gather gives wrong numbers; the graph must be left alone."""
    with fake_group(3):
        made = sliced(spans)
        before = made.text()
        report = made.run()
    assert summary(report) == [] and misses(report) == [("all_gather", "not_plain_gather")]
    assert made.text() == before


def test_order_matters_for_splits_too() -> None:
    """The same through split and getitem."""
    for order, expected in (((0, 1, 2), [GATHER]), ((0, 2, 1), [])):
        with fake_group(3):
            made = HandGraph()
            x, w = made.input(2, 4, 16), made.input(16, 8, name="w")
            joined = made.join(made.gather(x), 2, 1, order)
            report = made.output(made.mm(made.view(joined, -1, 16), w)).run()
        assert [s.facts.pattern for s in report.sites] == expected


@pytest.mark.parametrize("starts", [(0, 2, 4), (2, 0, 4), (0, 0, 4)])
def test_scatter_by_slices(starts: tuple[int, int, int]) -> None:
    """Slices before a reduce-scatter in another order send rows to the wrong owner."""
    with fake_group(3):
        made = HandGraph()
        y = made.view(made.mm(made.input(24, 16), made.input(16, 8, name="w")), 4, 6, 8)
        joined = made.call(aten.cat.default, [made.call(aten.slice.Tensor, y, 1, s, s + 2) for s in starts])
        report = made.output(made.scatter(joined)).run()
    if starts == (0, 2, 4):
        assert summary(report) == [(SCATTER, 0, ["mm M"], "overlapped")]
    else:
        assert summary(report) == [] and misses(report) == [("reduce_scatter", "not_plain_scatter")]


def test_trim_of_uneven_shards() -> None:
    """Row E by hand: rows cut off the end of the gathered tensor are cut off the result, not computed from other rows."""
    with fake_group(3):
        made = HandGraph()
        gathered = made.gather(made.input(4, 16))
        report = made.output(made.mm(made.call(aten.slice.Tensor, gathered, 0, 0, 10), made.input(16, 8, name="w"))).run()
    assert summary(report) == [(GATHER, 0, ["mm M"], "overlapped")]
    assert re.search(r"\[10, 8\] = aten\.slice\.Tensor\(assemble_default, 0, 0, 10\)", report.after)


def test_unbacked_token_count_is_found_and_refused() -> None:
    """A size only known at run time must reach legality as a site, and no guard may be put on it."""
    with fake_group(2):
        made = HandGraph()
        report = made.output(made.mm(made.gather(made.unbacked_input(16)), made.input(16, 8, name="w"))).run()
    (site,) = report.sites
    assert site.facts.pattern == GATHER
    assert (site.decision.status, [r.code for r in site.decision.reasons]) == ("refused", ["dynamic_shape"])
    assert report.before == report.after


def test_row_i_scattered_result_saved_for_backward() -> None:
    """The collective itself, not only its wait, is an output: other passes silently drop the site."""
    with fake_group(2):
        made = HandGraph()
        started = made.call(
            c10d.reduce_scatter_tensor.default, made.mm(made.input(4, 16), made.input(16, 8, name="w")), "sum", 2, made.group
        )
        report = made.output(started, made.wait(started)).run(is_inference=False)
    assert summary(report) == [(SCATTER, 0, ["mm M"], "overlapped")]
    assert "_c10d_functional" not in report.after


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
            texts.add(report_of(fn, x3(), weight(), weight(8, 16)).to_json(graphs=True))
    assert len(texts) == 1


@pytest.mark.parametrize("kind", HAND_MADE)
def test_node_count_is_bounded_in_a_large_world(kind: str) -> None:
    """Unrolled steps of 1024 ranks would be thousands of nodes a site: looping op or refusal, never that."""
    with fake_group(1024, 77):
        made = hand_made(kind, 1024)
        before = len(made.graph.nodes)
        report = made.run()
        after = len(made.graph.nodes)
    (site,) = report.sites
    if site.decision.status == "overlapped":
        assert after <= before + 32
    else:
        assert [r.code for r in site.decision.reasons] == ["too_many_steps"] and after == before


def test_large_world_takes_the_looping_op() -> None:
    """The bound must not be reached by refusing what a looping op computes."""
    for kind, op in (("gather", "all_gather_matmul"), ("scatter", "matmul_reduce_scatter"), ("reduce", "matmul_all_reduce")):
        with fake_group(1024):
            report = hand_made(kind, 1024).run()
        assert f"overlap_inductor.{op}.default" in report.after


# Golden texts.


def golden(report: OverlapReport) -> str:
    return re.sub(r"plan [0-9a-f]{16}", "plan ...", f"{report.before}----\n{report.after}")


class TestGolden(TestCase):
    """The graph before and after, word for word; run with EXPECTTEST_ACCEPT=1 after an intended change and read the difference."""

    maxDiff = None

    def test_gather(self) -> None:
        """Steps in another order, copies where views were, a reshape that was not there."""
        with fake_group(2):
            self.assertExpectedInline(golden(hand_made("gather", 2).run(sub_chunks=1)), """\
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
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., cpu)
gather_start_default: float32[4, 4, 16] = overlap_inductor.gather_start.default(agree_default, x, [0, 128], 'ring', '0', 'all_gather_matmul-defa9161')
reshape_default_1: float32[4, 64] = aten.reshape.default(gather_start_default, [4, 64])
take_default: float32[2, 64] = overlap_inductor.take.default(reshape_default_1, 0, 0, 2, 0, 2, '0')
reshape_default_2: float32[8, 16] = aten.reshape.default(take_default, [8, 16])
mm_default_1: float32[8, 8] = aten.mm.default(reshape_default_2, w)
gather_step_default: uint8[1] = overlap_inductor.gather_step.default(agree_default, gather_start_default, [0, 128], 0, 'ring', '0', 'all_gather_matmul-defa9161')
reshape_default_3: float32[4, 64] = aten.reshape.default(gather_start_default, [4, 64])
take_default_1: float32[2, 64] = overlap_inductor.take.default(reshape_default_3, 0, -1, 2, 0, 2, '0')
reshape_default_4: float32[8, 16] = aten.reshape.default(take_default_1, [8, 16])
mm_default_2: float32[8, 8] = aten.mm.default(reshape_default_4, w)
assemble_default: float32[16, 8] = overlap_inductor.assemble.default([mm_default_1, mm_default_2], [16, 8], 0, 8, [0, -1], [0, 0, 0, 0], '0')
return [assemble_default]
""")

    def test_gather_on_an_inner_dim_in_parts(self) -> None:
        """Which rows of which rank each piece is."""
        with fake_group(3, 1):
            self.assertExpectedInline(golden(hand_made("gather inner dim", 3).run(sub_chunks=2)), """\
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
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., cpu)
gather_start_default: float32[6, 6, 16] = overlap_inductor.gather_start.default(agree_default, x, [0, 96, 192], 'ring', '0', 'all_gather_matmul-8b724882')
reshape_default_1: float32[6, 96] = aten.reshape.default(gather_start_default, [6, 96])
take_default: float32[2, 96] = overlap_inductor.take.default(reshape_default_1, 0, 0, 2, 0, 2, '0')
reshape_default_2: float32[12, 16] = aten.reshape.default(take_default, [12, 16])
mm_default_1: float32[12, 12] = aten.mm.default(reshape_default_2, w)
gather_step_default: uint8[1] = overlap_inductor.gather_step.default(agree_default, gather_start_default, [0, 96, 192], 0, 'ring', '0', 'all_gather_matmul-8b724882')
reshape_default_3: float32[6, 96] = aten.reshape.default(gather_start_default, [6, 96])
take_default_1: float32[1, 96] = overlap_inductor.take.default(reshape_default_3, 0, -1, 2, 0, 1, '0')
reshape_default_4: float32[6, 16] = aten.reshape.default(take_default_1, [6, 16])
mm_default_2: float32[6, 12] = aten.mm.default(reshape_default_4, w)
gather_step_default_1: uint8[1] = overlap_inductor.gather_step.default(agree_default, gather_start_default, [0, 96, 192], 1, 'ring', '0', 'all_gather_matmul-8b724882')
reshape_default_5: float32[6, 96] = aten.reshape.default(gather_start_default, [6, 96])
take_default_2: float32[1, 96] = overlap_inductor.take.default(reshape_default_5, 0, -1, 2, 1, 1, '0')
reshape_default_6: float32[6, 16] = aten.reshape.default(take_default_2, [6, 16])
mm_default_3: float32[6, 12] = aten.mm.default(reshape_default_6, w)
gather_step_default_2: uint8[1] = overlap_inductor.gather_step.default(agree_default, gather_start_default, [0, 96, 192], 2, 'ring', '0', 'all_gather_matmul-8b724882')
reshape_default_7: float32[6, 96] = aten.reshape.default(gather_start_default, [6, 96])
take_default_3: float32[1, 96] = overlap_inductor.take.default(reshape_default_7, 0, -2, 2, 0, 1, '0')
reshape_default_8: float32[6, 16] = aten.reshape.default(take_default_3, [6, 16])
mm_default_4: float32[6, 12] = aten.mm.default(reshape_default_8, w)
gather_step_default_3: uint8[1] = overlap_inductor.gather_step.default(agree_default, gather_start_default, [0, 96, 192], 3, 'ring', '0', 'all_gather_matmul-8b724882')
reshape_default_9: float32[6, 96] = aten.reshape.default(gather_start_default, [6, 96])
take_default_4: float32[1, 96] = overlap_inductor.take.default(reshape_default_9, 0, -2, 2, 1, 1, '0')
reshape_default_10: float32[6, 16] = aten.reshape.default(take_default_4, [6, 16])
mm_default_5: float32[6, 12] = aten.mm.default(reshape_default_10, w)
reshape_default_11: float32[2, 6, 12] = aten.reshape.default(mm_default_1, [2, 6, 12])
reshape_default_12: float32[1, 6, 12] = aten.reshape.default(mm_default_2, [1, 6, 12])
reshape_default_13: float32[1, 6, 12] = aten.reshape.default(mm_default_3, [1, 6, 12])
reshape_default_14: float32[1, 6, 12] = aten.reshape.default(mm_default_4, [1, 6, 12])
reshape_default_15: float32[1, 6, 12] = aten.reshape.default(mm_default_5, [1, 6, 12])
assemble_default: float32[2, 18, 12] = overlap_inductor.assemble.default([reshape_default_11, reshape_default_12, reshape_default_13, reshape_default_14, reshape_default_15], [2, 18, 12], 1, 6, [0, -1, -1, -2, -2], [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0], '0')
reshape_default_16: float32[36, 12] = aten.reshape.default(assemble_default, [36, 12])
return [reshape_default_16]
""")

    def test_scatter(self) -> None:
        """Own slice last, one sum in fp32, sends before the next matmul."""
        with fake_group(2):
            self.assertExpectedInline(golden(hand_made("scatter inner dim", 2).run(sub_chunks=1)), """\
x: float32[2, 4, 16] = input
w: float32[16, 8] = input
reshape_default: float32[8, 16] = aten.reshape.default(x, [8, 16])
mm_default: float32[8, 8] = aten.mm.default(reshape_default, w)
reshape_default_1: float32[2, 4, 8] = aten.reshape.default(mm_default, [2, 4, 8])
split_tensor = aten.split.Tensor(reshape_default_1, 2, 1)
getitem: float32[2, 2, 8] = <built-in function getitem>(split_tensor, 0)
getitem_1: float32[2, 2, 8] = <built-in function getitem>(split_tensor, 1)
cat_default: float32[4, 2, 8] = aten.cat.default([getitem, getitem_1])
reduce_scatter_tensor_default: float32[2, 2, 8] = _c10d_functional.reduce_scatter_tensor.default(cat_default, 'sum', 2, '0')
wait_tensor_default: float32[2, 2, 8] = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_default)
return [wait_tensor_default]
----
x: float32[2, 4, 16] = input
w: float32[16, 8] = input
reshape_default: float32[8, 16] = aten.reshape.default(x, [8, 16])
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., cpu)
exchange_start_default: float32[1, 32] = overlap_inductor.exchange_start.default(agree_default, [1, 32], [0, 32], torch.float32, 'owner', '0', 'matmul_reduce_scatter-5b0ae72b')
reshape_default_2: float32[2, 4, 16] = aten.reshape.default(reshape_default, [2, 4, 16])
take_default: float32[2, 2, 16] = overlap_inductor.take.default(reshape_default_2, 1, 1, 2, 0, 2, '0')
reshape_default_3: float32[4, 16] = aten.reshape.default(take_default, [4, 16])
mm_default_1: float32[4, 8] = aten.mm.default(reshape_default_3, w)
exchange_send_default: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, mm_default_1, [0, 32], 0, 'owner', '0', 'matmul_reduce_scatter-5b0ae72b')
reshape_default_4: float32[2, 4, 16] = aten.reshape.default(reshape_default, [2, 4, 16])
take_default_1: float32[2, 2, 16] = overlap_inductor.take.default(reshape_default_4, 1, 0, 2, 0, 2, '0')
reshape_default_5: float32[4, 16] = aten.reshape.default(take_default_1, [4, 16])
mm_default_2: float32[4, 8] = aten.mm.default(reshape_default_5, w)
after_default: float32[4, 8] = overlap_inductor.after.default(mm_default_2, exchange_send_default)
exchange_wait_default: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, [mm_default_1, after_default], [0, 32], [0], 'owner', '0', 'matmul_reduce_scatter-5b0ae72b')
reshape_default_6: float32[1, 4, 8] = aten.reshape.default(exchange_start_default, [1, 4, 8])
sum_dim_int_list: float32[4, 8] = aten.sum.dim_IntList(reshape_default_6, [0])
add_tensor: float32[4, 8] = aten.add.Tensor(after_default, sum_dim_int_list)
reshape_default_7: float32[2, 2, 8] = aten.reshape.default(add_tensor, [2, 2, 8])
return [reshape_default_7]
""")

    def test_travelling_accumulator(self) -> None:
        """Only under allow_hop_rounding; an accumulator visits every rank once."""
        with fake_group(3):
            self.assertExpectedInline(golden(hand_made("scatter", 3).run(sub_chunks=1, numerics="allow_hop_rounding")), """\
x: float32[2, 6, 16] = input
w: float32[16, 12] = input
reshape_default: float32[12, 16] = aten.reshape.default(x, [12, 16])
mm_default: float32[12, 12] = aten.mm.default(reshape_default, w)
reduce_scatter_tensor_default: float32[4, 12] = _c10d_functional.reduce_scatter_tensor.default(mm_default, 'sum', 3, '0')
wait_tensor_default: float32[4, 12] = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_default)
return [wait_tensor_default]
----
x: float32[2, 6, 16] = input
w: float32[16, 12] = input
reshape_default: float32[12, 16] = aten.reshape.default(x, [12, 16])
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., cpu)
exchange_start_default: float32[2, 48] = overlap_inductor.exchange_start.default(agree_default, [2, 48], [0, 48], torch.float32, 'travel', '0', 'matmul_reduce_scatter-a75bf926')
take_default: float32[4, 16] = overlap_inductor.take.default(reshape_default, 0, -1, 4, 0, 4, '0')
mm_default_1: float32[4, 12] = aten.mm.default(take_default, w)
exchange_send_default: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, mm_default_1, [0, 48], 0, 'travel', '0', 'matmul_reduce_scatter-a75bf926')
take_default_1: float32[4, 16] = overlap_inductor.take.default(reshape_default, 0, -2, 4, 0, 4, '0')
mm_default_2: float32[4, 12] = aten.mm.default(take_default_1, w)
after_default: float32[4, 12] = overlap_inductor.after.default(mm_default_2, exchange_send_default)
exchange_wait_default: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, [mm_default_1, after_default], [0, 48], [0], 'travel', '0', 'matmul_reduce_scatter-a75bf926')
select_int: float32[48] = aten.select.int(exchange_start_default, 0, 0)
reshape_default_1: float32[4, 12] = aten.reshape.default(select_int, [4, 12])
add_tensor: float32[4, 12] = aten.add.Tensor(reshape_default_1, after_default)
exchange_send_default_1: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, add_tensor, [0, 48], 1, 'travel', '0', 'matmul_reduce_scatter-a75bf926')
take_default_2: float32[4, 16] = overlap_inductor.take.default(reshape_default, 0, -3, 4, 0, 4, '0')
mm_default_3: float32[4, 12] = aten.mm.default(take_default_2, w)
after_default_1: float32[4, 12] = overlap_inductor.after.default(mm_default_3, exchange_send_default_1)
exchange_wait_default_1: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, [add_tensor, after_default_1], [0, 48], [1], 'travel', '0', 'matmul_reduce_scatter-a75bf926')
select_int_1: float32[48] = aten.select.int(exchange_start_default, 0, 1)
reshape_default_2: float32[4, 12] = aten.reshape.default(select_int_1, [4, 12])
add_tensor_1: float32[4, 12] = aten.add.Tensor(reshape_default_2, after_default_1)
return [add_tensor_1]
""")

    def test_reduce(self) -> None:
        """The second leg under the next band's matmuls."""
        with fake_group(2):
            self.assertExpectedInline(golden(hand_made("reduce", 2).run(sub_chunks=2)), """\
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
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., cpu)
exchange_start_default: float32[1, 32] = overlap_inductor.exchange_start.default(agree_default, [1, 32], [0, 16, 32], torch.float32, 'owner', '0', 'matmul_all_reduce-eac402fc')
exchange_start_default_1: float32[8, 8] = overlap_inductor.exchange_start.default(agree_default, [8, 8], [0, 16, 32], torch.float32, 'broadcast', '0', 'matmul_all_reduce-eac402fc')
take_default: float32[2, 16] = overlap_inductor.take.default(reshape_default, 0, 1, 4, 0, 2, '0')
mm_default_1: float32[2, 8] = aten.mm.default(take_default, w)
exchange_send_default: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, mm_default_1, [0, 16, 32], 0, 'owner', '0', 'matmul_all_reduce-eac402fc')
take_default_1: float32[2, 16] = overlap_inductor.take.default(reshape_default, 0, 0, 4, 0, 2, '0')
mm_default_2: float32[2, 8] = aten.mm.default(take_default_1, w)
after_default: float32[2, 8] = overlap_inductor.after.default(mm_default_2, exchange_send_default)
take_default_2: float32[2, 16] = overlap_inductor.take.default(reshape_default, 0, 1, 4, 2, 2, '0')
mm_default_3: float32[2, 8] = aten.mm.default(take_default_2, w)
after_default_1: float32[2, 8] = overlap_inductor.after.default(mm_default_3, exchange_send_default)
exchange_send_default_1: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, after_default_1, [0, 16, 32], 1, 'owner', '0', 'matmul_all_reduce-eac402fc')
take_default_3: float32[2, 16] = overlap_inductor.take.default(reshape_default, 0, 0, 4, 2, 2, '0')
mm_default_4: float32[2, 8] = aten.mm.default(take_default_3, w)
after_default_2: float32[2, 8] = overlap_inductor.after.default(mm_default_4, exchange_send_default_1)
exchange_wait_default: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, [mm_default_1, after_default, after_default_2], [0, 16, 32], [0], 'owner', '0', 'matmul_all_reduce-eac402fc')
slice_tensor: float32[1, 16] = aten.slice.Tensor(exchange_start_default, 1, 0, 16)
reshape_default_2: float32[1, 2, 8] = aten.reshape.default(slice_tensor, [1, 2, 8])
sum_dim_int_list: float32[2, 8] = aten.sum.dim_IntList(reshape_default_2, [0])
add_tensor: float32[2, 8] = aten.add.Tensor(after_default, sum_dim_int_list)
exchange_send_default_2: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default_1, add_tensor, [0, 16, 32], 0, 'broadcast', '0', 'matmul_all_reduce-eac402fc')
exchange_wait_default_1: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, [after_default_1, after_default_2], [0, 16, 32], [1], 'owner', '0', 'matmul_all_reduce-eac402fc')
slice_tensor_1: float32[1, 16] = aten.slice.Tensor(exchange_start_default, 1, 16, 32)
reshape_default_3: float32[1, 2, 8] = aten.reshape.default(slice_tensor_1, [1, 2, 8])
sum_dim_int_list_1: float32[2, 8] = aten.sum.dim_IntList(reshape_default_3, [0])
add_tensor_1: float32[2, 8] = aten.add.Tensor(after_default_2, sum_dim_int_list_1)
exchange_send_default_3: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default_1, add_tensor_1, [0, 16, 32], 1, 'broadcast', '0', 'matmul_all_reduce-eac402fc')
exchange_wait_default_2: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default_1, [], [0, 16, 32], [0, 1], 'broadcast', '0', 'matmul_all_reduce-eac402fc')
reshape_default_4: float32[2, 4, 8] = aten.reshape.default(exchange_start_default_1, [2, 4, 8])
return [reshape_default_4]
""")

    def test_head(self) -> None:
        """Bands of rows, each sent to all ranks."""
        with fake_group(2):
            self.assertExpectedInline(golden(hand_made("head", 2).run(sub_chunks=2)), """\
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
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., cpu)
exchange_start_default: float32[16, 8] = overlap_inductor.exchange_start.default(agree_default, [16, 8], [0, 32, 64], torch.float32, 'broadcast', '0', 'matmul_all_gather-6b1c429a')
slice_tensor: float32[4, 16] = aten.slice.Tensor(reshape_default, 0, 0, 4)
mm_default_1: float32[4, 8] = aten.mm.default(slice_tensor, w)
exchange_send_default: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, mm_default_1, [0, 32, 64], 0, 'broadcast', '0', 'matmul_all_gather-6b1c429a')
slice_tensor_1: float32[4, 16] = aten.slice.Tensor(reshape_default, 0, 4, 8)
mm_default_2: float32[4, 8] = aten.mm.default(slice_tensor_1, w)
after_default: float32[4, 8] = overlap_inductor.after.default(mm_default_2, exchange_send_default)
exchange_send_default_1: uint8[1] = overlap_inductor.exchange_send.default(agree_default, exchange_start_default, after_default, [0, 32, 64], 1, 'broadcast', '0', 'matmul_all_gather-6b1c429a')
exchange_wait_default: uint8[1] = overlap_inductor.exchange_wait.default(agree_default, exchange_start_default, [], [0, 32, 64], [0, 1], 'broadcast', '0', 'matmul_all_gather-6b1c429a')
return [exchange_start_default]
""")

    def test_looping(self) -> None:
        """One op for the site where the steps do not fit the budget."""
        with fake_group(2):
            self.assertExpectedInline(golden(hand_made("gather", 2).run(step_node_budget=1)), """\
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
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., cpu)
reshape_default_1: float32[8, 16] = aten.reshape.default(x, [8, 16])
all_gather_matmul_default = overlap_inductor.all_gather_matmul.default(agree_default, reshape_default_1, [w], [None], 2, 0, 'ring', '0', 'all_gather_matmul-defa9161')
getitem = <built-in function getitem>(all_gather_matmul_default, 0)
getitem_3: float32[16, 8] = <built-in function getitem>(getitem, 0)
return [getitem_3]
""")
