"""The ops of schedule ``fused``: one functional op a site, one persistent kernel an op. Further matmuls of a gathered tensor are the vendor's, on the
workspace. Operands that no kernel reads as they lie are copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.lowerings import fused_plan
from overlap_inductor.lowerings.fused_plan import FusedParameters
from overlap_inductor.lowerings.operands import bias_row
from overlap_inductor.lowerings.operands import left_operand
from overlap_inductor.lowerings.operands import right_operand
from overlap_inductor.lowerings.site_ops import Optional
from overlap_inductor.lowerings.site_ops import Tensors
from overlap_inductor.lowerings.site_ops import define_gather
from overlap_inductor.lowerings.site_ops import define_reductions
from overlap_inductor.transports.workspace import Launch


def _gather(
    shard: torch.Tensor, rhs: Sequence[torch.Tensor], biases: Optional, gathered_used: bool, launch: Launch, parameters: FusedParameters
) -> Tensors:
    from overlap_inductor.lowerings import fused

    shard = left_operand(shard)
    # The transfer hides under one of the matmuls: the largest.
    first = max(range(len(rhs)), key=lambda i: rhs[i].shape[1])
    keep = gathered_used or len(rhs) > 1
    out = fused.all_gather_matmul(shard, right_operand(rhs[first]), launch, parameters, bias_row(biases[first], rhs[first].shape[1]), keep)
    if not keep:
        return [out]
    try:
        gathered, outs = fused.gathered(shard, launch), []
        for i, (b, bias) in enumerate(zip(rhs, biases, strict=True)):
            outs.append(out if i == first else torch.mm(gathered, b) if bias is None else torch.addmm(bias, gathered, b))
        if gathered_used:
            outs.append(gathered.clone())
    finally:
        # Whatever happened: peers wait for leave to write into this workspace again.
        fused.end(launch)
    return outs


def _reduce(
    pattern: str, lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None, average: bool, launch: Launch, parameters: FusedParameters
) -> torch.Tensor:
    from overlap_inductor.lowerings import fused

    return getattr(fused, pattern)(left_operand(lhs), right_operand(rhs), launch, parameters, bias_row(bias, rhs.shape[1]), average)


define_gather("fused", fused_plan, _gather)
define_reductions("fused", fused_plan, _reduce)
