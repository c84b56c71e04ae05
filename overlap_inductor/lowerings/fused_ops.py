"""The ops of schedule ``fused``: one functional op a site, one persistent kernel an op. Weights of a gathered tensor beyond those that one launch takes
(``fused_plan.in_one_launch``) are multiplied by the vendor's matmul, on the workspace. Operands that no kernel reads as they lie are copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.lowerings import fused_plan
from overlap_inductor.lowerings.fused_plan import FusedParameters
from overlap_inductor.lowerings.operands import bias_row
from overlap_inductor.lowerings.operands import left_operand
from overlap_inductor.lowerings.operands import right_operand
from overlap_inductor.lowerings.reference import product
from overlap_inductor.lowerings.site_ops import Optional
from overlap_inductor.lowerings.site_ops import Tensors
from overlap_inductor.lowerings.site_ops import define_gather
from overlap_inductor.lowerings.site_ops import define_reductions
from overlap_inductor.transports.workspace import Launch


def _gather(
    shard: torch.Tensor, rhs: Sequence[torch.Tensor], biases: Optional, gathered_used: bool, launch: Launch, parameters: FusedParameters
) -> Tensors:
    from overlap_inductor.lowerings import fused

    shard, rhs = left_operand(shard), [right_operand(b) for b in rhs]
    launched = fused_plan.in_one_launch(rhs)
    keep = gathered_used or len(launched) < len(rhs)
    rows = [bias_row(biases[i], rhs[i].shape[1]) for i in launched]
    made = dict(zip(launched, fused.all_gather_matmuls(shard, [rhs[i] for i in launched], launch, parameters, rows, keep)))
    if not keep:
        return list(made.values())
    try:
        gathered = fused.gathered(shard, launch)
        outs = [made[i] if i in made else product(gathered, b, bias) for i, (b, bias) in enumerate(zip(rhs, biases, strict=True))]
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
