"""Tensor descriptors of the operands of a Triton matmul."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.lowerings.one_op.operands import lies_transposed

TILES_A_BATCH = 8
"""Tiles after which a block waits for its last store (within a batch a store goes on under the next tile's matmul)."""


def right_descriptor(b: torch.Tensor, block_n: int, block_k: int) -> tuple[TensorDescriptor, bool]:
    """``b``'s descriptor, and whether it is the transposed matrix that lies in rows."""
    if lies_transposed(b):
        return TensorDescriptor.from_tensor(b.t(), [block_n, block_k]), True
    return TensorDescriptor.from_tensor(b, [block_k, block_n]), False
