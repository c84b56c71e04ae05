# SPDX-License-Identifier: Apache-2.0
"""Sketches of tensors: few numbers from which two ranks can tell whether their copies differ by more than rounding.

Ranks may add the same terms in another order. Their copies of a gradient then differ in the last bits, and so their
digests differ.

The elements of a tensor are cut into at most ``BLOCKS`` blocks. The sketch of a block has ``SIGNS`` sums of the
block's elements, each with other random signs. All ranks draw the same signs. The difference of two sketches is the
sketch of the difference. The mean of its squares estimates the squared L2 norm of the difference (Alon, Matias,
Szegedy, "The space complexity of approximating the frequency moments", STOC 1996, section 2.2). Each block is a
matrix. The sign of an element is the product of a sign of its row and a sign of its column, so few signs are drawn::

    block [rows, WIDTH]  ->  sum over rows of row_signs [rows, SIGNS] * (block @ column_signs [WIDTH, SIGNS])
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

BLOCKS = 1024
SIGNS = 8
WIDTH = 64
"""Columns of a block. A block that is not full is filled with zeros."""
_SEED = 20240229


def sketch(tensor: torch.Tensor) -> dict[str, Any] | None:
    """The sketch of a floating-point tensor of 2, 4 or 8 bytes an element, ready for JSON. ``None`` for other and
    for empty tensors, and for a tensor that holds a NaN, an infinity, or numbers whose squares are infinite in
    fp64.

    Returns:
        ``sums``: ``SIGNS`` numbers for each block; ``norms``: the L2 norm of each block.
    """
    if not tensor.is_floating_point() or tensor.element_size() < 2 or not tensor.numel():
        return None
    elements = tensor.detach().reshape(-1)
    rows = math.ceil(elements.numel() / (BLOCKS * WIDTH))
    generator = torch.Generator().manual_seed(_SEED)
    column_signs, row_signs = (_signs(count, generator).to(elements.device) for count in (WIDTH, rows))
    sums, norms = [], []
    for part in elements.split(rows * WIDTH):
        block = torch.zeros(rows, WIDTH, dtype=torch.float64, device=elements.device)
        block.view(-1)[: part.numel()] = part
        sums.append((row_signs * (block @ column_signs)).sum(0))
        norms.append(block.norm())
    found = {"sums": torch.stack(sums).tolist(), "norms": torch.stack(norms).tolist()}
    return found if all(map(math.isfinite, found["norms"])) else None


def _signs(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (count, SIGNS), generator=generator).double() * 2 - 1


def rounding_of(dtype: torch.dtype) -> float:
    """The largest ratio of the norm of a block's difference to the norm of the block that counts as rounding. Sums
    of 16-bit values are added in 32 bits and rounded once, which changes each element by at most half of this.
    Sums of wider values are rounded at each term."""
    return torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 64)


def differ_by_rounding(a: dict[str, Any] | None, b: dict[str, Any] | None, dtype: torch.dtype) -> bool:
    """Whether two tensors of one shape and ``dtype`` differ by no more than rounding, by their sketches. False if one
    of them has no sketch."""
    if a is None or b is None or len(a["norms"]) != len(b["norms"]):
        return False
    # If large terms of a gradient cancel in a block, their rounding is large relative to the block's own norm. So a
    # small block may differ by the rounding of the median block.
    median = statistics.median(a["norms"])
    return all(
        math.hypot(*(x - y for x, y in zip(sums, others, strict=True))) / math.sqrt(SIGNS)
        <= rounding_of(dtype) * max(norm, median)
        for sums, others, norm in zip(a["sums"], b["sums"], a["norms"], strict=True)
    )
