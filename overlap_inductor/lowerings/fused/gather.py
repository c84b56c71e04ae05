"""Schedule ``fused``: the kernel of an all-gather, prepared, and the gathered tensor that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.all_gather_matmul import all_gather_matmul
from overlap_inductor.kernels.all_gather_matmul_slices import all_gather_matmul_slices
from overlap_inductor.lowerings.fused.launch import Tail
from overlap_inductor.lowerings.fused.launch import check
from overlap_inductor.lowerings.fused.parameters import MOST_WEIGHTS
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.parameters import band_rows
from overlap_inductor.lowerings.fused.parameters import needed
from overlap_inductor.lowerings.one_op.descriptors import TILES_A_BATCH
from overlap_inductor.lowerings.one_op.descriptors import right_descriptor
from overlap_inductor.lowerings.one_op.operands import lies_transposed
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.triton_launch import PreparedKernel

COPY_WORDS = 8192
"""int32 words that a block of the pushing part stores at once."""


def prepare_gather(
    a: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    launch: Launch,
    p: FusedParameters,
    biases: Sequence[torch.Tensor | None],
    keep: bool,
    tail: Tail,
    copied: bool,
    slices: int,
) -> PreparedKernel:
    """``copied``: copy engines send the shard; ``slices``: in which blocks push it, if more than one."""
    world_size, slot = launch.world_size, launch.slot
    rows, inner = a.shape
    # (A copy more costs more than a shard that comes whole.)
    part_rows = -(-rows // p.block_m) * p.block_m if copied else band_rows(rows, world_size, p)
    transposed = {lies_transposed(b) for b in rhs}
    if len(transposed) > 1 or not 1 <= len(rhs) <= MOST_WEIGHTS:
        raise UnsupportedError(
            f"one launch multiplies by 1 to {MOST_WEIGHTS} weights that lie alike, not by those of strides"
            f" {[list(b.stride()) for b in rhs]}"
        )
    tail.check(results)
    varying: list[Any] = [TensorDescriptor.from_tensor(a, [p.block_m, p.block_k]), a]
    for b, result, bias in zip(rhs, results, biases, strict=True):
        check(a, b, bias, needed("all_gather_matmul", world_size, rows, inner, b.shape[1], a.element_size(), p), launch)
        stored = TensorDescriptor.from_tensor(result, [p.block_m, p.block_n // 2 if p.halves else p.block_n])
        varying += [right_descriptor(b, p.block_n, p.block_k)[0], stored, result, result if bias is None else bias]
    others = MOST_WEIGHTS - len(rhs)
    columns = [*[b.shape[1] for b in rhs], *[None] * others]
    which = (
        TensorDescriptor.from_tensor(gathered(a, launch), [p.block_m, p.block_k]),
        slot.data.pointers, slot.flags.pointers, slot.flags.local, slot.queues, slot.calls,
        launch.faults.stop, launch.patience_ns, launch.site, launch.rank, rows, inner,
    )  # fmt: skip
    tiles = (p.block_m, p.block_n, p.block_k, p.group_m)
    bias_bits = sum(1 << i for i, bias in enumerate(biases) if bias is not None)
    what = (p.halves, transposed.pop(), bias_bits, tail.function, keep)
    counts, row_bytes = (len(rhs), world_size, -(-rows // part_rows)), inner * a.element_size()
    varying += [*[None] * (4 * others), *tail.operands]
    if slices > 1:
        if not p.slices_pushers:
            raise UnsupportedError(
                "a gather in slices has its shard pushed by its first blocks: slices_pushers must be at least 1"
            )
        size = -(-inner // (slices * p.block_k)) * p.block_k
        words = -(-size * a.element_size() // 4)
        columns_at_once = min(triton.next_power_of_2(words), COPY_WORDS // 8)
        fixed: tuple[Any, ...] = (
            *columns, *which, row_bytes // 16, part_rows, size, size * a.element_size() // 16, slot.signals,
            *counts, -(-inner // size), p.pieces, p.slices_pushers, COPY_WORDS // columns_at_once, columns_at_once,
            *tiles, 32 * p.warps, *what,
        )  # fmt: skip
        kernel: Any = all_gather_matmul_slices
    else:
        fixed = (
            *columns, *which, a.nbytes // 16, part_rows, part_rows * row_bytes // 16, slot.signals,
            *counts, not copied, p.pieces, p.pushers, *tiles, COPY_WORDS, TILES_A_BATCH, 32 * p.warps, *what,
        )  # fmt: skip
        kernel = all_gather_matmul
    return PreparedKernel(kernel, p.blocks, varying, fixed, num_warps=p.warps, num_stages=p.stages)


def gathered(a: torch.Tensor, launch: Launch) -> torch.Tensor:
    """The workspace of an ``all_gather_matmul`` of shard ``a`` as ``[world_size * rows, K]``; whole only after a call
    with ``keep``, until ``end``."""
    rows, inner = a.shape
    return launch.slot.data.local[: launch.world_size * a.nbytes].view(a.dtype).view(launch.world_size * rows, inner)
