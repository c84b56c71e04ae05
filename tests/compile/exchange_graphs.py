# SPDX-License-Identifier: Apache-2.0
"""Graphs of one all-to-all beside matmuls, for tests of schedules ``fused`` and ``chunked``."""

from __future__ import annotations

import torch
from torch import fx

from tests.compile import scaled_graphs
from tests.compile.fused_graphs import BF16
from tests.compile.fused_graphs import operand
from tests.compile.scaled_graphs import weight
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.hand_graph import c10d


def exchange(made: HandGraph, x: fx.Node, extra: int = 0) -> fx.Node:
    """An all-to-all that cuts dim 0 into one part for each rank. The first part has ``extra`` rows more than an equal
    part, and the last part has ``extra`` fewer."""
    part = x.meta["val"].shape[0] // made.world_size
    parts = [part] * made.world_size
    parts[0], parts[-1] = part + extra, part - extra
    return made.wait(made.call(c10d.all_to_all_single.default, x, parts, parts, made.group))


def sent_rows(rows: int = 24, inner: int = 16, columns: int = 40, dtype: torch.dtype = BF16) -> HandGraph:
    made = HandGraph()
    x = operand(made, rows * made.world_size, inner, "x", dtype)
    return made.output(exchange(made, made.mm(x, operand(made, inner, columns, dtype=dtype))))


def sent_heads(width: int = 8) -> HandGraph:
    """A matmul with a bias computes the heads of two sequences. Then the heads are exchanged."""
    made = HandGraph()
    columns, ranks = 2 * width * made.world_size, made.world_size
    pair = operand(made, 48, 16, "x"), operand(made, 16, columns)
    heads = made.call(aten.addmm.default, made.input(columns, name="bias", dtype=BF16), *pair)
    heads = made.call(aten.permute.default, made.view(heads, 2, 24, ranks, 2, width), [2, 1, 0, 3, 4])
    sent = made.call(aten.clone.default, heads, memory_format=torch.contiguous_format)
    return made.output(exchange(made, made.view(sent, 48 * ranks, 2 * width)))


def received_rows(rows: int = 24, inner: int = 16, columns: int = 40) -> HandGraph:
    """A matmul reads what arrives. A second matmul reads it transposed, and a pointwise op reads it, too."""
    made = HandGraph()
    x = exchange(made, operand(made, rows * made.world_size, inner, "x"))
    plain = made.mm(x, operand(made, inner, columns))
    turned = made.mm(operand(made, 8, inner, "v"), made.call(aten.permute.default, x, [1, 0]))
    return made.output(plain, turned, made.call(aten.add.Tensor, x, 1))


def uneven() -> HandGraph:
    made = HandGraph()
    product = made.mm(operand(made, 48, 16, "x"), operand(made, 16, 40))
    return made.output(exchange(made, product, extra=8))


def uneven_received() -> HandGraph:
    made = HandGraph()
    return made.output(made.mm(exchange(made, operand(made, 48, 16, "x"), extra=8), operand(made, 16, 40)))


def summed() -> HandGraph:
    made = HandGraph()
    pairs = [(operand(made, 48, 16, f"x{i}"), operand(made, 16, 40, f"w{i}")) for i in range(2)]
    return made.output(exchange(made, made.call(aten.add.Tensor, *(made.mm(*pair) for pair in pairs))))


def _side_by_side(made: HandGraph, inner: int) -> fx.Node:
    """``[24, ranks * inner]``: the heads that arrive, side by side."""
    ranks = made.world_size
    x = made.view(exchange(made, operand(made, 24 * ranks, inner, "x")), ranks, 24, inner)
    return made.view(made.call(aten.permute.default, x, [1, 0, 2]), 24, ranks * inner)


def contracted(inner: int = 16) -> HandGraph:
    """A matmul with a bias contracts the exchanged heads, as in the output projection of Ulysses attention."""
    made = HandGraph()
    pair = _side_by_side(made, inner), operand(made, inner * made.world_size, 40)
    return made.output(made.call(aten.addmm.default, made.input(40, name="bias", dtype=BF16), *pair))


def contracted_and_gradient(inner: int = 16) -> HandGraph:
    """A gradient of the heads arrives. The matmul for the input's gradient contracts the heads. The matmul for the
    weight's gradient does not."""
    made = HandGraph()
    x = _side_by_side(made, inner)
    turned = made.call(aten.permute.default, x, [1, 0])
    return made.output(
        made.mm(x, operand(made, inner * made.world_size, 40)), made.mm(turned, operand(made, 24, 8, "v"))
    )


def contracted_by_two(inner: int = 16) -> HandGraph:
    """Two matmuls contract the heads that arrive."""
    made = HandGraph()
    x, wide = _side_by_side(made, inner), inner * made.world_size
    return made.output(made.mm(x, operand(made, wide, 40)), made.mm(x, operand(made, wide, 8, "v")))


def contracted_rows(rows: int = 24) -> HandGraph:
    """The rows that arrive are contracted, as in a weight's gradient."""
    made = HandGraph()
    x = exchange(made, operand(made, rows * made.world_size, 16, "x"))
    return made.output(made.mm(made.call(aten.permute.default, x, [1, 0]), operand(made, rows * made.world_size, 40)))


def contracted_on_the_right(rows: int = 64) -> HandGraph:
    """The rows that arrive are the right operand of a matmul, and are contracted."""
    made = HandGraph()
    x = exchange(made, operand(made, rows * made.world_size, 16, "x"))
    return made.output(made.mm(operand(made, 40, rows * made.world_size), x))


def contracted_dynamic(inner: int = 64) -> HandGraph:
    """Heads are contracted. The number of tokens may change."""
    made = HandGraph()
    x = made.input(48, inner, name="x", dtype=BF16, dynamic=[0])
    rows = x.meta["val"].shape[0]
    both = made.call(aten.cat.default, [x, x])
    arrived = made.wait(made.call(c10d.all_to_all_single.default, both, [rows, rows], [rows, rows], made.group))
    heads = made.call(aten.permute.default, made.view(arrived, 2, rows, inner), [1, 0, 2])
    return made.output(made.mm(made.view(heads, rows, 2 * inner), operand(made, 2 * inner, 40)))


def contracted_heads() -> HandGraph:
    """The output projection of Ulysses attention, for a batch of two and with a bias. Another node also reads the
    heads."""
    made = HandGraph()
    ranks = made.world_size
    x = made.view(operand(made, 2 * ranks * 24, 128, "x"), 2, ranks, 24, 2, 64)
    x = made.call(aten.permute.default, x, [1, 3, 0, 2, 4])
    x = made.view(made.call(aten.clone.default, x, memory_format=torch.contiguous_format), ranks * 2 * 2, 24 * 64)
    x = made.view(exchange(made, x), ranks * 2, 2, 24, 64)
    x = made.call(aten.clone.default, made.call(aten.permute.default, x, [1, 2, 0, 3]))
    x = made.view(x, 48, ranks * 128)
    projected = made.call(
        aten.addmm.default, made.input(40, name="bias", dtype=BF16), x, operand(made, ranks * 128, 40)
    )
    return made.output(projected, made.call(aten.relu.default, x))


def activated() -> HandGraph:
    made = HandGraph()
    product = made.mm(operand(made, 48, 16, "x"), operand(made, 16, 40))
    return made.output(exchange(made, made.call(aten.relu.default, product)))


def one_bias_for_all_columns() -> HandGraph:
    made = HandGraph()
    pair = operand(made, 48, 16, "x"), operand(made, 16, 32)
    product = made.call(aten.addmm.default, made.input(1, name="bias", dtype=BF16), *pair)
    product = made.call(aten.permute.default, made.view(product, 48, 2, 16), [1, 0, 2])
    return made.output(exchange(made, made.view(product, 96, 16)))


def sent_as_other_floats() -> HandGraph:
    made = HandGraph()
    arrived = exchange(made, made.call(aten.view.dtype, operand(made, 48, 16, "x"), torch.float16))
    return made.output(made.mm(made.call(aten.view.dtype, arrived, BF16), operand(made, 16, 40)))


def scaled() -> HandGraph:
    made = HandGraph()
    return made.output(exchange(made, scaled_graphs.multiply(made, scaled_graphs.fp8(made, 64, 32), weight(made))))
