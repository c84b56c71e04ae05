"""The ops of schedule ``fused``: one functional op a site, one persistent kernel an op. Further matmuls of a gathered tensor are the vendor's, on the
workspace.

Shapes (W ranks, this rank's view): ``shard [m, K]``, ``rhs [K, N]``, ``lhs [W*m, K]``. All ops return the chain's next token last. ``settings`` is JSON
text of ``FusedParameters`` without ``blocks``. A site without rows, with fewer than ``min_rows``, with more than its workspace was planned for, or one whose group
has no workspace left for it (``transports.workspace`` says so in the log), runs the plain collective and matmul: on every rank, since rows and
workspace are the same on all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.fused_plan import FusedParameters
from overlap_inductor.lowerings.fused_plan import needed
from overlap_inductor.lowerings.fused_plan import parameters_of
from overlap_inductor.lowerings.operands import bias_row
from overlap_inductor.lowerings.operands import left_operand
from overlap_inductor.lowerings.operands import right_operand
from overlap_inductor.lowerings.ops import define
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.transports.workspace import Launch
from overlap_inductor.transports.workspace import workspace_of

Tensors = list[torch.Tensor]


def _ready(
    pattern: str, rows: int, inner: int, columns: int, like: torch.Tensor, group: dist.ProcessGroup, site: str, settings: str
) -> tuple[Launch, FusedParameters] | None:
    """Where and how the site's kernel runs, for ``rows`` of a shard; ``None`` where it does not."""
    if rows == 0:
        return None
    place = workspace_of(group, like.device)
    parameters = parameters_of(settings, place.blocks)
    if parameters.min_rows > rows * group.size():
        return None
    launch = place.launch(
        site, (rows, inner, columns, like.dtype), lambda: needed(pattern, group.size(), rows, inner, columns, like.element_size(), parameters)
    )
    return None if launch is None else (launch, parameters)


def _fused_all_gather_matmul(
    chain: torch.Tensor,
    shard: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    gathered_used: bool,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[Tensors, torch.Tensor]:
    group, token = resolve_group(group_name), chain.new_empty(1)
    ready = _ready("all_gather_matmul", shard.shape[0], shard.shape[1], rhs[0].shape[1], shard, group, site, settings)
    if ready is None:
        gathered, outs = reference.all_gather_matmul(shard, rhs, biases, group)
        return [*outs, gathered] if gathered_used else outs, token
    from overlap_inductor.lowerings import fused

    launch, parameters = ready
    shard = left_operand(shard)
    # The transfer hides under one of the matmuls: the largest.
    first = max(range(len(rhs)), key=lambda i: rhs[i].shape[1])
    keep = gathered_used or len(rhs) > 1
    out = fused.all_gather_matmul(shard, right_operand(rhs[first]), launch, parameters, bias_row(biases[first], rhs[first].shape[1]), keep)
    if not keep:
        return [out], token
    try:
        gathered, outs = fused.gathered(shard, launch), []
        for i, (b, bias) in enumerate(zip(rhs, biases, strict=True)):
            outs.append(out if i == first else torch.mm(gathered, b) if bias is None else torch.addmm(bias, gathered, b))
        if gathered_used:
            outs.append(gathered.clone())
    finally:
        # Whatever happened: peers wait for leave to write into this workspace again.
        fused.end(launch)
    return outs, token


def _fused_all_gather_matmul_fake(
    chain: torch.Tensor, shard: torch.Tensor, rhs: Tensors, biases: object, gathered_used: bool, settings: str, group_name: str, site: str
) -> tuple[Tensors, torch.Tensor]:
    rows = resolve_group(group_name).size() * shard.shape[0]
    widths = [b.shape[1] for b in rhs] + ([shard.shape[1]] if gathered_used else [])
    return [shard.new_empty(rows, width) for width in widths], chain.new_empty(1)


# (With ``gathered_used`` the gathered tensor follows behind the results.)
define(
    "fused_all_gather_matmul(Tensor chain, Tensor shard, Tensor[] rhs, Tensor?[] biases, bool gathered_used, str settings, "
    "str group_name, str site) -> (Tensor[], Tensor)",
    _fused_all_gather_matmul,
    _fused_all_gather_matmul_fake,
)


def _define_reduction(pattern: str, keeps_rows: bool) -> None:
    """Op ``fused_<pattern>``: ``(result, token)``; the result has all rows of ``lhs`` where ``keeps_rows``, else a shard's. The plain computation
    and the kernel's launch have the pattern's name in ``reference`` and in ``fused``."""

    def implementation(
        chain: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None, settings: str, reduce_op: str, group_name: str, site: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group, token = resolve_group(group_name), chain.new_empty(1)
        ready = _ready(pattern, -(-lhs.shape[0] // group.size()), rhs.shape[0], rhs.shape[1], lhs, group, site, settings)
        if ready is None:
            return getattr(reference, pattern)([lhs], [rhs], [bias], reduce_op, group), token
        from overlap_inductor.lowerings import fused

        launch, parameters = ready
        return getattr(fused, pattern)(left_operand(lhs), right_operand(rhs), launch, parameters, bias_row(bias, rhs.shape[1]), reduce_op == "avg"), token

    def fake(
        chain: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, bias: object, settings: str, reduce_op: str, group_name: str, site: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = lhs.shape[0] if keeps_rows else lhs.shape[0] // resolve_group(group_name).size()
        return lhs.new_empty(rows, rhs.shape[1]), chain.new_empty(1)

    schema = "(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, str settings, str reduce_op, str group_name, str site) -> (Tensor, Tensor)"
    define(f"fused_{pattern}{schema}", implementation, fake)


_define_reduction("matmul_reduce_scatter", keeps_rows=False)
_define_reduction("matmul_all_reduce", keeps_rows=True)
