# SPDX-License-Identifier: Apache-2.0
"""The ops ``chunked_grouped_mm`` and ``chunked_gated_grouped_mm`` of experts' programs (``merged_program``).

``torch._grouped_mm`` takes the host 40 to 65 us a call on H200s (profiled), and a gate after it is a launch of its own.
The kernels of ``kernels.grouped_matmul`` take one launch for each op. On an H200, with 16384 rows of 32 experts of 2048
x 1024, they reach 650 TFLOP/s (gate) and 567 (one product). In the same run, ``_grouped_mm`` reaches 635 and 597,
without the gate.

If the kernels do not support the operands, the ops are computed as they were written. The ops run inside
``runtime.call_order`` only, because all kernels share one queue.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import torch

from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.one_op import operands
from overlap_inductor.torch_compat.symmetric import multiprocessors

if TYPE_CHECKING:
    from overlap_inductor.torch_compat.triton_launch import PreparedKernel

_UNKNOWN: Any = object()
_KERNELS: dict[Any, PreparedKernel | None] = {}
"""Prepared kernels by the layouts of their operands; ``None`` if no kernel supports them."""


class Tiles(NamedTuple):
    """The size of the tiles of a kernel. With these, the kernels were fastest on an H200, of 4 to 6 sizes each."""

    m: int
    n: int
    k: int
    stages: int
    group: int = 8
    warps: int = 8


GATED, SINGLE = Tiles(128, 128, 64, 4), Tiles(128, 256, 64, 3)


def prepared(
    x: torch.Tensor, weights: Sequence[torch.Tensor], out: torch.Tensor, ends: torch.Tensor
) -> PreparedKernel | None:
    """The kernel ``multiply_experts``, gated for two weights, for operands of these layouts.
    ``None`` if the kernels do not support them."""
    key = [x.dtype, x.shape[1], ends.dtype, x.device]
    address = x.data_ptr() | out.data_ptr() | ends.data_ptr()
    for w in weights:
        key += (w.dtype, w.shape, w.stride())
        address |= w.data_ptr()
    if address % 16 or not (x.is_contiguous() and out.is_contiguous() and ends.is_contiguous()):
        return None
    found = _KERNELS.get(tuple(key), _UNKNOWN)
    if found is _UNKNOWN:
        found = _KERNELS[tuple(key)] = _prepared(x, weights, out, ends)
    return found


def _prepared(
    x: torch.Tensor, weights: Sequence[torch.Tensor], out: torch.Tensor, ends: torch.Tensor
) -> PreparedKernel | None:
    tiles = GATED if len(weights) == 2 else SINGLE
    first = weights[0]
    (inner, columns), transposed = first.shape[1:], first.transpose(1, 2).is_contiguous()
    alike = all(w.shape == first.shape and w.stride() == first.stride() and w.dtype == x.dtype for w in weights)
    # A tile along K that crossed the end of an expert's weight would add the next expert's rows.
    layout = transposed or (first.is_contiguous() and not inner % tiles.k)
    if not alike or not layout or inner != x.shape[1] or ends.dtype != torch.int32:
        return None
    if operands.why_not(x.dtype, inner, columns) is not None:
        return None
    return kernel(x, weights, out, ends, tiles, transposed)


def kernel(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    out: torch.Tensor,
    ends: torch.Tensor,
    tiles: Tiles,
    transposed: bool,
) -> PreparedKernel:
    """The prepared kernel. A launch passes ``x``, two weights (``None`` for a missing one), ``out`` twice, and
    ``ends``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from overlap_inductor.kernels import grouped_matmul
    from overlap_inductor.lowerings.one_op.descriptors import TILES_A_BATCH
    from overlap_inductor.torch_compat.triton_launch import PreparedKernel

    experts, inner, columns = weights[0].shape
    blocks = [tiles.n, tiles.k] if transposed else [tiles.k, tiles.n]
    flat = [(w.transpose(1, 2) if transposed else w).flatten(0, 1) for w in weights]
    described = [TensorDescriptor.from_tensor(w, blocks) for w in flat]
    varying = {
        # A contiguous tensor of one row may have any stride.
        "x_desc": TensorDescriptor(x, x.shape, [inner, 1], [tiles.m, tiles.k]),
        "w_desc": described[0],
        "v_desc": described[1] if len(described) == 2 else None,
        "out_desc": TensorDescriptor(out, out.shape, [columns, 1], [tiles.m, tiles.n]),
        "out": out,
        "ends": ends,
    }
    fixed = {
        "experts": experts,
        "inner": inner,
        "columns": columns,
        "EXPERTS": 1 << (experts - 1).bit_length(),
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "GROUP_M": tiles.group,
        "BATCH": TILES_A_BATCH,
        "THREADS": 32 * tiles.warps,
        "queue": _queue(x.device),
        "TRANSPOSED": transposed,
        "GATED": len(weights) == 2,
    }
    return PreparedKernel(
        grouped_matmul.multiply_experts,
        multiprocessors(x.device),
        varying,
        fixed,
        any_rows=("x_desc", "out_desc"),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@functools.cache
def _queue(device: torch.device) -> torch.Tensor:
    """The kernels' queue. One serves them all, because the calls on a device run one after the other, and a call's
    grouped matmuls run on one stream (``runtime.call_order``)."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def _multiply(x: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor, out: torch.Tensor) -> bool:
    """Store what a kernel computes in ``out``. False if no kernel supports the operands."""
    if not x.is_cuda or x.dim() != 2 or not x.shape[0]:
        return False
    found = prepared(x, weights, out, ends)
    if found is not None:
        found(x, weights[0], weights[1] if len(weights) == 2 else None, out, out, ends)
    return found is not None


def _grouped_mm(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = _fake(x, w)
    return out if _multiply(x, [w], ends, out) else torch.ops.aten._grouped_mm.default(x, w, ends)


def _gated_grouped_mm(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = _fake(x, w1)
    if _multiply(x, [w1, w3], ends, out):
        return out
    gate, value = _grouped_mm(x, w1, ends), _grouped_mm(x, w3, ends)
    result: torch.Tensor = torch.ops.overlap_inductor.chunked_silu_times.default(gate, value, ends)
    return result


def _fake(x: torch.Tensor, w: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


# ``x [rows, inner]`` of each expert times its ``w [experts, inner, columns]``; int32 ``ends``: where its rows end.
define("chunked_grouped_mm(Tensor x, Tensor w, Tensor ends) -> Tensor", _grouped_mm, _fake)
# ``silu(x @ w1) * (x @ w3)``, each product rounded to the dtype of ``x``.
define("chunked_gated_grouped_mm(Tensor x, Tensor w1, Tensor w3, Tensor ends) -> Tensor", _gated_grouped_mm, _fake)
