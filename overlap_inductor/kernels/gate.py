# SPDX-License-Identifier: Apache-2.0
"""``silu(x) * y`` in one kernel, for the gated experts of most models.

The kernel rounds ``silu(x)`` to the dtype of ``x`` before it multiplies, as two ops do. It communicates with no other
rank, and a CUDA graph may hold it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_times(x, y, out, ends, width, experts, BLOCK: tl.constexpr):
    """``out = silu(x) * y``, all ``[rows, width]`` and contiguous. ``ends[experts - 1]``, int32 on the device, is the
    number of rows. Grid: any number of blocks."""
    count = tl.load(ends + experts - 1).to(tl.int64) * width
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        gate = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        gate = (gate / (1 + tl.exp(-gate))).to(x.dtype.element_ty)
        result = gate.to(tl.float32) * tl.load(y + at, mask=inside, other=0).to(tl.float32)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
