# SPDX-License-Identifier: Apache-2.0
"""Read lookups and the all-to-all that follows, and write them as one op of schedule ``fused``.

::

    b0, b1 = _embedding_bag(w0, i0, o0), _embedding_bag(w1, i1, o1)
    y = wait_tensor(all_to_all_single(cat([b0[0], b1[0]], 1)))
    ->  results, token = fused_embedding_all_to_all(token, [w0, w1], [i0, i1], [o0, o1], ...)
        y = reshape(results[0]); b0[1], b0[2], b0[3], b1[1] ... = results[1 :]

Results 1 to 3 of each ``_embedding_bag`` are computed only if the graph reads one of them.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.fused import table_parameters
from overlap_inductor.lowerings.fused.table_ops import MODES
from overlap_inductor.lowerings.rows import overlap
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import product
from overlap_inductor.sites.lookup_nodes import PooledNodes
from overlap_inductor.sites.lookups import LookupNode
from overlap_inductor.sites.lookups import behind_reshapes
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat import operators

aten = torch.ops.aten
BAGS = "embedding_bag"


def why_not(nodes: PooledNodes) -> str | None:
    """Why no fused kernel can compute the site; ``None`` if one can."""
    first = nodes.lookups[0]
    dtype, width = tools.dtype(first.rhs), tools.shape(first.rhs)[1]
    sizes = [width, *nodes.wire.shape(), *(s for m in nodes.lookups for s in tools.shape(m.rhs))]
    if any(not isinstance(size, int) for size in sizes):
        return f"a size of the tables or of the batch is only known at run time: {[str(s) for s in sizes]}"
    if (reason := table_parameters.why_not(dtype, nodes.collective.world_size, width)) is not None:
        return reason
    if tools.numel(nodes.wire.shape()) == 0:
        return "the batch is empty"
    for lookup, part in zip(nodes.lookups, nodes.parts, strict=True):
        if (reason := _why_not_table(lookup, dtype) or _why_not_alike(lookup, first)) is not None:
            return reason
        if (reason := _why_not_read(nodes, lookup, part)) is not None:
            return reason
    if _rows_first(nodes) is None:
        return "in the tensor that is sent, the rows of a table are not in the order of its bags"
    return None


def _why_not_table(lookup: LookupNode, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot look up this table; ``None`` if it can."""
    node, table, name = lookup.node, tools.value(lookup.rhs), lookup.node.name
    if not table.is_contiguous() or table.storage_offset() * dtype.itemsize % 16:
        return f"{name} reads a table with strides {list(table.stride())}; expected it contiguous, aligned to 16 bytes"
    if operators.qualified_name(lookup.rhs)[1].startswith("embedding_renorm"):
        return f"{name} reads a table whose rows are first scaled down to a largest norm (max_norm)"
    for flag, meaning in (("sparse", "sparse gradients"), ("scale_grad_by_freq", "gradients scaled by frequency")):
        if operators.argument(node, flag):
            return f"{name} asks for {meaning} ({flag}); a fused kernel was not tried with them"
    if tools.dtype(lookup.lhs) not in (torch.int32, torch.int64):
        return f"the indices of {name} are {tools.dtype(lookup.lhs)}; expected int32 or int64"
    if lookup.kind != BAGS:
        return None
    mode = operators.argument(node, "mode")
    if mode not in range(len(MODES)):
        return f"{name} takes the maximum of a bag (mode={mode}); expected a sum or a mean"
    if (offsets := tools.dtype(operators.argument(node, "offsets"))) != tools.dtype(lookup.lhs):
        return f"the indices of {name} are {tools.dtype(lookup.lhs)} and its offsets {offsets}; expected one dtype"
    weights = operators.argument(node, "per_sample_weights")
    if weights is not None and tools.dtype(weights) != dtype:
        return f"the weights of the samples of {name} are {tools.dtype(weights)}; expected {dtype}"
    return None


def _why_not_alike(lookup: LookupNode, first: LookupNode) -> str | None:
    """Why one kernel cannot look up this table and the first one; ``None`` if it can."""
    mine, other = _alike(lookup), _alike(first)
    if mine != other:
        return (
            f"{lookup.node.name} has {', '.join(map(str, mine))} and {first.node.name} has"
            f" {', '.join(map(str, other))}; expected all tables to be looked up in one way"
        )
    return None


def _alike(lookup: LookupNode) -> tuple[Any, ...]:
    """What must be equal for all tables of a kernel."""
    same: list[Any] = [lookup.kind, tools.dtype(lookup.lhs), f"rows of {tools.shape(lookup.rhs)[1]}"]
    if lookup.kind == BAGS:
        weighted = operators.argument(lookup.node, "per_sample_weights") is not None
        same += [f"mode {_mode(lookup)}", "weights of samples" if weighted else "no weights of samples"]
        same += ["a last offset"] * _last_offset(lookup)
    return tuple(same)


def _mode(lookup: LookupNode) -> str:
    return MODES[operators.argument(lookup.node, "mode")] if lookup.kind == BAGS else MODES[0]


def _last_offset(lookup: LookupNode) -> bool:
    return lookup.kind == BAGS and bool(operators.argument(lookup.node, "include_last_offset"))


def _why_not_read(nodes: PooledNodes, lookup: LookupNode, part: fx.Node) -> str | None:
    """Why the results of ``lookup`` cannot be left to the kernel; ``None`` if they can. The kernel stores only what is
    sent and, of ``_embedding_bag``, results 1 to 3. ``part``: the tensor of this table that is sent."""
    result = behind_reshapes(part)
    if result is not (_results(lookup).get(0) if lookup.is_tuple else lookup.node):
        return f"{result.name} ({result.target}) is computed between a lookup and the exchange"
    path, node = [part], part
    while node is not result:
        node = node.args[0]
        path.append(node)
    inside = {*path, *nodes.between, nodes.collective.node}
    if others := {user for node in path for user in node.users} - inside:
        return f"{min(others).name} also reads the results of {lookup.node.name}"
    early = [u for i, saved in _results(lookup).items() if i for u in saved.users if u < nodes.collective.node]
    if early:
        return f"{early[0].name} reads other results of {lookup.node.name} before the exchange"
    return None


def _results(lookup: LookupNode) -> dict[int, fx.Node]:
    """``{number: node}`` of the results of ``_embedding_bag`` that the graph reads. Empty for other lookups."""
    if not lookup.is_tuple:
        return {}
    return {user.args[1]: user for user in lookup.node.users if user.target is getitem}


def _rows_first(nodes: PooledNodes) -> bool | None:
    """Order of what one rank sends to another. True: by bag, then by table. False: by table, then by bag. ``None``: any
    other."""
    _, *atoms = nodes.block.flat()
    width = tools.shape(nodes.lookups[0].rhs)[1]
    cut = next((i for i in range(len(atoms) + 1) if product(atoms[i:]) == width), None)
    if cut is None:
        return None
    rank, tables = nodes.block.flat()[:1], list(nodes.tables.refined().dims[0])
    rows, row = atoms[:cut], atoms[cut:]
    received = nodes.received
    if received.same_elements(Layout(tuple((atom,) for atom in (*rank, *tables, *rows, *row)))):
        return False
    return True if received.same_elements(Layout(tuple((a,) for a in (*rank, *rows, *tables, *row)))) else None


def sizes(nodes: PooledNodes) -> tuple[int, int, int, int, int]:
    """``(world_size, tables, bags of one rank's slice of the batch, width, bytes of an element)``."""
    width = tools.shape(nodes.lookups[0].rhs)[1]
    itemsize = tools.dtype(nodes.lookups[0].rhs).itemsize
    return nodes.collective.world_size, nodes.count, int(nodes.block_size) // width, width, itemsize


def rewrite(emit: StepEmitter, nodes: PooledNodes, settings: str) -> tuple[fx.Node, Replaced]:
    """Write the op. Returns ``(next token of the chain, {old node: its replacement})``."""
    first, lookups = nodes.lookups[0], nodes.lookups
    bagged = first.kind == BAGS
    saved = [_results(m) for m in lookups]
    saves = any(i and node.users for results in saved for i, node in results.items())
    weighted = bagged and operators.argument(first.node, "per_sample_weights") is not None
    out = emit.communicate(
        overlap.fused_embedding_all_to_all.default,
        emit.chain,
        [m.rhs for m in lookups],
        [m.lhs for m in lookups],
        [operators.argument(m.node, "offsets") for m in lookups] if bagged else [],
        [operators.argument(m.node, "per_sample_weights") for m in lookups] if weighted else [],
        [int(operators.argument(m.node, "padding_idx")) if bagged else -1 for m in lookups],
        _mode(first),
        _last_offset(first),
        bool(_rows_first(nodes)),
        saves,
        settings,
        emit.group_name,
        emit.site,
    )
    results, chain = (emit.call(getitem, out, i) for i in range(2))
    wait = nodes.collective.wait
    replaced = {wait: emit.reshape(emit.call(getitem, results, 0), tools.shape(wait))}
    for table, found in enumerate(saved if saves else ()):
        for i, node in found.items():
            if i and node.users:
                replaced[node] = emit.call(getitem, results, 3 * table + i)
    return chain, replaced
