# SPDX-License-Identifier: Apache-2.0
"""The ops of schedule ``chunked`` for a sum of matmuls that is reduced once, as in the backward of q, k and v.
Except that they take several matmuls, they are like the ops of ``one_op.ops``.

Operands on one of W ranks, fp16 or bf16: each ``lhs [W*m, K_i]`` (in an all-reduce, with any number of rows) and each
``rhs [K_i, N]``. The bias belongs to the first product. For each chunk, every matmul but the first adds its product to
the sum so far, which is already rounded. Inductor's ``addmm`` rounds at the same points.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.one_op.ops import ready
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.torch_compat.distributed import resolve_group


def _define_reduction(pattern: str) -> None:
    def implementation(
        chain: torch.Tensor,
        lhs: Sequence[torch.Tensor],
        rhs: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        settings: str,
        reduce_op: str,
        group_name: str,
        site: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group, token = resolve_group(group_name), chain.new_empty(1)
        a, b = lhs[0], rhs[0]
        found = ready(chunked_plan, pattern, -(-a.shape[0] // group.size()), a, b, a.dtype, group, site, settings)
        if found is None:
            return getattr(reference, pattern)(lhs, rhs, [bias, *[None] * (len(rhs) - 1)], reduce_op, group), token
        from overlap_inductor.lowerings.chunked import reduce_launch

        matmul = VendorMatmul(b, bias, added=tuple(zip(lhs[1:], rhs[1:], strict=True)))
        with call_order(a.device):
            return getattr(reduce_launch, pattern)(a, matmul, *found, reduce_op == "avg"), token

    def fake(
        chain: torch.Tensor,
        lhs: Sequence[torch.Tensor],
        rhs: Sequence[torch.Tensor],
        bias: object,
        settings: str,
        reduce_op: str,
        group_name: str,
        site: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (
            lhs[0].shape[0] if pattern == "matmul_all_reduce" else lhs[0].shape[0] // resolve_group(group_name).size()
        )
        return lhs[0].new_empty(rows, rhs[0].shape[1]), chain.new_empty(1)

    schema = (
        "(Tensor chain, Tensor[] lhs, Tensor[] rhs, Tensor? bias, str settings, str reduce_op, str group_name, str"
        " site) -> (Tensor, Tensor)"
    )
    define(f"chunked_sum_{pattern}{schema}", implementation, fake)


_define_reduction("matmul_reduce_scatter")
_define_reduction("matmul_all_reduce")
