"""Matmuls of padded operands: the sites and the plan are those of the matmuls without padding; what only looks alike is left alone."""

from __future__ import annotations

import pytest
import torch

from tests.compile.readings import codes
from tests.compile.readings import facts
from tests.fake_group import fake_group
from tests.fake_group import report_of
from tests.hand_graph import HandGraph
from tests.numerics.test_agreement import _cases
from tests.padded_matmuls import padded_matmuls

aten = torch.ops.aten


def test_padding_changes_neither_sites_nor_plan() -> None:
    """Row and column counts of which none is aligned; the padded operands must be there, or nothing is tested."""
    with fake_group(3):
        for name in _cases(3, 4):
            function, shapes, expected = _cases(3, 7)[name]
            found = []
            for wanted in (False, True):
                torch._dynamo.reset()
                with padded_matmuls(wanted):
                    found.append(report_of(function, *[torch.randn(s) for s in shapes]))
            plain, padded = found
            before, after = ([getattr(r, side).count("constant_pad_nd.") for r in found] for side in ("before", "after"))
            assert before[1] > before[0], f"{name}: nothing was padded"
            assert after[1] == after[0], f"{name}: the padding outlives its matmul"
            assert padded.counters()["sites_overlapped"] == expected, name
            assert padded.plan_hash == plain.plan_hash and [s.facts.id for s in padded.sites] == [s.facts.id for s in plain.sites], name


@pytest.mark.parametrize(
    ("value", "keep", "whole_used", "seen"),
    [
        pytest.param(0, 8, False, True, id="padded"),
        pytest.param(1, 8, False, False, id="appended ones"),
        pytest.param(0, 7, False, False, id="more is cut off"),
        pytest.param(0, 8, True, False, id="all of it used"),
    ],
)
def test_rows_appended_to_the_gathered_tensor(value: int, keep: int, whole_used: bool, seen: bool) -> None:
    with fake_group(2):
        made = HandGraph()
        gathered = made.gather(made.input(4, 16))
        padded = made.call(aten.constant_pad_nd.default, gathered, [0, 0, 0, 4], value)
        y = made.mm(padded, made.input(16, 8, name="w"))
        cut = made.call(aten.slice.Tensor, y, 0, 0, keep)
        report = made.output(cut, y).run() if whole_used else made.output(cut).run()
    assert facts(report) == ([("all_gather_matmul", ["mm M"], "overlapped")] if seen else [])
    assert codes(report) == ([] if seen else ["op_between"])


@pytest.mark.parametrize("other", [16, 12])
def test_columns_appended_to_be_contracted(other: int) -> None:
    """Zeros appended to both operands add nothing; appended to one they meet data of the other, and the sizes are its own."""
    with fake_group(2):
        made = HandGraph()
        gathered = made.call(aten.constant_pad_nd.default, made.gather(made.input(4, 12)), [0, 4])
        w = made.input(other, 8, name="w")
        w = w if other == 16 else made.call(aten.constant_pad_nd.default, w, [0, 0, 0, 4])
        report = made.output(made.mm(gathered, w)).run()
    assert facts(report) == ([("all_gather_matmul", ["mm M"], "overlapped")] if other == 12 else [])
    assert codes(report) == ([] if other == 12 else ["op_between"])
