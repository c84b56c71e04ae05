# SPDX-License-Identifier: Apache-2.0
"""Prepares the kernels of schedule ``fused`` that multiply rows as they arrive from an all-gather or an all-to-all."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.all_gather_matmul import all_gather_matmul
from overlap_inductor.kernels.all_gather_matmul_slices import all_gather_matmul_slices
from overlap_inductor.lowerings.fused.launch import EXTRAS
from overlap_inductor.lowerings.fused.launch import check
from overlap_inductor.lowerings.fused.parameters import MOST_WEIGHTS
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.parameters import band_rows
from overlap_inductor.lowerings.fused.parameters import needed
from overlap_inductor.lowerings.fused.parameters import slices_of
from overlap_inductor.lowerings.fused.received import Kernel
from overlap_inductor.lowerings.fused.received import Received
from overlap_inductor.lowerings.fused.received import gathered
from overlap_inductor.lowerings.one_op.descriptors import TILES_A_BATCH
from overlap_inductor.lowerings.one_op.descriptors import right_descriptor
from overlap_inductor.lowerings.one_op.operands import lies_transposed
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.call_arguments import call_arguments

COPY_WORDS = 8192
"""int32 words that a block pushes at once. To *push* is to store a piece of this rank's shard into a peer's
workspace."""


WEIGHT = ("b{}_desc", "c{}_desc", "c{}", "bias{}")
"""The kernels' parameters for weight number ``{}``."""
VARYING = ("own_desc", "a", *(name.format(i) for i in range(MOST_WEIGHTS) for name in WEIGHT), *EXTRAS)
"""The kernels' parameters that differ from launch to launch."""


def _operands(call: Received) -> list[torch.Tensor | None]:
    """The operands of a launch, in the order of ``VARYING``."""
    return [*call.operands, *[None] * (len(WEIGHT) * (MOST_WEIGHTS - len(call.rhs))), *call.tail.operands]


def prepare_gather(call: Received, launch: Launch, p: FusedParameters) -> Kernel:
    """Prepare the kernel of a call of a pattern in ``parameters.GATHERS``. Each weight is ``[K, N]``, and its result
    ``[world_size * rows, N]``.

    Raises:
        UnsupportedError: the kernel does not support the call's operands, or ``launch.slot`` is too small.
    """
    a, own, rhs, world_size = call.a, call.own, call.rhs, launch.world_size
    rows, inner = own.shape
    copied, slices = call.copied(p), slices_of(world_size, own, rhs, p)
    # If a transport copies the rows (``copied``), a shard is one band. A copy for each band would cost more time than
    # it saves.
    part_rows = -(-rows // p.block_m) * p.block_m if copied else band_rows(rows, world_size, p)
    transposed = {lies_transposed(b) for b in rhs}
    if len(transposed) > 1 or not 1 <= len(rhs) <= MOST_WEIGHTS:
        raise UnsupportedError(
            f"one launch multiplies by 1 to {MOST_WEIGHTS} weights of one layout, not by weights with strides"
            f" {[list(b.stride()) for b in rhs]}"
        )
    call.tail.check(call.results)
    varying: dict[str, Any] = dict(zip(VARYING, _operands(call), strict=True))
    varying["own_desc"] = TensorDescriptor.from_tensor(own, [p.block_m, p.block_k])
    for i, (b, result, bias) in enumerate(zip(rhs, call.results, call.biases, strict=True)):
        check(own, b, bias, needed(call.name, world_size, rows, inner, b.shape[1], a.element_size(), p), launch)
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
        "BIASES": sum(1 << i for i, bias in enumerate(call.biases) if bias is not None),
        "EPILOGUE": call.tail.function,
        "KEEP": call.keep,
        "SCATTERED": call.name == "all_to_all_matmul",
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
    prepared = PreparedKernel(kernel, p.blocks, varying, fixed, num_warps=p.warps, num_stages=p.stages)
    return lambda call: prepared(*_operands(call))


def _slices(inner: int, row_bytes: int, itemsize: int, slices: int, p: FusedParameters) -> dict[str, int]:
    """The arguments of ``all_gather_matmul_slices`` for the push of a shard in slices along K."""
    if not p.slices_pushers:
        raise UnsupportedError(
            "slices_pushers must be at least 1: no other blocks push a shard that is pushed in slices"
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
