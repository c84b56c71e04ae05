# SPDX-License-Identifier: Apache-2.0
"""Hand-written graphs with fp8 matmuls (``_scaled_mm``) beside a collective. Scales are tensor-wise or row-wise."""

from __future__ import annotations

import torch
from torch import fx

from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

FP8, FP8_WIDE, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
convert = torch.ops.prims.convert_element_type.default


def fp8(
    made: HandGraph, *shape: int, name: str = "x", dtype: torch.dtype = FP8, dynamic: tuple[int, ...] = ()
) -> fx.Node:
    return made.input(*shape, name=name, dtype=dtype, dynamic=dynamic)


def weight(made: HandGraph, inner: int = 32, columns: int = 48, name: str = "w") -> fx.Node:
    """``[inner, columns]``, stored by columns, as a module's transposed weight is."""
    return made.call(aten.permute.default, fp8(made, columns, inner, name=name), [1, 0])


def multiply(
    made: HandGraph,
    x: fx.Node,
    w: fx.Node,
    row_wise: bool = False,
    out: torch.dtype = BF16,
    scales: tuple[fx.Node, ...] = (),
    bias: fx.Node | None = None,
    of: str = "",
) -> fx.Node:
    rows, columns = x.meta["val"].shape[0], w.meta["val"].shape[1]
    if not scales:
        scales = tuple(
            made.input(*(shape if row_wise else ()), name=name + of)
            for name, shape in (("scale_a", (rows, 1)), ("scale_b", (1, columns)))
        )
    return made.call(aten._scaled_mm.default, x, w, *scales, bias, None, out)


def gather_site(row_wise: bool = False, rows: int = 32, inner: int = 32, columns: int = 48) -> HandGraph:
    made = HandGraph()
    gathered = made.gather(fp8(made, rows, inner))
    return made.output(multiply(made, gathered, weight(made, inner, columns), row_wise))


def as_bytes(made: HandGraph, x: fx.Node) -> fx.Node:
    return made.call(aten.view.dtype, made.gather(made.call(aten.view.dtype, x, torch.uint8)), FP8)


def two_weights(used: bool = False) -> HandGraph:
    made = HandGraph()
    gathered = as_bytes(made, fp8(made, 32, 32))
    bias = made.input(16, name="bias", dtype=BF16)
    results = [
        multiply(made, gathered, weight(made), True),
        multiply(made, gathered, weight(made, 32, 16, "v"), bias=bias, of="_of_v"),
    ]
    return made.output(*results, *([made.call(convert, gathered, BF16)] if used else []))


def scatter_site(row_wise: bool = False) -> HandGraph:
    made = HandGraph()
    return made.output(made.scatter(multiply(made, fp8(made, 32 * made.world_size, 32), weight(made), row_wise)))


def reduce_site(row_wise: bool = False) -> HandGraph:
    made = HandGraph()
    return made.output(made.reduce(multiply(made, fp8(made, 32 * made.world_size, 32), weight(made), row_wise)))


def quantised(made: HandGraph, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """``x`` in fp8, and a scale for each row."""
    scale = made.call(convert, made.call(aten.amax.default, made.call(aten.abs.default, x), [1], True), torch.float32)
    return made.call(convert, made.call(aten.div.Tensor, x, scale), FP8), scale


def gathered_scales(tokens: int = 32, dynamic: tuple[int, ...] = ()) -> HandGraph:
    """``x`` is quantised before its gather. A second gather brings the scales."""
    made = HandGraph()
    x, scale = quantised(made, made.input(tokens, 4096, name="x", dtype=BF16, dynamic=dynamic))
    gathered, scales = made.gather(x), made.gather(scale)
    return made.output(
        multiply(made, gathered, weight(made, 4096, 4096), scales=(scales, made.input(1, 4096, name="scale_b")))
    )
