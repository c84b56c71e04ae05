"""Schedule ``fused`` for a site: whether its kernels compute it, with what parameters, and what workspace it needs.

A fused kernel computes what a looping op computes (rows in the ranks' order, ``passes.looping``), of 16-bit matrices in whole 16-byte rows, with
static sizes and one matmul into a reduction.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings import fused_plan
from overlap_inductor.passes import graph_tools as tools
from overlap_inductor.passes.looping import loopable
from overlap_inductor.passes.site_nodes import GatherNodes
from overlap_inductor.passes.site_nodes import OverlapSite
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports.arena import Request

PATTERNS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def why_not(site: OverlapSite, config: OverlapConfig) -> str | None:
    """Why no fused kernel computes this site, or ``None``."""
    facts = site.facts
    if config.transport not in ("auto", "sm_push"):
        return f"OVERLAP_INDUCTOR_TRANSPORT={config.transport}, and a fused kernel moves its pieces itself (sm_push)"
    if facts.pattern not in PATTERNS:
        return f"no fused kernel computes {facts.pattern}"
    if not loopable(site):
        return "its rows do not lie in the ranks' order, or its matmuls are not plain ones with a bias of one row"
    if facts.pattern != "all_gather_matmul" and len(site.matmuls) > 1:
        return f"{len(site.matmuls)} matmuls are summed into one reduction; a fused kernel has one"
    for left, right in _operands(site):
        if any(not isinstance(size, int) for tensor in (left, right) for size in (*tensor.shape, *tensor.stride())):
            return f"a size or stride is only known when it runs: {[str(s) for s in left.shape]} @ {[str(s) for s in right.shape]}"
        reason = fused_plan.why_not(left.dtype, int(left.shape[1]), int(right.shape[1]))
        if reason is not None:
            return reason
        if right.dtype != left.dtype or not fused_plan.right_operand_fits(right):
            return f"the right operand is {right.dtype}{list(right.shape)} with strides {list(right.stride())}; expected rows or columns of whole 16-byte words"
    if facts.pattern == "matmul_all_reduce" and (rows := int(_operands(site)[0][0].shape[0])) % facts.collective.world_size:
        return f"{rows} rows do not fall into {facts.collective.world_size} equal shards"
    source = tools.value(site.collectives[0].input)
    return symmetric.why_no_symmetric_memory(facts.collective.ranks, source.device)


def _operands(site: OverlapSite) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``(left, right)`` of each matmul as the op sees it: the gathered or scattered dim is the left operand's rows."""
    if isinstance(site.nodes, GatherNodes):
        return [_pair(c.matmul.lhs, c.matmul.rhs, c.role == "N") for c in site.nodes.consumers]
    return [_pair(m.lhs, m.rhs, site.nodes.sharded.dim == 1) for m in site.nodes.leaves]


def _pair(lhs: fx.Node, rhs: fx.Node, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = tools.value(lhs), tools.value(rhs)
    return (right.t(), left.t()) if transposed else (left, right)


def parameters(site: OverlapSite) -> dict[str, Any]:
    """The parameters of the site's kernel, for the plan."""
    return {"settings": json.dumps(fused_plan.settings_for(site.facts.pattern), sort_keys=True)}


def request(site: OverlapSite) -> Request:
    """The workspace that the site's kernel needs."""
    assert site.decision is not None
    pattern, world_size = site.facts.pattern, site.facts.collective.world_size
    settings = site.decision.plan[-1].parameters["settings"]
    chosen = fused_plan.parameters_of(settings, 1)
    left, right = max(_operands(site), key=lambda pair: int(pair[1].shape[1]))
    missing = site.nodes.sharded.missing if not isinstance(site.nodes, GatherNodes) else 0
    rows = -(-(int(left.shape[0]) + missing) // world_size)
    need = fused_plan.needed(pattern, world_size, max(rows, 1), int(left.shape[1]), int(right.shape[1]), left.dtype.itemsize, chosen)
    return Request(site.facts.id, *need)
