# SPDX-License-Identifier: Apache-2.0
"""The ops of schedule ``fused``: one functional op for each site, one persistent kernel for each op.

If several weights multiply a gathered tensor, the kernel computes the products with some or all of them
(``parameters.in_one_launch``). The vendor's matmul computes the products that are left. Operands in a layout that no
kernel reads are copied first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import torch

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.fused import parameters as fused_plan
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.one_op.exchange_ops import define_contracted
from overlap_inductor.lowerings.one_op.exchange_ops import define_exchanges
from overlap_inductor.lowerings.one_op.operands import bias_row
from overlap_inductor.lowerings.one_op.operands import left_operand
from overlap_inductor.lowerings.one_op.operands import right_operand
from overlap_inductor.lowerings.one_op.ops import Optional
from overlap_inductor.lowerings.one_op.ops import Tensors
from overlap_inductor.lowerings.one_op.ops import define_gather
from overlap_inductor.lowerings.one_op.ops import define_reductions
from overlap_inductor.lowerings.one_op.ops import ready
from overlap_inductor.lowerings.reference import product
from overlap_inductor.lowerings.reference import side_by_side
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.sites.epilogue_program import Epilogue
from overlap_inductor.sites.epilogue_program import applied
from overlap_inductor.sites.epilogue_program import extras_of
from overlap_inductor.sites.epilogue_program import from_text
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.memory import token_like

Epilogues = Sequence[Epilogue | None]


@functools.cache
def _kernels() -> ModuleType:
    """The module that launches the kernels. It imports Triton, so it is imported only when the first op runs."""
    from overlap_inductor.lowerings.fused import calls as fused

    return fused


def _gather(
    pattern: str,
    shard: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    biases: Optional,
    gathered_used: bool,
    launch: Launch,
    parameters: FusedParameters,
    epilogues: Epilogues = (),
    extras: Sequence[torch.Tensor] = (),
) -> Tensors:
    fused = _kernels()
    if len(rhs) == 1 and not epilogues and not gathered_used:
        a, b = left_operand(shard), right_operand(rhs[0])
        return [getattr(fused, pattern)(a, b, launch, parameters, bias_row(biases[0], b.shape[1]))]
    if not epilogues:
        epilogues = (None,) * len(rhs)
    of_each = extras_of(epilogues, [e.contiguous() for e in extras])

    shard, rhs = left_operand(shard), [right_operand(b) for b in rhs]
    launched = fused_plan.in_one_launch(rhs)
    keep = gathered_used or len(launched) < len(rhs)
    rows = [bias_row(biases[i], rhs[i].shape[1]) for i in launched]
    tail = fused.Tail(tuple(epilogues[i] for i in launched), [e for i in launched for e in of_each[i]])
    multiplied, weights = getattr(fused, f"{pattern}s"), [rhs[i] for i in launched]
    made = dict(zip(launched, multiplied(shard, weights, launch, parameters, rows, keep, tail)))
    if not keep:
        return list(made.values())
    try:
        gathered = fused.gathered(fused.own_shard(pattern, shard, launch), launch)
        outs = []
        for i, (b, bias) in enumerate(zip(rhs, biases, strict=True)):
            outs.append(made[i] if i in made else applied(epilogues[i], product(gathered, b, bias), of_each[i]))
        if gathered_used:
            outs.append(gathered.clone())
    except BaseException:
        # Without ``end``, the peers would wait for permission to write into this workspace.
        fused.end(launch)
        raise
    fused.end(launch, outs)
    return outs


def _reduce(
    pattern: str,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    average: bool,
    launch: Launch,
    parameters: FusedParameters,
    epilogues: Epilogues = (),
    extras: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    fused = _kernels()
    tail = fused.Tail(tuple(epilogues), [e.contiguous() for e in extras]) if epilogues else fused.NO_TAIL
    return getattr(fused, pattern)(
        left_operand(lhs), right_operand(rhs), launch, parameters, bias_row(bias, rhs.shape[1]), average, tail
    )


def _send(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    columns: bool,
    launch: Launch,
    parameters: FusedParameters,
) -> torch.Tensor:
    row = bias_row(bias, rhs.shape[1])
    return _kernels().matmul_all_to_all(left_operand(lhs), right_operand(rhs), launch, parameters, row, columns)


def _contract(
    sent: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    biases: Optional,
    operand_used: bool,
    launch: Launch,
    parameters: FusedParameters,
) -> Tensors:
    """The kernel computes the first matmul. The vendor's matmul computes the others."""
    from overlap_inductor.lowerings.fused.contraction import contracted_all_to_all_matmul

    fused, sent, first = _kernels(), left_operand(sent), right_operand(rhs[0])
    keep, row = operand_used or len(rhs) > 1, bias_row(biases[0], first.shape[1])
    outs = [contracted_all_to_all_matmul(sent, first, launch, parameters, row, keep)]
    if not keep:
        return outs
    try:
        received = fused.gathered(fused.own_shard("all_to_all_matmul", sent, launch), launch)
        operand = side_by_side(received, launch.world_size)
        outs += [product(operand, b, bias) for b, bias in zip(rhs[1:], biases[1:], strict=True)]
    except BaseException:
        # Without ``end``, the peers would wait for permission to write into this workspace.
        fused.end(launch)
        raise
    outs += [operand] if operand_used else []
    fused.end(launch, outs)
    return outs


def _gather_epilogue(
    chain: torch.Tensor,
    shard: torch.Tensor,
    rhs: Tensors,
    biases: Optional,
    gathered_used: bool,
    extras: Tensors,
    epilogues: str,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[Tensors, torch.Tensor]:
    group, token, parsed = resolve_group(group_name), token_like(chain), from_text(epilogues)
    found = ready(fused_plan, "all_gather_matmul", shard.shape[0], shard, rhs[0], shard.dtype, group, site, settings)
    if found is None:
        gathered, outs = reference.all_gather_matmul(shard, rhs, biases, group)
        outs = [applied(*one) for one in zip(parsed, outs, extras_of(parsed, extras), strict=True)]
        return [*outs, gathered] if gathered_used else outs, token
    with call_order(shard.device):
        return _gather("all_gather_matmul", shard, rhs, biases, gathered_used, *found, parsed, extras), token


def _gather_epilogue_fake(
    chain: torch.Tensor,
    shard: torch.Tensor,
    rhs: Tensors,
    biases: object,
    gathered_used: bool,
    extras: object,
    epilogues: str,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[Tensors, torch.Tensor]:
    rows = resolve_group(group_name).size() * shard.shape[0]
    return [
        shard.new_empty(rows, width) for width in [b.shape[1] for b in rhs] + [shard.shape[1]] * gathered_used
    ], chain.new_empty(1)


def _reduce_epilogue(
    pattern: str,
    chain: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    extras: Tensors,
    epilogues: str,
    settings: str,
    reduce_op: str,
    group_name: str,
    site: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    group, token, parsed = resolve_group(group_name), token_like(chain), from_text(epilogues)
    found = ready(fused_plan, pattern, -(-lhs.shape[0] // group.size()), lhs, rhs, lhs.dtype, group, site, settings)
    if found is None:
        return applied(parsed[0], getattr(reference, pattern)([lhs], [rhs], [bias], reduce_op, group), extras), token
    with call_order(lhs.device):
        return _reduce(pattern, lhs, rhs, bias, reduce_op == "avg", *found, parsed, extras), token


def _reduce_epilogue_fake(
    pattern: str,
    chain: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: object,
    extras: object,
    epilogues: str,
    settings: str,
    reduce_op: str,
    group_name: str,
    site: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = lhs.shape[0] if pattern == "matmul_all_reduce" else lhs.shape[0] // resolve_group(group_name).size()
    return lhs.new_empty(rows, rhs.shape[1]), chain.new_empty(1)


define_gather("fused", fused_plan, functools.partial(_gather, "all_gather_matmul"))
define_reductions("fused", fused_plan, _reduce)
define_exchanges("fused", fused_plan, _send, functools.partial(_gather, "all_to_all_matmul"))
define_contracted("fused", fused_plan, _contract)
# The ops below are like those above for all-gathers and reductions, but also compute epilogues that read ``extras``.
# ``epilogues`` is a text by ``epilogue_program.to_text``: for each result its epilogue, or ``None`` if it has none.
define(
    "fused_all_gather_matmul_epilogue(Tensor chain, Tensor shard, Tensor[] rhs, Tensor?[] biases, bool gathered_used,"
    " Tensor[] extras, str epilogues, str settings, str group_name, str site) -> (Tensor[], Tensor)",
    _gather_epilogue,
    _gather_epilogue_fake,
)
for _pattern in ("matmul_reduce_scatter", "matmul_all_reduce"):
    define(
        f"fused_{_pattern}_epilogue(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, Tensor[] extras, str epilogues,"
        " str settings, str reduce_op, str group_name, str site) -> (Tensor, Tensor)",
        functools.partial(_reduce_epilogue, _pattern),
        functools.partial(_reduce_epilogue_fake, _pattern),
    )
