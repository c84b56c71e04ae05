# SPDX-License-Identifier: Apache-2.0
"""The op ``chunked_silu_times`` of experts' programs (``merged_program``)."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import torch

from overlap_inductor.lowerings.library import define
from overlap_inductor.torch_compat.symmetric import multiprocessors

if TYPE_CHECKING:
    from overlap_inductor.torch_compat.triton_launch import PreparedKernel

BLOCK, BLOCKS_AN_SM = 4096, 4
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_KERNELS: dict[Any, PreparedKernel] = {}


def _fits(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> bool:
    """Whether the kernel can compute the op. It needs contiguous operands that are aligned to 16 bytes."""
    alike = x.shape == y.shape and x.dtype == y.dtype and x.dim() == 2 and ends.dtype == torch.int32
    return x.dtype in DTYPES and alike and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, y, ends))


def _silu_times(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda or not x.numel() or not _fits(x, y, ends):
        return torch.nn.functional.silu(x) * y
    out = torch.empty_like(x)
    kernel(x, y, out, ends)(x, y, out, ends)
    return out


def kernel(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, ends: torch.Tensor) -> PreparedKernel:
    """The prepared kernel for tensors of these widths and dtypes."""
    key = x.dtype, x.shape[1], ends.shape[0], x.device
    found = _KERNELS.get(key)
    if found is None:
        from overlap_inductor.kernels.gate import silu_times
        from overlap_inductor.torch_compat.triton_launch import PreparedKernel

        fixed = {"width": x.shape[1], "experts": ends.shape[0], "BLOCK": BLOCK}
        varying = {"x": x, "y": y, "out": out, "ends": ends}
        blocks = multiprocessors(x.device) * BLOCKS_AN_SM
        found = _KERNELS[key] = PreparedKernel(silu_times, blocks, varying, fixed, num_warps=8)
    return found


def _fake(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


# ``silu(x) * y`` of rows ``[rows, width]``. ``ends``: where each expert's rows end; the last end is the number of rows.
define("chunked_silu_times(Tensor x, Tensor y, Tensor ends) -> Tensor", _silu_times, _fake)
