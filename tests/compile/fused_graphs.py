# SPDX-License-Identifier: Apache-2.0
"""Graphs of one site each, for tests of schedules ``fused`` and ``chunked``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

BF16 = torch.bfloat16


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
    """Backward of a row-wise layer. One matmul multiplies the gathered gradient by the weight. Another one multiplies
    the transposed gradient by the activations."""
    made = HandGraph()
    gathered = made.gather(operand(made, 24, 16, "x"))
    activations = operand(made, 24 * made.world_size, 8, "activations")
    gradient = made.mm(made.call(aten.permute.default, gathered, [1, 0]), activations)
    return made.output(made.mm(gathered, operand(made, 16, 40)), gradient)


def summed_scatter_site(biased: int = 0) -> HandGraph:
    """Three matmuls whose results are added, as in the backward of three layers that read one tensor. The last
    ``biased`` matmuls have a bias."""
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


def dynamic_site(rows: int = 48) -> HandGraph:
    made = HandGraph()
    return made.output(
        made.reduce(made.mm(made.input(rows, 8192, name="x", dtype=BF16, dynamic=[0]), operand(made, 8192, 4096)))
    )
