"""The ops of schedule ``fused``: one functional op a site, one persistent kernel an op (two where a gathered tensor has more readers).

Shapes (W ranks, this rank's view): ``shard [m, K]``, ``rhs [K, N]``, ``lhs [W*m, K]``. All ops return the chain's next token last. ``settings`` is JSON
text of ``FusedParameters`` without ``blocks``. A site without rows, or one whose group has no workspace left for it (``transports.workspace``
says so in the log), runs the plain collective and matmul: on every rank, since rows and workspace are the same on all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.fused_plan import FusedParameters
from overlap_inductor.lowerings.fused_plan import parameters_of
from overlap_inductor.lowerings.ops import define
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.transports.workspace import GroupWorkspace
from overlap_inductor.transports.workspace import workspace_of

Tensors = list[torch.Tensor]


def _ready(group: dist.ProcessGroup, device: torch.device, site: str, settings: str) -> tuple[GroupWorkspace, FusedParameters] | None:
    place = workspace_of(group, device)
    return None if site in place.without_room else (place, parameters_of(settings, place.blocks))


def _fused_all_gather_matmul(
    chain: torch.Tensor,
    shard: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    gathered_used: bool,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    group, token = resolve_group(group_name), chain.new_empty(1)
    ready = _ready(group, shard.device, site, settings) if shard.shape[0] else None
    if ready is None:
        gathered, outs = reference.all_gather_matmul(shard, rhs, biases, group)
        return outs, gathered if gathered_used else shard.new_empty(0), token
    from overlap_inductor.lowerings import fused

    place, parameters = ready
    launch = place.launch(site)
    shard = shard.contiguous()
    # The transfer hides under one of the matmuls: the largest.
    first = max(range(len(rhs)), key=lambda i: rhs[i].shape[1])
    keep = gathered_used or len(rhs) > 1
    outs = [shard.new_empty(0)] * len(rhs)
    outs[first] = fused.all_gather_matmul(shard, rhs[first], launch, parameters, biases[first], keep)
    if not keep:
        return outs, shard.new_empty(0), token
    gathered = fused.gathered(shard, launch)
    for i, (b, bias) in enumerate(zip(rhs, biases, strict=True)):
        if i != first:
            outs[i] = torch.mm(gathered, b) if bias is None else torch.addmm(bias, gathered, b)
    result = gathered.clone() if gathered_used else shard.new_empty(0)
    fused.end(launch)
    return outs, result, token


def _fused_all_gather_matmul_fake(
    chain: torch.Tensor, shard: torch.Tensor, rhs: Tensors, biases: object, gathered_used: bool, settings: str, group_name: str, site: str
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    rows = resolve_group(group_name).size() * shard.shape[0]
    outs = [shard.new_empty(rows, b.shape[1]) for b in rhs]
    return outs, shard.new_empty(rows, shard.shape[1]) if gathered_used else shard.new_empty(0), chain.new_empty(1)


# (Without ``gathered_used`` the gathered tensor is not there, and an empty one is returned in its place.)
define(
    "fused_all_gather_matmul(Tensor chain, Tensor shard, Tensor[] rhs, Tensor?[] biases, bool gathered_used, str settings, "
    "str group_name, str site) -> (Tensor[], Tensor, Tensor)",
    _fused_all_gather_matmul,
    _fused_all_gather_matmul_fake,
)


def _fused_matmul_reduce_scatter(
    chain: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None, settings: str, reduce_op: str, group_name: str, site: str
) -> tuple[torch.Tensor, torch.Tensor]:
    group, token = resolve_group(group_name), chain.new_empty(1)
    ready = _ready(group, lhs.device, site, settings) if lhs.shape[0] else None
    if ready is None:
        return reference.matmul_reduce_scatter([lhs], [rhs], [bias], reduce_op, group), token
    from overlap_inductor.lowerings import fused

    place, parameters = ready
    return fused.matmul_reduce_scatter(lhs.contiguous(), rhs, place.launch(site), parameters, bias, reduce_op == "avg"), token


def _fused_matmul_reduce_scatter_fake(
    chain: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, bias: object, settings: str, reduce_op: str, group_name: str, site: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return lhs.new_empty(lhs.shape[0] // resolve_group(group_name).size(), rhs.shape[1]), chain.new_empty(1)


define(
    "fused_matmul_reduce_scatter(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, str settings, str reduce_op, str group_name, str site) "
    "-> (Tensor, Tensor)",
    _fused_matmul_reduce_scatter,
    _fused_matmul_reduce_scatter_fake,
)


def _fused_matmul_all_reduce(
    chain: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None, settings: str, reduce_op: str, group_name: str, site: str
) -> tuple[torch.Tensor, torch.Tensor]:
    group, token = resolve_group(group_name), chain.new_empty(1)
    ready = _ready(group, lhs.device, site, settings) if lhs.shape[0] else None
    if ready is None:
        return reference.matmul_all_reduce([lhs], [rhs], [bias], reduce_op, group), token
    from overlap_inductor.lowerings import fused

    place, parameters = ready
    return fused.matmul_all_reduce(lhs.contiguous(), rhs, place.launch(site), parameters, bias, reduce_op == "avg"), token


def _fused_matmul_all_reduce_fake(
    chain: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, bias: object, settings: str, reduce_op: str, group_name: str, site: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return lhs.new_empty(lhs.shape[0], rhs.shape[1]), chain.new_empty(1)


define(
    "fused_matmul_all_reduce(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, str settings, str reduce_op, str group_name, str site) "
    "-> (Tensor, Tensor)",
    _fused_matmul_all_reduce,
    _fused_matmul_all_reduce_fake,
)
