# SPDX-License-Identifier: Apache-2.0
"""The op of schedule ``chunked`` for an all-to-all before matmuls that contract the exchanged dim. Otherwise it is like
those of ``one_op.exchange_ops``.

Shapes (W ranks, this rank's view): ``sent [W*m, k]`` has a slice of rows for each rank, ``rhs [W*k, N]``. The operand
``[m, W*k]`` has the received slices side by side, in the order of ranks. The op returns ``([operand @ rhs + bias
[m, N] of each matmul ...], token)``. If ``operand_used``, the operand follows the results in the list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.one_op.operands import left_operand
from overlap_inductor.lowerings.one_op.ops import Optional
from overlap_inductor.lowerings.one_op.ops import Tensors
from overlap_inductor.lowerings.one_op.ops import ready
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.memory import token_like


def _implementation(
    chain: torch.Tensor,
    sent: torch.Tensor,
    rhs: Tensors,
    biases: Optional,
    operand_used: bool,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[Tensors, torch.Tensor]:
    group, token = resolve_group(group_name), token_like(chain)
    ranks, width = group.size(), sent.shape[1]
    rows = -(-sent.shape[0] // ranks)
    # (What a call needs depends on one slice, and so on the right operand's rows for one slice.)
    found = ready(chunked_plan, "all_to_all_matmul", rows, sent, rhs[0][:width], sent.dtype, group, site, settings)
    if found is None:
        received = reference.exchanged(sent, False, group)
        operand = received.view(ranks, rows, width).transpose(0, 1).reshape(rows, ranks * width)
        outs = [reference.product(operand, b, bias) for b, bias in zip(rhs, biases, strict=True)]
        return [*outs, operand] if operand_used else outs, token
    from overlap_inductor.lowerings.chunked.joined_launch import all_to_all_joined_matmul

    with call_order(sent.device):
        matmuls = list(map(VendorMatmul, rhs, biases))
        return all_to_all_joined_matmul(left_operand(sent), matmuls, *found, operand_used), token


def _fake(
    chain: torch.Tensor,
    sent: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    biases: object,
    operand_used: bool,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[Tensors, torch.Tensor]:
    ranks, (all_rows, width) = resolve_group(group_name).size(), sent.shape
    columns = [b.shape[1] for b in rhs] + ([ranks * width] if operand_used else [])
    return [sent.new_empty(all_rows // ranks, n) for n in columns], chain.new_empty(1)


define(
    "chunked_joined_all_to_all_matmul(Tensor chain, Tensor sent, Tensor[] rhs, Tensor?[] biases, bool operand_used, str"
    " settings, str group_name, str site) -> (Tensor[], Tensor)",
    _implementation,
    _fake,
)
