# SPDX-License-Identifier: Apache-2.0
"""Launches ``all_to_all(a) @ b`` for schedule ``fused``, if the matmul contracts the exchanged dim
(``kernels.all_to_all_contraction``)."""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.all_to_all_contraction import all_to_all_contraction
from overlap_inductor.lowerings.fused.gather import COPY_WORDS
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.parameters import band_rows
from overlap_inductor.lowerings.fused.parameters import needed
from overlap_inductor.lowerings.fused.received import Kernel
from overlap_inductor.lowerings.fused.received import Received
from overlap_inductor.lowerings.fused.received import gathered
from overlap_inductor.lowerings.fused.received import multiply
from overlap_inductor.lowerings.fused.received import own_shard
from overlap_inductor.lowerings.one_op.descriptors import TILES_A_BATCH
from overlap_inductor.lowerings.one_op.descriptors import right_descriptor
from overlap_inductor.lowerings.one_op.operands import check_operands
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.memory import rows_like
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.call_arguments import call_arguments

PATTERN = "all_to_all_matmul"


def contracted_all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    launch: Launch,
    parameters: FusedParameters,
    bias: torch.Tensor | None = None,
    keep: bool = False,
) -> torch.Tensor:
    """``bias`` plus the sum of ``received[s] @ b[s]`` over all source ranks ``s``, where ``received = all_to_all(a)``.
    ``received[s]`` is the shard from rank ``s``, and ``b[s]`` the rows of ``b`` for this shard.

    Args:
        a: ``[world_size * rows, k]``, a shard for each rank, fp16 or bf16, contiguous and aligned to 16 bytes.
        b: ``[world_size * k, N]``, with the rows in the ranks' order. ``b`` is row-major with rows of whole 16-byte
            words, or column-major with such columns.
        bias: ``[N]``.
        keep: the received rows can still be read after the kernel. Peers may not overwrite them until ``calls.end``
            runs (``received.Received``).

    Returns:
        ``[rows, N]``, summed in fp32 and rounded once.

    Raises:
        UnsupportedError, TransferError: as ``calls.all_gather_matmuls``.
    """
    launch.faults.check()
    own = own_shard(PATTERN, a, launch)
    out = rows_like(a, own.shape[0], b.shape[1], a.dtype)
    multiply(Received("contraction", a, own, [b], [bias], [out], keep, banded=True), launch, parameters, _prepare)
    return out


def _prepare(call: Received, launch: Launch, p: FusedParameters) -> Kernel:
    a, own, (b,), (bias,), (out,) = call.a, call.own, call.rhs, call.biases, call.results
    world_size, (rows, inner), columns = launch.world_size, own.shape, b.shape[1]
    whole = own.new_empty(0, world_size * inner)
    if inner % p.block_k or len(b) != world_size * inner:
        raise UnsupportedError(
            f"{len(b)} rows of the right operand are contracted with {world_size} slices of {inner} columns; expected"
            f" {world_size * inner} rows, and slices of a multiple of {p.block_k} columns"
        )
    check_operands(whole, b, bias)
    launch.check_room(*needed(PATTERN, world_size, rows, inner, columns, a.element_size(), p))
    part_rows = band_rows(rows, world_size, p)
    right, transposed = right_descriptor(b, p.block_n, p.block_k)
    block = [p.block_m, p.block_k]
    varying = {
        "own_desc": TensorDescriptor.from_tensor(own, block),
        "a": a,
        "b_desc": right,
        "c_desc": TensorDescriptor.from_tensor(out, [p.block_m, p.block_n // 2 if p.halves else p.block_n]),
        "c": out,
        "bias": out if bias is None else bias,
    }
    fixed: dict[str, Any] = {
        **call_arguments(all_to_all_contraction, launch),
        "gathered_desc": TensorDescriptor.from_tensor(gathered(own, launch), block),
        "rows": rows,
        "inner": inner,
        "columns": columns,
        "shard_vectors": own.nbytes // 16,
        "part_rows": part_rows,
        "part_vectors": part_rows * inner * a.element_size() // 16,
        "PARTS": -(-rows // part_rows),
        "SENDS": not call.copied(p),
        "PIECES": p.pieces,
        "PUSHERS": p.pushers,
        "BLOCK_M": p.block_m,
        "BLOCK_N": p.block_n,
        "BLOCK_K": p.block_k,
        "GROUP_M": p.group_m,
        "BLOCK": COPY_WORDS,
        "BATCH": TILES_A_BATCH,
        "THREADS": 32 * p.warps,
        "HALVES": p.halves,
        "TRANSPOSED": transposed,
        "BIAS": bias is not None,
        "KEEP": call.keep,
    }
    kernel = PreparedKernel(all_to_all_contraction, p.blocks, varying, fixed, num_warps=p.warps, num_stages=p.stages)
    return lambda call: kernel(*call.operands)
