"""Schedule ``fused``: the kernel of a reduction, prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.matmul_push_reduce import matmul_push_reduce
from overlap_inductor.kernels.matmul_reduce import matmul_reduce
from overlap_inductor.lowerings.fused_launch import TILES_A_BATCH
from overlap_inductor.lowerings.fused_launch import Tail
from overlap_inductor.lowerings.fused_launch import check
from overlap_inductor.lowerings.fused_launch import right_descriptor
from overlap_inductor.lowerings.fused_plan import FusedParameters
from overlap_inductor.lowerings.fused_plan import band_rows
from overlap_inductor.lowerings.fused_plan import needed
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.workspace import Launch

MOST_RANKS = 63
SLAB = 32
"""Rows of a tile that a block which pushes moves at once."""


def prepare_reduce(
    pattern: str,
    a: torch.Tensor,
    b: torch.Tensor,
    product: torch.Tensor | None,
    out: torch.Tensor,
    launch: Launch,
    p: FusedParameters,
    bias: torch.Tensor | None,
    average: bool,
    tail: Tail,
) -> Callable[..., None]:
    """What launches ``(a, b, product, out, bias)`` and the extra tensors; ``product``: where ``product_rows`` says so, else none."""
    world_size, slot, broadcast = launch.world_size, launch.slot, pattern == "matmul_all_reduce"
    all_rows, inner = a.shape
    columns = b.shape[1]
    if all_rows % world_size and not broadcast:
        raise UnsupportedError(f"{all_rows} rows do not fall into {world_size} equal shards")
    if world_size > MOST_RANKS:
        raise UnsupportedError(f"{world_size} ranks are more than the {MOST_RANKS} whose credits a block remembers")
    rows = -(-all_rows // world_size)
    part_rows = band_rows(rows, world_size, p)
    parts = -(-rows // part_rows)
    need = needed(pattern, world_size, rows, inner, columns, a.element_size(), p)
    check(a, b, bias, need, launch)
    tail.check([out])
    right, transposed = right_descriptor(b, p.block_n, p.block_k)
    operands = (TensorDescriptor.from_tensor(a, [p.block_m, p.block_k]), right)
    behind = (out, out if bias is None else bias, *tail.operands)
    memory = (
        slot.data.local[: need[0]].view(a.dtype), slot.data.pointers, slot.flags.pointers, slot.flags.local, slot.queues, slot.calls, launch.faults.stop, launch.patience_ns,
        launch.site, launch.rank, rows, all_rows, columns, inner, part_rows, slot.signals, 1.0 / world_size if average else 1.0, world_size, parts,
    )  # fmt: skip
    tiles = (p.block_m, p.block_n, p.block_k, p.group_m)
    what = (32 * p.warps, p.halves, transposed, bias is not None, tail.function)
    if product is not None:
        stored = TensorDescriptor.from_tensor(product, [p.block_m, p.block_n // 2 if p.halves else p.block_n])
        if (tiles_there := len(product) // p.block_m * -(-columns // p.block_n)) > slot.tiles.numel():
            raise UnsupportedError(f"{tiles_there} tiles are multiplied, and the slot has words for {slot.tiles.numel()}")
        fixed: tuple[Any, ...] = (slot.tiles, *memory, p.pushers, p.unit, broadcast, *tiles, min(p.block_m, SLAB), *what)
        # (The tensor comes twice: for the unit that stores, and for those that load.)
        kernel = PreparedKernel(matmul_push_reduce, p.blocks, (*operands, stored, product, *behind), fixed, num_warps=p.warps, num_stages=p.stages)
        return lambda a, b, product, *others: kernel(a, b, product, product, *others)
    fixed = (*memory, min(p.lag, parts) if broadcast else parts, p.copy_lag, broadcast, p.stagger_ns, *tiles, TILES_A_BATCH, *what)
    alone = PreparedKernel(matmul_reduce, p.blocks, (*operands, *behind), fixed, scratch=a.device, num_warps=p.warps, num_stages=p.stages)
    return lambda a, b, product, *others: alone(a, b, *others)


def product_rows(rows: int, world_size: int, p: FusedParameters) -> int:
    """Rows of the product that blocks which push send from, 0 where tiles leave from their own block; ``rows`` of a shard."""
    return world_size * -(-rows // p.block_m) * p.block_m if p.pushers else 0
