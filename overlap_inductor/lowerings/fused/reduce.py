"""Schedule ``fused``: the kernels of reductions, prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.matmul_all_reduce import matmul_all_reduce
from overlap_inductor.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from overlap_inductor.lowerings.fused.launch import Tail
from overlap_inductor.lowerings.fused.launch import check
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.parameters import band_rows
from overlap_inductor.lowerings.fused.parameters import needed
from overlap_inductor.lowerings.fused.parameters import pushers_of
from overlap_inductor.lowerings.one_op.descriptors import TILES_A_BATCH
from overlap_inductor.lowerings.one_op.descriptors import right_descriptor
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.triton_launch import PreparedKernel

MOST_RANKS = 63
SLAB = 32
"""Rows of a tile that a block which pushes moves at once."""


class _Arguments(NamedTuple):
    """What both kernels take: the matmul's operands, what follows it, memory down to the rows of a shard, counts, the
    tile's shape, and what else is compiled in."""

    operands: tuple[Any, ...]
    behind: tuple[Any, ...]
    memory: tuple[Any, ...]
    counts: tuple[Any, ...]
    tiles: tuple[int, ...]
    compiled: tuple[Any, ...]


def _arguments(
    pattern: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    launch: Launch,
    p: FusedParameters,
    bias: torch.Tensor | None,
    average: bool,
    tail: Tail,
) -> _Arguments:
    """Raises ``UnsupportedError`` where a kernel is not made for what it gets."""
    world_size, slot, (all_rows, inner), columns = launch.world_size, launch.slot, a.shape, b.shape[1]
    if world_size > MOST_RANKS:
        raise UnsupportedError(f"{world_size} ranks are more than the {MOST_RANKS} whose credits a block remembers")
    rows = -(-all_rows // world_size)
    part_rows = band_rows(rows, world_size, p)
    need = needed(pattern, world_size, rows, inner, columns, a.element_size(), p)
    check(a, b, bias, need, launch)
    tail.check([out])
    right, transposed = right_descriptor(b, p.block_n, p.block_k)
    memory = (
        slot.data.local[: need[0]].view(a.dtype), slot.data.pointers, slot.flags.pointers, slot.flags.local,
        slot.queues, slot.calls, launch.faults.stop, launch.patience_ns, launch.site, launch.rank, rows,
    )  # fmt: skip
    counts = (
        columns,
        inner,
        part_rows,
        -(-rows // part_rows),
        slot.signals,
        1.0 / world_size if average else 1.0,
        world_size,
    )
    return _Arguments(
        (TensorDescriptor.from_tensor(a, [p.block_m, p.block_k]), right),
        (out, out if bias is None else bias, *tail.operands),
        memory,
        counts,
        (p.block_m, p.block_n, p.block_k, p.group_m),
        (32 * p.warps, p.halves, transposed, bias is not None, tail.function),
    )


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
    """What launches ``(a, b, out, bias)`` and the extra tensors. Raises ``UnsupportedError``."""
    if a.shape[0] % launch.world_size:
        raise UnsupportedError(f"{a.shape[0]} rows do not fall into {launch.world_size} equal shards")
    found = _arguments("matmul_reduce_scatter", a, b, out, launch, p, bias, average, tail)
    fixed = (*found.memory, *found.counts, p.stagger_ns, *found.tiles, TILES_A_BATCH, *found.compiled)
    return PreparedKernel(
        matmul_reduce_scatter,
        p.blocks,
        (*found.operands, *found.behind),
        fixed,
        scratch=a.device,
        num_warps=p.warps,
        num_stages=p.stages,
    )


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
    """What launches ``(a, b, product, out, bias)`` and the extra tensors; ``product [product_rows, N]``. Raises
    ``UnsupportedError``."""
    found = _arguments("matmul_all_reduce", a, b, out, launch, p, bias, average, tail)
    if (tiles := len(product) // p.block_m * -(-b.shape[1] // p.block_n)) > launch.slot.tiles.numel():
        raise UnsupportedError(f"{tiles} tiles are multiplied, and the slot has words for {launch.slot.tiles.numel()}")
    stored = TensorDescriptor.from_tensor(product, [p.block_m, p.block_n // 2 if p.halves else p.block_n])
    fixed = (
        launch.slot.tiles,
        *found.memory,
        a.shape[0],
        *found.counts,
        pushers_of(a.shape[1], p),
        p.unit,
        *found.tiles,
        min(p.block_m, SLAB),
        *found.compiled,
    )
    # (The tensor comes twice: for the unit that stores, and for those that load.)
    kernel = PreparedKernel(
        matmul_all_reduce,
        p.blocks,
        (*found.operands, stored, product, *found.behind),
        fixed,
        num_warps=p.warps,
        num_stages=p.stages,
    )
    return lambda a, b, product, *others: kernel(a, b, product, product, *others)


def product_rows(rows: int, world_size: int, p: FusedParameters) -> int:
    """Rows of the product that an all-reduce's blocks send from; ``rows`` of a shard."""
    return world_size * -(-rows // p.block_m) * p.block_m
