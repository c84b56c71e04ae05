# SPDX-License-Identifier: Apache-2.0
"""Prepares the kernels of schedule ``fused`` that multiply what arrives: after an all-gather, or after an all-to-all of
rows. ``gathered`` returns the gathered tensor that a kernel leaves in the workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.all_gather_matmul import all_gather_matmul
from overlap_inductor.kernels.all_gather_matmul_slices import all_gather_matmul_slices
from overlap_inductor.lowerings.fused.launch import EXTRAS
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
from overlap_inductor.transports.call_arguments import call_arguments

COPY_WORDS = 8192
"""int32 words that a pushing block stores at once."""


WEIGHT = ("b{}_desc", "c{}_desc", "c{}", "bias{}")
"""The kernels' parameters for weight number ``{}``: its descriptor, the descriptor of its result, the result, the
bias."""
VARYING = ("own_desc", "a", *(name.format(i) for i in range(MOST_WEIGHTS) for name in WEIGHT), *EXTRAS)
"""The kernels' parameters that differ from launch to launch, in the order of ``operands``."""


def operands(
    a: torch.Tensor,
    own: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    tail: Tail,
) -> list[torch.Tensor | None]:
    """The operands of a launch, in the order of ``VARYING``. ``a``: what is sent. ``own``: the shard of it that this
    rank multiplies itself. For a weight without a bias, its result is passed as the bias, which the kernel then does
    not read."""
    found: list[torch.Tensor | None] = [own, a]
    for b, result, bias in zip(rhs, results, biases, strict=True):
        found += [b, result, result, result if bias is None else bias]
    return [*found, *[None] * (len(WEIGHT) * (MOST_WEIGHTS - len(rhs))), *tail.operands]


def prepare_gather(
    pattern: str,
    a: torch.Tensor,
    own: torch.Tensor,
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
    """Prepare the kernel that is launched with ``operands``. These are fp16 or bf16: ``own [rows, K]``, and for each
    weight ``b [K, N]``, ``result [world_size * rows, N]`` and ``bias [N]``.

    Args:
        pattern: one of ``parameters.GATHERS``.
        a: ``own`` itself in an all-gather. In an all-to-all ``[world_size * rows, K]``, a shard for each rank.
        keep: the call does not end with the kernel.
        copied: a transport of ``copiers`` sends the shard.
        slices: number of slices along K in which the kernel's own blocks push the shard.

    Raises:
        UnsupportedError: the kernel does not support its operands, or the slot is too small.
    """
    world_size = launch.world_size
    rows, inner = own.shape
    # (Copies send a shard as one band: an additional copy costs more than waiting for the whole shard.)
    part_rows = -(-rows // p.block_m) * p.block_m if copied else band_rows(rows, world_size, p)
    transposed = {lies_transposed(b) for b in rhs}
    if len(transposed) > 1 or not 1 <= len(rhs) <= MOST_WEIGHTS:
        raise UnsupportedError(
            f"one launch multiplies by 1 to {MOST_WEIGHTS} weights of one layout, not by those of strides"
            f" {[list(b.stride()) for b in rhs]}"
        )
    tail.check(results)
    varying: dict[str, Any] = dict(zip(VARYING, operands(a, own, rhs, results, biases, tail), strict=True))
    varying["own_desc"] = TensorDescriptor.from_tensor(own, [p.block_m, p.block_k])
    for i, (b, result, bias) in enumerate(zip(rhs, results, biases, strict=True)):
        check(own, b, bias, needed(pattern, world_size, rows, inner, b.shape[1], a.element_size(), p), launch)
        varying[f"b{i}_desc"] = right_descriptor(b, p.block_n, p.block_k)[0]
        varying[f"c{i}_desc"] = TensorDescriptor.from_tensor(
            result, [p.block_m, p.block_n // 2 if p.halves else p.block_n]
        )
    fixed: dict[str, Any] = {
        **{f"columns{i}": rhs[i].shape[1] if i < len(rhs) else None for i in range(MOST_WEIGHTS)},
        "gathered_desc": TensorDescriptor.from_tensor(gathered(own, launch), [p.block_m, p.block_k]),
        "rows": rows,
        "inner": inner,
        "part_rows": part_rows,
        "COUNT": len(rhs),
        "PARTS": -(-rows // part_rows),
        "PIECES": p.pieces,
        "BLOCK_M": p.block_m,
        "BLOCK_N": p.block_n,
        "BLOCK_K": p.block_k,
        "GROUP_M": p.group_m,
        "THREADS": 32 * p.warps,
        "HALVES": p.halves,
        "TRANSPOSED": transposed.pop(),
        "BIASES": sum(1 << i for i, bias in enumerate(biases) if bias is not None),
        "EPILOGUE": tail.function,
        "KEEP": keep,
        "SCATTERED": pattern == "all_to_all_matmul",
    }
    row_bytes = inner * a.element_size()
    if slices > 1:
        kernel: Any = all_gather_matmul_slices
        fixed |= _slices(inner, row_bytes, a.element_size(), slices, p)
    else:
        kernel = all_gather_matmul
        fixed |= {
            "shard_vectors": own.nbytes // 16,
            "part_vectors": part_rows * row_bytes // 16,
            "SENDS": not copied,
            "PUSHERS": p.pushers,
            "BLOCK": COPY_WORDS,
            "BATCH": TILES_A_BATCH,
        }
    fixed |= call_arguments(kernel, launch)
    return PreparedKernel(kernel, p.blocks, varying, fixed, num_warps=p.warps, num_stages=p.stages)


def _slices(inner: int, row_bytes: int, itemsize: int, slices: int, p: FusedParameters) -> dict[str, int]:
    """The arguments of the kernel that pushes a shard in slices along K, where they differ from those of
    ``all_gather_matmul``."""
    if not p.slices_pushers:
        raise UnsupportedError(
            "the first blocks of a gather in slices push its shard: slices_pushers must be at least 1"
        )
    size = -(-inner // (slices * p.block_k)) * p.block_k
    columns_at_once = min(triton.next_power_of_2(-(-size * itemsize // 4)), COPY_WORDS // 8)
    return {
        "row_vectors": row_bytes // 16,
        "slice_inner": size,
        "slice_vectors": size * itemsize // 16,
        "SLICES": -(-inner // size),
        "PUSHERS": p.slices_pushers,
        "ROWS": COPY_WORDS // columns_at_once,
        "COLUMNS": columns_at_once,
    }


def gathered(own: torch.Tensor, launch: Launch) -> torch.Tensor:
    """The workspace of a call whose own shard is ``own [rows, K]``, as ``[world_size * rows, K]``. It holds the whole
    gathered tensor only from a call with ``keep`` until ``end``."""
    rows, inner = own.shape
    return (
        launch.slot.data.local[: launch.world_size * own.nbytes].view(own.dtype).view(launch.world_size * rows, inner)
    )


def own_shard(pattern: str, a: torch.Tensor, launch: Launch) -> torch.Tensor:
    """The shard ``[rows, K]`` of ``a`` that this rank multiplies itself (a view). ``a``: what is sent. Raises
    ``UnsupportedError`` if the shards of an all-to-all are not equal."""
    if pattern != "all_to_all_matmul":
        return a
    if len(a) % launch.world_size:
        raise UnsupportedError(f"{len(a)} rows cannot be cut into {launch.world_size} equal slices")
    rows = len(a) // launch.world_size
    return a[launch.rank * rows : (launch.rank + 1) * rows]
