# SPDX-License-Identifier: Apache-2.0
"""Check the operands of a call of schedule ``chunked``, before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.runtime.workspace import Launch


def check(
    a: torch.Tensor,
    matmuls: Sequence[VendorMatmul],
    pattern: str,
    rows: int,
    launch: Launch,
    parameters: ChunkedParameters,
) -> None:
    """Raise ``UnsupportedError`` if the schedule does not support a dtype or size of a call, or if ``launch.slot`` is
    too small. The slot is the call's part of the workspace. ``a``: the left operand, or what is sent. ``rows``: the
    number of rows of a shard."""
    check_matmuls(a, matmuls)
    sent = a.dtype if pattern in chunked_plan.GATHERS else matmuls[0].dtype(a)
    sizes = rows, a.shape[1], matmuls[0].columns, sent.itemsize
    launch.check_room(*chunked_plan.needed(pattern, launch.world_size, *sizes, parameters))


def check_sent(sent: torch.Tensor) -> None:
    """Raise ``UnsupportedError`` if no transport can read ``sent`` in place."""
    if not sent.is_contiguous() or sent.data_ptr() % 16:
        raise UnsupportedError(
            f"what is sent has shape {list(sent.shape)} and strides {list(sent.stride())}; expected it contiguous and"
            " aligned to 16 bytes"
        )


def slice_size(size: int, what: str, ranks: int) -> int:
    """The size of each rank's slice of ``size`` rows or columns (``what``). Raises ``UnsupportedError`` if the slices
    are not equal."""
    if size % ranks:
        raise UnsupportedError(f"{size} {what} cannot be cut into {ranks} equal slices")
    return size // ranks


def check_matmuls(a: torch.Tensor, matmuls: Sequence[VendorMatmul]) -> None:
    """Raise ``UnsupportedError`` if the schedule does not support a dtype or size. ``a``: the left operand."""
    for matmul in matmuls:
        b = matmul.b
        reason = chunked_plan.why_not(a.dtype, a.shape[1], matmul.columns, matmul.scales is not None)
        if reason is not None or b.shape[0] != a.shape[1] or matmul.scales is None and b.dtype != a.dtype:
            raise UnsupportedError(
                reason
                or f"the right operand is {b.dtype}{list(b.shape)}; expected {a.shape[1]} rows"
                f"{' of ' + str(a.dtype) if matmul.scales is None else ''}"
            )
        for left, right in matmul.added:
            reason = chunked_plan.why_not(left.dtype, left.shape[1], right.shape[1])
            if (
                reason is not None
                or matmul.scales is not None
                or left.dtype != a.dtype
                or right.dtype != a.dtype
                or (len(left), *right.shape) != (len(a), left.shape[1], b.shape[1])
            ):
                what = f"{left.dtype}{list(left.shape)} @ {right.dtype}{list(right.shape)}"
                raise UnsupportedError(
                    reason
                    or f"{what} is added to {a.dtype}{list(a.shape)} @ {b.dtype}{list(b.shape)}; expected products of"
                    " one dtype and shape, without scales"
                )
