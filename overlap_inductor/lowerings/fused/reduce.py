# SPDX-License-Identifier: Apache-2.0
"""Prepares the kernels of schedule ``fused`` that send their products: reductions, and the all-to-all after a
matmul."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.matmul_all_reduce import matmul_all_reduce
from overlap_inductor.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from overlap_inductor.lowerings.fused.launch import EXTRAS
from overlap_inductor.lowerings.fused.launch import NO_TAIL
from overlap_inductor.lowerings.fused.launch import Tail
from overlap_inductor.lowerings.fused.launch import check
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.parameters import band_rows
from overlap_inductor.lowerings.fused.parameters import needed
from overlap_inductor.lowerings.fused.parameters import pushers_of
from overlap_inductor.lowerings.fused.parameters import why_not
from overlap_inductor.lowerings.one_op.descriptors import TILES_A_BATCH
from overlap_inductor.lowerings.one_op.descriptors import right_descriptor
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.call_arguments import call_arguments
from overlap_inductor.transports.sm_push import COPY_WORDS

MOST_RANKS = 63
"""Largest group: a block keeps one bit for each peer's credit in a signed 64-bit number."""
NO_EXCHANGE = {"copies": 0, "EXCHANGES": False, "BY_COLUMNS": False, "EARLY": 0, "COPY": 0}
"""The arguments of ``matmul_reduce_scatter`` that only an all-to-all uses."""
SLAB = 32
"""Rows of a tile that a block of an all-reduce sums or copies at once."""


class _Arguments(NamedTuple):
    """The arguments that ``matmul_reduce_scatter`` and ``matmul_all_reduce`` share, by parameter. ``varying`` differ
    from launch to launch."""

    varying: dict[str, Any]
    fixed: dict[str, Any]


def _arguments(
    kernel: Any,
    pattern: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    launch: Launch,
    p: FusedParameters,
    bias: torch.Tensor | None,
    average: bool,
    tail: Tail,
    by_columns: bool = False,
) -> _Arguments:
    """``by_columns``: the shards are columns of the product, not rows. Raises ``UnsupportedError`` if the kernel does
    not support its operands or the group's size, or if ``launch.slot`` is too small."""
    world_size, slot, (all_rows, inner), columns = launch.world_size, launch.slot, a.shape, b.shape[1]
    if by_columns:
        all_rows, columns = all_rows * world_size, columns // world_size
    if world_size > MOST_RANKS:
        raise UnsupportedError(
            f"the group has {world_size} ranks; expected at most {MOST_RANKS}, because a block keeps one bit per rank"
        )
    rows = -(-all_rows // world_size)
    part_rows = band_rows(rows, world_size, p)
    need = needed(pattern, world_size, rows, inner, columns, a.element_size(), p)
    check(a, b, bias, need, launch)
    tail.check([out])
    right, transposed = right_descriptor(b, p.block_n, p.block_k)
    varying = {
        "a_desc": TensorDescriptor.from_tensor(a, [p.block_m, p.block_k]),
        "b_desc": right,
        "out": out,
        "bias": out if bias is None else bias,
        **dict(zip(EXTRAS, tail.operands, strict=True)),
    }
    fixed = {
        **call_arguments(kernel, launch),
        "staging": slot.data.local[: need[0]].view(a.dtype),
        "rows": rows,
        "columns": columns,
        "inner": inner,
        "part_rows": part_rows,
        "parts": -(-rows // part_rows),
        "scale": 1.0 / world_size if average else 1.0,
        "BLOCK_M": p.block_m,
        "BLOCK_N": p.block_n,
        "BLOCK_K": p.block_k,
        "GROUP_M": p.group_m,
        "THREADS": 32 * p.warps,
        "HALVES": p.halves,
        "TRANSPOSED": transposed,
        "BIAS": bias is not None,
        "EPILOGUE": tail.function,
    }
    return _Arguments(varying, fixed)


def prepare_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    launch: Launch,
    p: FusedParameters,
    bias: torch.Tensor | None,
    average: bool,
    tail: Tail,
) -> Callable[..., None]:
    """Prepare the kernel. The returned function launches the kernel with ``(a, b, out, bias)`` and ``tail.operands``.
    The shapes are ``a [world_size * rows, K]``, ``b [K, N]``, ``out [rows, N]``. If ``bias``
    is ``None`` here, give the returned function ``out`` in place of a bias.

    Raises:
        UnsupportedError: the kernel does not support its operands, or ``launch.slot`` is too small. The slot is the
            part of the workspace that the call uses.
    """
    if a.shape[0] % launch.world_size:
        raise UnsupportedError(f"{a.shape[0]} rows cannot be cut into {launch.world_size} equal shards")
    found = _arguments(matmul_reduce_scatter, "matmul_reduce_scatter", a, b, out, launch, p, bias, average, tail)
    return _prepared(found, NO_EXCHANGE, a.device, p)


def _prepared(found: _Arguments, exchange: dict[str, Any], device: torch.device, p: FusedParameters) -> PreparedKernel:
    fixed = {**found.fixed, **exchange, "STAGGER": p.stagger_ns, "BATCH": TILES_A_BATCH}
    return PreparedKernel(
        matmul_reduce_scatter,
        p.blocks,
        found.varying,
        fixed,
        scratch=device,
        num_warps=p.warps,
        num_stages=p.stages,
    )


def prepare_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    launch: Launch,
    p: FusedParameters,
    bias: torch.Tensor | None,
    by_columns: bool,
) -> Callable[..., None]:
    """As ``prepare_reduce_scatter``, but without a tail, and with ``out [world_size * rows, N]``. If ``by_columns``,
    the shapes of the operands are ``a [rows, K]`` and ``b [K, world_size * N]``."""
    world_size = launch.world_size
    cut, what = (b.shape[1], "columns") if by_columns else (a.shape[0], "rows")
    if cut % world_size:
        raise UnsupportedError(f"{cut} {what} cannot be cut into {world_size} equal slices")
    if (reason := why_not(a.dtype, a.shape[1], out.shape[1])) is not None:
        raise UnsupportedError(reason)
    found = _arguments(
        matmul_reduce_scatter, "matmul_all_to_all", a, b, out, launch, p, bias, False, NO_TAIL, by_columns
    )
    tiles = found.fixed["part_rows"] // p.block_m * -(-out.shape[1] // p.block_n)
    early = world_size - 1 if p.early < 0 else p.early
    exchange = {"copies": tiles, "EXCHANGES": True, "BY_COLUMNS": by_columns, "EARLY": early, "COPY": COPY_WORDS}
    kernel = _prepared(found, exchange, a.device, p)
    return lambda a, b, out, bias: kernel(a, b, out, bias, *NO_TAIL.operands)


def prepare_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    product: torch.Tensor,
    out: torch.Tensor,
    launch: Launch,
    p: FusedParameters,
    bias: torch.Tensor | None,
    average: bool,
    tail: Tail,
) -> Callable[..., None]:
    """As ``prepare_reduce_scatter``, but the returned function takes ``(a, b, product, out, bias)`` and
    ``tail.operands``. The shapes are ``a [M, K]``, ``b [K, N]``, ``product [product_rows, N]`` and ``out [M, N]``."""
    found = _arguments(matmul_all_reduce, "matmul_all_reduce", a, b, out, launch, p, bias, average, tail)
    if (tiles := len(product) // p.block_m * -(-b.shape[1] // p.block_n)) > launch.slot.tiles.numel():
        words = launch.slot.tiles.numel()
        raise UnsupportedError(f"the product has {tiles} tiles, but the slot has words for only {words}")
    stored = TensorDescriptor.from_tensor(product, [p.block_m, p.block_n // 2 if p.halves else p.block_n])
    # The product is passed twice: as a descriptor for bulk stores and as a pointer for loads.
    left, right, *behind = found.varying.items()
    varying = dict([left, right, ("product_desc", stored), ("product", product), *behind])
    fixed = {
        **found.fixed,
        "ready": launch.slot.tiles,
        "limit": a.shape[0],
        "PUSHERS": pushers_of(a.shape[1], p),
        "UNIT": p.unit,
        "SLAB": min(p.block_m, SLAB),
    }
    kernel = PreparedKernel(matmul_all_reduce, p.blocks, varying, fixed, num_warps=p.warps, num_stages=p.stages)
    return lambda a, b, product, *others: kernel(a, b, product, product, *others)


def product_rows(rows: int, world_size: int, p: FusedParameters) -> int:
    """Number of rows of the tensor from which an all-reduce's blocks send. Each of its ``world_size`` shards has
    ``rows`` rows, rounded up to whole tiles."""
    return world_size * -(-rows // p.block_m) * p.block_m
