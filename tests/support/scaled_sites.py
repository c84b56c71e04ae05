# SPDX-License-Identifier: Apache-2.0
"""Sites of fp8 matmuls, written as in models. With fp8 inputs, each function calls ``_scaled_mm``. With fp64 inputs, it
computes the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter

FP8, FP8_WIDE = torch.float8_e4m3fn, torch.float8_e5m2
Input = tuple[str, tuple[int, ...]]
"""``(kind, shape)`` of an input. Kinds: ``fp8`` (e4m3), ``fp8 wide`` (e5m2), ``scale`` (fp32) and ``bias`` (bf16)."""
LARGEST = 448.0
"""The largest number that ``FP8`` can represent."""


def multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    fast: bool = False,
) -> torch.Tensor:
    """``(x * a) @ (w * b) + bias`` with scales ``a`` and ``b``, in bf16, or in fp64 if ``x`` is fp64. ``fast``: use
    fast accumulation."""
    if x.dtype == torch.float64:
        exact = (x @ w) * a * b
        return exact if bias is None else exact + bias
    return torch._scaled_mm(x, w, a, b, bias, out_dtype=torch.bfloat16, use_fast_accum=fast)


def gather_bytes(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """All-gather ``x`` on ``dim``. fp8 is sent as uint8, because not every backend can send fp8."""
    return (
        all_gather(x, dim, group)
        if x.dtype == torch.float64
        else all_gather(x.view(torch.uint8), dim, group).view(x.dtype)
    )


def quantised(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``(rounded, scales)``. ``rounded`` is ``y [rows, columns]``, each row divided by its scale and rounded to
    fp8. ``scales`` is ``[rows, 1]`` in fp32. If ``y`` is fp64, both are converted to fp64 after the rounding."""
    scale = y.abs().amax(1, keepdim=True).float() / LARGEST
    rounded = (y / scale).to(FP8)
    return rounded.to(y.dtype) if y.dtype == torch.float64 else rounded, scale.to(
        y.dtype
    ) if y.dtype == torch.float64 else scale


def cases(w: int, factor: int = 1) -> dict[str, tuple[Callable[..., Any], list[Input], int]]:
    """``{name: (function, inputs, number of sites)}`` for ``w`` ranks. ``factor`` multiplies every size above 2."""
    found = _cases(w)
    return {
        name: (function, [(kind, tuple(n * factor if n > 2 else n for n in shape)) for kind, shape in inputs], sites)
        for name, (function, inputs, sites) in found.items()
    }


def _cases(w: int) -> dict[str, tuple[Callable[..., Any], list[Input], int]]:
    g, s = dist.group.WORLD, 24
    weight, one, columns = ("fp8", (48, 32)), ("scale", ()), ("scale", (1, 48))
    return {
        "gather rows, tensor-wise": (
            lambda x, v, a, b: multiply(all_gather(x, 0, g), v.t(), a, b, None, True),
            [("fp8", (s, 32)), weight, one, one],
            1,
        ),
        "gather rows and scales, row-wise": (
            lambda x, a, v, b: multiply(gather_bytes(x, 0, g), v.t(), all_gather(a, 0, g), b),
            [("fp8", (s, 32)), ("scale", (s, 1)), weight, columns],
            1,
        ),
        "gather rows, two matmuls, one with bias, gathered tensor read": (
            lambda x, v, a, b, u, c, d, bias: (
                lambda y: (multiply(y, v.t(), a, b), multiply(y, u.t(), c, d, bias), y.to(torch.float32))
            )(gather_bytes(x, 0, g)),
            [("fp8", (s, 32)), weight, ("scale", (s * w, 1)), columns, ("fp8", (16, 32)), one, one, ("bias", (16,))],
            1,
        ),
        "gather rows, wide fp8": (
            lambda x, v, a, b: multiply(all_gather(x, 0, g), v.t(), a, b),
            [("fp8 wide", (s, 32)), weight, one, one],
            1,
        ),
        "gather sequence, batch 2, row-wise": (
            lambda x, v, a, b: multiply(gather_bytes(x, 1, g).flatten(0, 1), v.t(), a, b),
            [("fp8", (2, s, 32)), weight, ("scale", (2 * s * w, 1)), columns],
            1,
        ),
        "gather columns on the right, row-wise": (
            lambda x, v, a, b: multiply(v, gather_bytes((x.float() * 2).to(x.dtype), 0, g).t(), a, b),
            [("fp8", (s, 32)), weight, ("scale", (48, 1)), ("scale", (1, s * w))],
            1,
        ),
        "scatter rows, row-wise": (
            lambda x, v, a, b: reduce_scatter(multiply(x, v.t(), a, b, None, True), "sum", 0, g),
            [("fp8", (s * w, 32)), weight, ("scale", (s * w, 1)), columns],
            1,
        ),
        "scatter an average with bias, tensor-wise": (
            lambda x, v, a, b, bias: reduce_scatter(multiply(x, v.t(), a, b, bias), "avg", 0, g),
            [("fp8", (s * w, 32)), weight, one, one, ("bias", (48,))],
            1,
        ),
        "scatter sequence, batch 2, row-wise": (
            lambda x, v, a, b: reduce_scatter(
                multiply(x.flatten(0, 1), v.t(), a, b).unflatten(0, x.shape[:2]), "sum", 1, g
            ),
            [("fp8", (2, s * w, 32)), weight, ("scale", (2 * s * w, 1)), columns],
            1,
        ),
        "scatter the last dim, row-wise": (
            lambda x, v, a, b: reduce_scatter(multiply(x, v.t(), a, b), "sum", 1, g),
            [("fp8", (16, 32)), ("fp8", (s * w * 2, 32)), ("scale", (16, 1)), ("scale", (1, s * w * 2))],
            1,
        ),
        "all-reduce, tensor-wise": (
            lambda x, v, a, b: all_reduce(multiply(x, v.t(), a, b), "sum", g) * 2,
            [("fp8", (s * w, 32)), weight, one, one],
            1,
        ),
        "all-reduce of rows whose number W does not divide, row-wise": (
            lambda x, v, a, b: all_reduce(multiply(x, v.t(), a, b), "sum", g),
            [("fp8", (s * w - 1, 32)), weight, ("scale", (s * w - 1, 1)), columns],
            1,
        ),
        "an MLP, gathered and scattered, row-wise": (
            lambda x, a, v, b, u, d: (lambda y: reduce_scatter(multiply(y[0], u.t(), y[1], d), "sum", 0, g))(
                quantised(torch.relu(multiply(gather_bytes(x, 0, g), v.t(), all_gather(a, 0, g), b)))
            ),
            [("fp8", (s, 32)), ("scale", (s, 1)), weight, columns, ("fp8", (32, 48)), ("scale", (1, 32))],
            2,
        ),
    }


def made(inputs: list[Input], generator: torch.Generator) -> list[torch.Tensor]:
    """Random tensors on the CPU, of the kinds and shapes in ``inputs``."""
    dtypes = {"fp8": FP8, "fp8 wide": FP8_WIDE, "bias": torch.bfloat16}
    return [
        torch.rand(shape, generator=generator) + 0.5
        if kind == "scale"
        else torch.randn(shape, generator=generator).to(dtypes[kind])
        for kind, shape in inputs
    ]
