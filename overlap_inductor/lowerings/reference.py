# SPDX-License-Identifier: Apache-2.0
"""Plain implementations of sites: the ordinary collective and the whole matmul, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``a [M, K] @ b [K, N] + bias`` by the vendor's matmul, written to ``out [M, N]`` if it is given."""
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def _sum_of_products(
    lhs: Sequence[torch.Tensor], rhs: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    total = product(lhs[0], rhs[0], biases[0])
    for a, b, bias in zip(lhs[1:], rhs[1:], biases[1:], strict=True):
        total = total + product(a, b, bias)
    return total


def _average(tensor: torch.Tensor, reduce_op: str, group: dist.ProcessGroup) -> torch.Tensor:
    # Divide the sum here, because gloo has no reduce op for averages.
    return tensor / group.size() if reduce_op == "avg" else tensor


def reduced(pattern: str, partial: torch.Tensor, reduce_op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of ``partial [M, N]`` over all ranks, or the average if ``reduce_op`` is ``avg``. If ``pattern`` is
    ``matmul_all_reduce``, returns all rows, and overwrites ``partial``. Otherwise returns this rank's rows ``[M / W,
    N]``."""
    if pattern == "matmul_all_reduce":
        dist.all_reduce(partial, group=group)
        return _average(partial, reduce_op, group)
    out = partial.new_empty(partial.shape[0] // group.size(), partial.shape[1])
    dist.reduce_scatter_tensor(out, partial, group=group)
    return _average(out, reduce_op, group)


def all_gather_matmul(
    shard: torch.Tensor, rhs: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """``(gathered [W*m, K], [gathered @ b + bias])`` for ``shard [m, K]`` and each ``b [K, N]``."""
    gathered = shard.new_empty(group.size() * shard.shape[0], *shard.shape[1:])
    dist.all_gather_into_tensor(gathered, shard.contiguous(), group=group)
    return gathered, [product(gathered, b, bias) for b, bias in zip(rhs, biases, strict=True)]


def gathered_output(own: torch.Tensor, columns: bool, group: dist.ProcessGroup) -> torch.Tensor:
    """``own [m, n]`` of all ranks, in the order of ranks: one below the other, or side by side if ``columns``."""
    gathered = own.new_empty(group.size() * own.shape[0], own.shape[1])
    dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
    return side_by_side(gathered, group.size()) if columns else gathered


def exchanged(whole: torch.Tensor, columns: bool, group: dist.ProcessGroup) -> torch.Tensor:
    """Send each rank a slice of the rows of ``whole``, or of its columns if ``columns``. Returns the arrived slices,
    one below the other, in the order of their senders."""
    (rows, width), ranks = whole.shape, group.size()
    by_rank = whole
    if columns:
        by_rank = whole.view(rows, ranks, width // ranks).transpose(0, 1).reshape(ranks * rows, width // ranks)
    received = torch.empty_like(by_rank, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, by_rank.contiguous(), group=group)
    return received


def side_by_side(received: torch.Tensor, ranks: int) -> torch.Tensor:
    """A new tensor ``[m, W*k]``: the slices of ``received [W*m, k]`` side by side."""
    rows, width = received.shape
    return torch.cat(received.view(ranks, rows // ranks, width).unbind(), dim=1)


def matmul_reduce_scatter(
    lhs: Sequence[torch.Tensor],
    rhs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    reduce_op: str,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """This rank's rows ``[M / W, N]`` of the sum or average over ranks of ``sum_i lhs_i [M, K_i] @ rhs_i [K_i, N] +
    bias_i``."""
    return reduced("matmul_reduce_scatter", _sum_of_products(lhs, rhs, biases), reduce_op, group)


def matmul_all_reduce(
    lhs: Sequence[torch.Tensor],
    rhs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    reduce_op: str,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """The sum or average ``[M, N]`` over ranks of ``sum_i lhs_i [M, K_i] @ rhs_i [K_i, N] + bias_i``."""
    return reduced("matmul_all_reduce", _sum_of_products(lhs, rhs, biases), reduce_op, group)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each row of ``x [M, N]``, as in Llama. The row is normalised in fp32, rounded to the dtype of ``x``,
    then multiplied by ``weight [N]``."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
