# SPDX-License-Identifier: Apache-2.0
"""A graph for every reason why the sequence-parallel rewrite leaves a stretch as written."""

from __future__ import annotations

from typing import Any

from overlap_inductor.report.report import OverlapReport
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.unit.reasons import case


def stretch(tokens: int, dynamic: bool = False) -> HandGraph:
    """``all_reduce(x @ w)``, a residual add, and a matmul that multiplies all tokens of the result by ``v``."""
    made = HandGraph()
    x, residual = (made.input(tokens, 16, name=name, dynamic=[0] if dynamic else []) for name in ("x", "residual"))
    added = made.call(aten.add.Tensor, made.reduce(made.mm(x, made.input(16, 16, name="w"))), residual)
    return made.output(made.mm(added, made.input(16, 8, name="v")))


def divided(made: HandGraph, refusal: str | None = None, **fields: Any) -> OverlapReport:
    """The report of the overlap pass after the sequence-parallel rewrite. The overlap pass leaves all sites as written,
    so only a rewritten stretch changes the graph."""
    made.divide(refusal, **fields)
    return made.run(schedule="keep")


@case("backend_not_supported", "stretch refused")
def _() -> OverlapReport:
    return divided(stretch(8), "this is compiled ahead of time")


@case("switched_off", "stretch refused", "stretch, pattern")
def _() -> OverlapReport:
    return divided(stretch(8), patterns=("matmul_all_reduce",))


@case("switched_off", "stretch refused", "stretch, schedule")
def _() -> OverlapReport:
    return divided(stretch(8), schedule="keep")


@case("dynamic_shape", "stretch refused", "unbacked tokens")
def _() -> OverlapReport:
    made = HandGraph()
    return divided(made.output(made.call(aten.relu.default, made.reduce(made.unbacked_input(16)))))


@case("dynamic_shape", "stretch refused", "symbolic features")
def _() -> OverlapReport:
    made = HandGraph()
    x = made.input(8, 16, dynamic=[1])
    return divided(made.output(made.call(aten.relu.default, made.reduce(x))))


@case("few_tokens", "stretch refused", "fewer than ranks")
def _() -> OverlapReport:
    return divided(stretch(1))


@case("few_tokens", "stretch kept", "a dynamic number of few tokens")
def _() -> OverlapReport:
    return divided(stretch(4, dynamic=True), sequence_parallel="auto")


@case("no_token_wise_work", "stretch refused")
def _() -> OverlapReport:
    made = HandGraph()
    total = made.reduce(made.mm(made.input(8, 16), made.input(16, 16, name="w")))
    return divided(made.output(made.call(aten.sort.default, total, 0)))


@case("too_small", "stretch kept")
def _() -> OverlapReport:
    return divided(stretch(8), sequence_parallel="auto")


@case("report_mode", "stretch kept")
def _() -> OverlapReport:
    return divided(stretch(8), mode="report")
