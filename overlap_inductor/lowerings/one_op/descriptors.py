# SPDX-License-Identifier: Apache-2.0
"""Make the tensor descriptors through which a Triton matmul reads its operands."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.lowerings.one_op.operands import lies_transposed

TILES_A_BATCH = 8
"""The number of tiles that a block computes in one batch. After a batch, a block waits until its last store
has left shared memory. Within a batch, the store of a tile runs under the matmul of the next tile."""


def right_descriptor(b: torch.Tensor, block_n: int, block_k: int) -> tuple[TensorDescriptor, bool]:
    """``(descriptor, whether it describes the transpose)`` for ``b [K, N]``. A block of the descriptor covers
    ``[block_k, block_n]`` elements of ``b``."""
    if lies_transposed(b):
        return TensorDescriptor.from_tensor(b.t(), [block_n, block_k]), True
    return TensorDescriptor.from_tensor(b, [block_k, block_n]), False
