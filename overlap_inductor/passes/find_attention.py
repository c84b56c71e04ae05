# SPDX-License-Identifier: Apache-2.0
"""Find ``all-gathers of keys and values -> attention`` (context parallelism: each of R ranks has the queries, keys and
values of its own s tokens)::

    k = cat(split(wait_tensor(all_gather(own keys))), dim=2)         # [batch, heads, R s, width]
    v = cat(split(wait_tensor(all_gather(own values))), dim=2)       # or one gather of both
    y = scaled_dot_product_attention(q, k, v, mask)[0]
    ->  y merged from the attention to each rank's keys              # while the next rank's keys and values move

Views, pieces and joins of pieces may stand between a gather and the attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.passes.follow_parts import PartFollower
from overlap_inductor.passes.pattern import Match
from overlap_inductor.passes.pattern import Miss
from overlap_inductor.passes.pattern import Search
from overlap_inductor.sites import attention
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.attention import KEYS
from overlap_inductor.sites.attention import AttentionNode
from overlap_inductor.sites.attention_nodes import AttentionNodes
from overlap_inductor.sites.attention_nodes import GatheredOperand
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.torch_compat import operators

STEPS = 12
"""The most nodes from the gather to the attention."""


class AllGatherAttention:
    """Pattern ``all-gathers of keys and values -> attention`` (see ``Pattern``). A site is found at the first of its
    gathers. The finder then skips the site's other gathers."""

    name = "all_gather_attention"
    kind = "all_gather"
    early = False
    example = None

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        reader = next(_readers(collective.wait), None)
        if reader is None:
            return Miss()
        nodes = _site(reader, search)
        if isinstance(nodes, Reason):
            return Miss([nodes])
        search.merged.update(c.node for c in nodes.collectives)
        return Match(nodes, KEYS, "K", _other_results(reader))


def _readers(wait: fx.Node) -> Iterator[AttentionNode]:
    """The attention ops whose keys or values are computed from ``wait``, nearest first."""

    def computes(node: fx.Node) -> bool:
        return node.op == "call_function" and not operators.is_functional_collective(node)

    return attention.readers([wait], computes, STEPS)


def _site(reader: AttentionNode, search: Search) -> AttentionNodes | Reason:
    if (refusal := reader.refusal()) is not None:
        return Reason("matmul_form", refusal)
    operands, taken = [], search.taken()
    for what, node in (("keys", reader.rhs), ("values", reader.value)):
        collective = _gather_behind(node, search)
        if collective is None:
            return Reason("layout", f"{node.name}, the {what} of {reader.node.name}, is not one gathered tensor")
        if collective.node in taken:
            text = f"{collective.node.name}, which gathers the {what} of {reader.node.name}, belongs to another site"
            return Reason("shares_nodes", text)
        operand = _operand(collective, node, reader)
        if isinstance(operand, Reason):
            return operand
        operands.append(operand)
    key, value = operands
    if key.collective.group_name != value.collective.group_name:
        return Reason("layout", f"keys and values of {reader.node.name} are gathered in different groups")
    outside = [reader.lhs, reader.mask, key.collective.input, value.collective.input]
    for wait in (key.collective.wait, value.collective.wait):
        known: dict[fx.Node, bool] = {}
        needy = next((n for n in outside if n is not None and tools.depends_on(n, wait, known)), None)
        if needy is not None:
            text = f"{reader.node.name} also needs {needy.name}, which is computed from {wait.name}; expected only keys"
            return Reason("weight_depends_on_collective", f"{text} and values to depend on {wait.name}")
    mask, keys = reader.mask, tools.shape(reader.rhs)[KEYS]
    if mask is not None and not any(same_size(tools.shape(mask)[-1], size) for size in (keys, 1)):
        return Reason("layout", f"the mask {mask.name} has {tools.shape(mask)[-1]} columns for {keys} keys")
    shard = ShardedDim.of(key.layout).chunk
    if reader.hides_keys and reader.mask_block > 1 and not (isinstance(shard, int) and shard % reader.mask_block == 0):
        text = f"each rank has {shard} keys of {reader.node.name}; attention to one rank's keys is computed with a mask"
        return Reason("layout", f"{text}, and then this op reads only multiples of {reader.mask_block} keys")
    return AttentionNodes(reader, key, value)


def _gather_behind(node: fx.Node, search: Search) -> CollectiveNode | None:
    """The all-gather from which ``node`` is computed, or ``None``. The search follows the first input of each node."""
    for _ in range(STEPS):
        if operators.is_wait(node):
            while operators.is_wait(node):
                node = node.all_input_nodes[0]
            _, kind, found = search.collectives.get(node, (None, "", None))
            return found if kind == "all_gather" and isinstance(found, CollectiveNode) else None
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return None


def _operand(collective: CollectiveNode, node: fx.Node, reader: AttentionNode) -> GatheredOperand | Reason:
    """``node``, the keys or the values, as a part of the gathered tensor. If it is no such part, or if a rank's keys
    are not consecutive, returns the reason."""
    follower = PartFollower(collective)
    part = follower.part(node)
    if isinstance(part, Reason):
        return part
    if part.rank is not None:
        text = f"{node.name}, which {reader.node.name} reads, is the shard of rank {part.rank} alone"
        return Reason("layout", f"{text}; expected the keys and values of all ranks, joined in order")
    try:
        sharded = ShardedDim.of(part.layout)
    except LayoutError as error:
        return Reason("layout", f"{node.name}: {error}")
    if sharded.dim != KEYS:
        return Reason(
            "layout", f"dim {sharded.dim} of {node.name} is gathered; expected dim {KEYS}, which counts the keys"
        )
    if not same_size(sharded.outer, 1):
        text = f"each rank has {sharded.outer} separate runs of keys in {node.name}"
        return Reason("layout", f"{text}; expected each rank's keys to be consecutive")
    if same_size(sharded.chunk, 0):
        return Reason("layout", f"{node.name} has no keys")
    return GatheredOperand(collective, follower.raw, part.cuts, part.layout)


def _other_results(reader: AttentionNode) -> Reason | None:
    """If a node reads a result of the attention op other than the output, the site must stay as written. Returns this
    reason, or ``None``."""
    others = [node for node, number in reader.results().items() if number and node.users]
    if not others:
        return None
    text = f"{others[0].name}, result {reader.results()[others[0]]} of {reader.node.name}, is read or saved for the"
    return Reason("other_users", f"{text} backward graph; expected only the output of the attention to be read")
