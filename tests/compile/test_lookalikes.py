# SPDX-License-Identifier: Apache-2.0
"""Graphs that look like a gather or a scatter but are none, and sites that multiply fp8 tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.compile.readings import misses
from tests.compile.readings import summary
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_of
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.spellings import GATHER
from tests.support.spellings import SCATTER
from tests.support.spellings import world

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
def test_spelling_f_fp8_gathered_as_bytes(row_wise: bool, dim: int) -> None:
    """fp8 is gathered as uint8. Neither views of the bits nor row-wise scales may hide the site. Row-wise scales must
    be cut with the rows."""

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
    report = report_of(
        lambda *a: reduce_scatter(scaled(*a), "sum", 0, world()),
        fp8(16, 32),
        fp8(16, 32).t(),
        *scales(row_wise, 16, 16),
    )
    assert summary(report) == [(SCATTER, 0, ["scaled_mm M"], "overlapped")]


# Slices in hand-made graphs: some are a plain gather, others only look like one.


def sliced(spans: Sequence[tuple[int, int]], dim: int = 1) -> HandGraph:
    """A graph that concatenates row ranges of gathered shards ``[2, 4, 16]`` and multiplies the result."""
    made = HandGraph()
    x, w = made.input(2, 4, 16), made.input(16, 8, name="w")
    gathered = made.gather(x)
    joined = made.call(aten.cat.default, [made.call(aten.slice.Tensor, gathered, 0, a, b) for a, b in spans], dim)
    return made.output(made.mm(made.view(joined, -1, 16), w))


@pytest.mark.parametrize("end", ["exact", "open"])
def test_spelling_d_slices_are_a_gather(end: str) -> None:
    """torch writes a gather in slices if sizes are known only at run time. The last slice may have no end."""
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
def test_slices_that_only_look_like_a_gather(spans: list[tuple[int, int]]) -> None:
    """The graph must be left alone: a gather in its place would give wrong results."""
    with fake_group(3):
        made = sliced(spans)
        before = made.text()
        report = made.run()
    assert summary(report) == [] and misses(report) == [("all_gather", "not_plain_gather")]
    assert made.text() == before


def test_a_cat_of_another_tensor_is_not_taken_for_a_gather() -> None:
    with fake_group(3):
        made = HandGraph()
        y = made.input(6, 16, name="y")
        gathered = made.call(aten.relu.default, made.gather(made.input(2, 16)))
        turned = made.call(aten.cat.default, [made.call(aten.slice.Tensor, y, 0, a, a + 2) for a in (2, 0, 4)])
        report = made.output(gathered, turned).run()
    assert summary(report) == [] and misses(report) == [("all_gather", "no_matmul")]


def test_the_order_of_splits_matters_too() -> None:
    """The pieces of a split are a gather only if they are joined in the order of the ranks."""
    for order, expected in (((0, 1, 2), [GATHER]), ((0, 2, 1), [])):
        with fake_group(3):
            made = HandGraph()
            x, w = made.input(2, 4, 16), made.input(16, 8, name="w")
            joined = made.join(made.gather(x), 2, 1, order)
            report = made.output(made.mm(made.view(joined, -1, 16), w)).run()
        assert [s.facts.pattern for s in report.sites] == expected


@pytest.mark.parametrize("starts", [(0, 2, 4), (2, 0, 4), (0, 0, 4)])
def test_scatter_by_slices(starts: tuple[int, int, int]) -> None:
    """Slices before a reduce-scatter lead to a site only if they are joined in the order of the ranks."""
    with fake_group(3):
        made = HandGraph()
        y = made.view(made.mm(made.input(24, 16), made.input(16, 8, name="w")), 4, 6, 8)
        joined = made.call(aten.cat.default, [made.call(aten.slice.Tensor, y, 1, s, s + 2) for s in starts])
        report = made.output(made.scatter(joined)).run()
    if starts == (0, 2, 4):
        assert summary(report) == [(SCATTER, 0, ["mm M"], "overlapped")]
    else:
        assert summary(report) == [] and misses(report) == [("reduce_scatter", "not_plain_scatter")]


@pytest.mark.parametrize("steps", [(2, 1), (1, 1)])
def test_scatter_by_slices_with_gaps(steps: tuple[int, int]) -> None:
    """A slice of every other row is not a shard, although it has as many rows as a shard."""
    with fake_group(2):
        made = HandGraph()
        y = made.mm(made.input(8, 16), made.input(16, 8, name="w"))
        ends = [(0, 8 if steps[0] == 2 else 4), (4, 8)]
        pieces = [made.call(aten.slice.Tensor, y, 0, a, b, step) for (a, b), step in zip(ends, steps, strict=True)]
        report = made.output(made.scatter(made.call(aten.cat.default, pieces))).run()
    assert [s.decision.status for s in report.sites] == (["overlapped"] if steps == (1, 1) else [])
    assert misses(report) == ([] if steps == (1, 1) else [("reduce_scatter", "not_plain_scatter")])


@pytest.mark.parametrize(
    ("value", "short", "bias", "found"),
    [
        pytest.param(0, 1, False, ["overlapped"], id="zeros appended"),
        pytest.param(1, 1, False, [], id="ones appended"),
        pytest.param(0, 0, False, [], id="zeros in the middle"),
        pytest.param(0, 1, True, [], id="bias under the zeros"),
    ],
)
def test_scatter_of_padded_pieces(value: int, short: int, bias: bool, found: list[str]) -> None:
    """The pass drops the padding of the pieces only under two conditions:

    - The padding consists of zeros, and stands after all rows.
    - The matmul adds no bias. With a bias, operand rows of zeros would not give result rows of zeros.
    """
    with fake_group(2):
        made = HandGraph()
        x, w = made.input(7, 16), made.input(16, 8, name="w")
        y = made.call(aten.addmm.default, made.input(8, name="b"), x, w) if bias else made.mm(x, w)
        ends = [(0, 4), (4, 7)] if short else [(0, 3), (3, 7)]
        pieces = [made.call(aten.slice.Tensor, y, 0, a, b) for a, b in ends]
        pieces[short] = made.call(aten.constant_pad_nd.default, pieces[short], [0, 0, 0, 1], value)
        report = made.output(made.scatter(made.call(aten.cat.default, pieces))).run()
    assert [s.decision.status for s in report.sites] == found
    assert len(report.near_misses) == 1 - len(found)


@pytest.mark.parametrize(
    ("shape", "code"),
    [((2, 3, 16), None), ((2, 1, 16), "layout"), ((6, 16), None)],
    ids=["in each of two", "one row in each of two", "columns beside the rows"],
)
def test_scatter_of_padded_rows_of_a_batch(shape: tuple[int, ...], code: str | None) -> None:
    """In the first two cases, each batch entry ends with padding, so the padding lies between rows of the matmul. The
    pass supports this only if a batch entry has at least two rows of its own. In the third case, the padding lies after
    all rows."""
    with fake_group(2):
        made = HandGraph()
        x, w = made.call(aten.reshape.default, made.input(*shape), [-1, 16]), made.input(16, 8, name="w")
        y = made.call(aten.reshape.default, made.mm(x, w), [2, -1, 8] if len(shape) == 3 else [3, 2, 8])
        dim = len(shape) - 2
        short = 4 - y.meta["val"].shape[dim] if shape[-2] != 1 else 1
        padded = made.call(aten.constant_pad_nd.default, y, [0, 0, 0, short] if dim else [0, 0, 0, 0, 0, short])
        half = padded.meta["val"].shape[dim] // 2
        pieces = [made.call(aten.slice.Tensor, padded, dim, a, a + half) for a in (0, half)]
        report = made.output(made.scatter(made.call(aten.cat.default, pieces))).run()
    assert [s.decision.status for s in report.sites] == (["overlapped"] if code is None else [])
    assert misses(report) == ([] if code is None else [("reduce_scatter", code)])


def test_rows_appended_to_an_unknown_number_of_rows() -> None:
    """The number of rows is symbolic, so the pass cannot tell which ranks have fewer rows."""
    with fake_group(2) as group:
        (report,) = reports_of(
            lambda x, w: reduce_scatter(torch.nn.functional.pad(x @ w, (0, 0, 0, 1)), "sum", 0, group),
            torch.randn(7, 16),
            torch.nn.Parameter(torch.randn(16, 8), requires_grad=False),
            dynamic=True,
        )
    assert "constant_pad_nd: float32[s" in report.before
    assert summary(report) == [] and misses(report) == [("reduce_scatter", "op_between")]


def test_rows_cut_from_an_unknown_number_of_rows() -> None:
    """The tensor's size is symbolic, and its pieces have fixed sizes. The pass adds no guard on the size."""
    with fake_group(2):
        made = HandGraph()
        y = made.mm(made.input(9, 16, dynamic=[0]), made.input(16, 8, name="w"))
        pieces = [made.call(aten.slice.Tensor, y, 0, a, b) for a, b in ((0, 4), (4, 7))]
        pieces[1] = made.call(aten.constant_pad_nd.default, pieces[1], [0, 0, 0, 1])
        scattered = made.scatter(made.call(aten.cat.default, pieces))
        before = len(made.shapes.guards)
        report = made.output(scattered).run()
        assert len(made.shapes.guards) == before
    assert summary(report) == [] and len(misses(report)) == 1


@pytest.mark.parametrize("scatters", [True, False])
def test_padded_factor(scatters: bool) -> None:
    """The padding of one factor of a product is data, not padding of a shard."""
    with fake_group(2):
        made = HandGraph()
        y = made.mm(made.input(8, 16), made.input(16, 8, name="w"))
        factor = made.call(aten.constant_pad_nd.default, made.input(5, 8, name="r"), [0, 0, 0, 3])
        product = made.call(aten.mul.Tensor, y, factor)
        out = made.scatter(product) if scatters else made.reduce(product)
        report = made.output(out).run()
    assert [s.decision.status for s in report.sites] == ["overlapped"]


def test_trim_of_uneven_shards() -> None:
    """The graph drops the last gathered rows. Exactly these rows must be dropped from the result."""
    with fake_group(3):
        made = HandGraph()
        gathered = made.gather(made.input(4, 16))
        report = made.output(
            made.mm(made.call(aten.slice.Tensor, gathered, 0, 0, 10), made.input(16, 8, name="w"))
        ).run()
    assert summary(report) == [(GATHER, 0, ["mm M"], "overlapped")]
    assert re.search(r"\[10, 8\] = aten\.slice\.Tensor\(assemble_default, 0, 0, 10\)", report.after)
