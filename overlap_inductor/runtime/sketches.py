# SPDX-License-Identifier: Apache-2.0
"""Sketches of tensors: few numbers from which two ranks can tell whether their copies differ by more than rounding.

Ranks may add the same terms in another order. Their copies of a gradient then differ in the last bits. Such copies are
equal for every use of the model, but their digests differ.

The rows of a tensor are cut into at most ``BLOCKS`` blocks of consecutive rows. The sketch of a block has ``SIGNS``
sums of the block's elements, each with other random signs. All ranks draw the same signs. The difference of two
sketches is the sketch of the difference. The mean of its squares estimates the squared L2 norm of the difference (Alon,
Matias, Szegedy, "The space complexity of approximating the frequency moments", STOC 1996, section 2.2)::

    block [rows, width]  ->  row_signs^T [SIGNS, rows] * (block @ column_signs [width, SIGNS])  ->  SIGNS sums
"""

from __future__ import annotations

import math
from typing import Any

import torch

BLOCKS = 256
SIGNS = 16
_SEED = 20240229


def sketch(tensor: torch.Tensor) -> dict[str, Any] | None:
    """The sketch of a floating-point tensor of 2, 4 or 8 bytes an element, ready for JSON. ``None`` for other tensors.

    Returns:
        ``sums``: ``SIGNS`` numbers for each block; ``norms``: the L2 norm of each block.
    """
    if not tensor.is_floating_point() or tensor.element_size() < 2 or not tensor.numel():
        return None
    tensor = tensor.detach()
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
    size = math.ceil(rows.shape[0] / BLOCKS)
    generator = torch.Generator().manual_seed(_SEED)
    column_signs = _signs(rows.shape[1], generator).to(rows.device)
    row_signs = _signs(size, generator).to(rows.device)
    sums, norms = [], []
    for block in rows.split(size):
        exact = block.double()
        sums.append((row_signs[: len(block)] * (exact @ column_signs)).sum(0))
        norms.append(exact.norm())
    return {"sums": torch.stack(sums).tolist(), "norms": torch.stack(norms).tolist()}


def _signs(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (count, SIGNS), generator=generator).double() * 2 - 1


def rounding_of(dtype: torch.dtype) -> float:
    """The difference of a block, relative to its norm, that counts as rounding. Sums of 16-bit values are added
    in 32 bits and rounded once, so copies differ by at most some last bits. Sums of wider values are rounded at each
    term."""
    return torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 64)


def differ_by_rounding(a: dict[str, Any] | None, b: dict[str, Any] | None, dtype: torch.dtype) -> bool:
    """Whether two tensors of one shape and ``dtype`` differ by no more than rounding, by their sketches. False if one
    has no sketch, or holds a NaN or an infinity."""
    if a is None or b is None or len(a["norms"]) != len(b["norms"]):
        return False
    # Large terms may cancel in a small block, so no block counts as smaller than the mean block.
    mean = math.sqrt(sum(norm**2 for norm in a["norms"]) / len(a["norms"]))
    for sums, others, norm in zip(a["sums"], b["sums"], a["norms"], strict=True):
        squared = sum((x - y) ** 2 for x, y in zip(sums, others, strict=True)) / SIGNS
        if not squared <= (rounding_of(dtype) * max(norm, mean)) ** 2:
            return False
    return True
