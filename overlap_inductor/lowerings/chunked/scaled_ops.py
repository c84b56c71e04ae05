# SPDX-License-Identifier: Apache-2.0
"""The ops of schedule ``chunked`` for fp8 (``_scaled_mm``). They are like the ops of ``one_op.ops``, except for these
arguments:

* Shapes (W ranks, this rank's view): ``shard [m, K]``, ``lhs [W*m, K]`` (in an all-reduce any number of rows), ``rhs
  [K, N]`` column-major, all fp8.
* Scales, fp32: one element each, or ``scale_a [rows, 1]`` and ``scale_b [1, N]``. ``rows`` is the number of rows of
  ``lhs`` or of the gathered tensor.
* ``dtypes``: names of the results' dtypes (torch 2.11 passes a list of dtypes to an op as numbers).
* ``fast``: as ``use_fast_accum`` of ``_scaled_mm``.

A gather sends fp8, a reduction sends the result's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.one_op.operands import left_operand
from overlap_inductor.lowerings.one_op.ops import Optional
from overlap_inductor.lowerings.one_op.ops import Tensors
from overlap_inductor.lowerings.one_op.ops import ready
from overlap_inductor.lowerings.one_op.vendor_matmul import Scales
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.torch_compat.distributed import resolve_group


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _scales(a: torch.Tensor, b: torch.Tensor, dtype: str, fast: bool) -> Scales:
    """The scales in the form that ``_scaled_mm`` takes. ``_scaled_mm`` checks the strides of row-wise scales, but
    Inductor may choose any stride for a dim of size 1. So the scales get new strides here."""
    if a.numel() > 1:
        a, b = a.flatten().contiguous().unsqueeze(1), b.flatten().contiguous().unsqueeze(0)
    return Scales(a, b, _dtype(dtype), fast)


def _whole(matmul: VendorMatmul, a: torch.Tensor) -> torch.Tensor:
    """The plain matmul of all rows: ``a [M, K]``, returns ``[M, N]``."""
    out = a.new_empty(a.shape[0], matmul.b.shape[1], dtype=matmul.dtype(a))
    if len(a):
        matmul(a, 0, len(a), out)
    return out


def _scaled_all_gather_matmul(
    chain: torch.Tensor,
    shard: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    biases: Optional,
    scales_a: Sequence[torch.Tensor],
    scales_b: Sequence[torch.Tensor],
    dtypes: Sequence[str],
    fast: Sequence[bool],
    gathered_used: bool,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[Tensors, torch.Tensor]:
    group, token = resolve_group(group_name), chain.new_empty(1)
    matmuls = list(map(VendorMatmul, rhs, biases, map(_scales, scales_a, scales_b, dtypes, fast)))
    found = ready(chunked_plan, "all_gather_matmul", shard.shape[0], shard, rhs[0], shard.dtype, group, site, settings)
    if found is None:
        gathered = shard.new_empty(group.size() * shard.shape[0], shard.shape[1])
        # The shards are gathered as bytes, because not every backend supports fp8.
        dist.all_gather_into_tensor(gathered.view(torch.uint8), shard.contiguous().view(torch.uint8), group=group)
        return [*(_whole(m, gathered) for m in matmuls), *([gathered] if gathered_used else [])], token
    from overlap_inductor.lowerings.chunked import gather_launch

    with call_order(shard.device):
        return gather_launch.all_gather_matmul(left_operand(shard), matmuls, *found, gathered_used), token


def _scaled_all_gather_matmul_fake(
    chain: torch.Tensor,
    shard: torch.Tensor,
    rhs: Tensors,
    biases: object,
    scales_a: object,
    scales_b: object,
    dtypes: Sequence[str],
    fast: object,
    gathered_used: bool,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[Tensors, torch.Tensor]:
    rows = resolve_group(group_name).size() * shard.shape[0]
    outs = [shard.new_empty(rows, b.shape[1], dtype=_dtype(dtype)) for b, dtype in zip(rhs, dtypes, strict=True)]
    return [*outs, *([shard.new_empty(rows, shard.shape[1])] if gathered_used else [])], chain.new_empty(1)


define(
    "chunked_scaled_all_gather_matmul(Tensor chain, Tensor shard, Tensor[] rhs, Tensor?[] biases, Tensor[] scales_a,"
    " Tensor[] scales_b, str[] dtypes, bool[] fast, bool gathered_used, str settings, str group_name, str site) ->"
    " (Tensor[], Tensor)",
    _scaled_all_gather_matmul,
    _scaled_all_gather_matmul_fake,
)


def _define_reduction(pattern: str) -> None:
    def implementation(
        chain: torch.Tensor,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        bias: torch.Tensor | None,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        dtype: str,
        fast: bool,
        settings: str,
        reduce_op: str,
        group_name: str,
        site: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group, token = resolve_group(group_name), chain.new_empty(1)
        matmul = VendorMatmul(rhs, bias, _scales(scale_a, scale_b, dtype, fast))
        found = ready(
            chunked_plan, pattern, -(-lhs.shape[0] // group.size()), lhs, rhs, _dtype(dtype), group, site, settings
        )
        if found is None:
            return reference.reduced(pattern, _whole(matmul, lhs), reduce_op, group), token
        from overlap_inductor.lowerings.chunked import reduce_launch

        with call_order(lhs.device):
            return getattr(reduce_launch, pattern)(lhs, matmul, *found, reduce_op == "avg"), token

    def fake(
        chain: torch.Tensor,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        bias: object,
        scale_a: object,
        scale_b: object,
        dtype: str,
        fast: bool,
        settings: str,
        reduce_op: str,
        group_name: str,
        site: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = lhs.shape[0] if pattern == "matmul_all_reduce" else lhs.shape[0] // resolve_group(group_name).size()
        return lhs.new_empty(rows, rhs.shape[1], dtype=_dtype(dtype)), chain.new_empty(1)

    schema = (
        "(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, Tensor scale_a, Tensor scale_b, str dtype, bool fast, str"
        " settings, str reduce_op, str group_name, str site) -> (Tensor, Tensor)"
    )
    define(f"chunked_scaled_{pattern}{schema}", implementation, fake)


_define_reduction("matmul_reduce_scatter")
_define_reduction("matmul_all_reduce")
