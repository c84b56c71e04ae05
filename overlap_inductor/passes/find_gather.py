# SPDX-License-Identifier: Apache-2.0
"""Find ``all-gather -> matmul``: follow the gathered tensor forward to every matmul of which it is an operand.

The matmuls that can be cut are the *consumers* of one site. Before and after the rewrite (R ranks)::

    wait = wait_tensor(all_gather(x [s, h]))        # [R s, h]
    view = reshape(wait)                            # views, row-wise and pointwise ops may come in between
    y, z = mm(view, w), mm(view, v)                 # consumers; each has the gathered operand's side, layout, role
    ->  y, z from the steps' pieces                 # each step: mm of one shard while the next shard moves
"""

from __future__ import annotations

from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.passes import examples
from overlap_inductor.passes.follow import Follower
from overlap_inductor.passes.follow import add_row_wise
from overlap_inductor.passes.follow import consumers_of
from overlap_inductor.passes.pattern import Match
from overlap_inductor.passes.pattern import Miss
from overlap_inductor.passes.pattern import Search
from overlap_inductor.sites import beside
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.gather_epilogue import find_epilogue
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.graph_inputs import is_parameter
from overlap_inductor.torch_compat.hiding import gather_hider

aten = tools.aten


def find_gather(collective: CollectiveNode) -> tuple[GatherNodes | None, list[Reason]]:
    """``(site at an all-gather or None, obstacles)``. If there is neither a site nor an obstacle, the walk reached no
    operand or scale of a matmul."""
    follower = Follower(collective, Layout.gathered(tools.shape(collective.input), collective.world_size))
    follower.run()
    consumers = consumers_of(follower)
    if not consumers:
        return None, follower.obstacles
    nodes = GatherNodes(collective, follower.raw, consumers, follower.through, find_epilogue(collective, consumers))
    add_row_wise(nodes, follower)
    return nodes, follower.obstacles


def is_weight_gather(collective: CollectiveNode, nodes: GatherNodes | None, phase: str) -> bool:
    """Whether this is FSDP's gather of a parameter (``is_parameter``), possibly cast, viewed or padded. It must be the
    right-hand operand of each consumer in ``nodes``. If parameters are unknown, every input but a tangent counts as a
    parameter, but not without ``nodes``."""
    source = collective.input
    while (
        source.op == "call_function"
        and len(source.all_input_nodes) == 1
        and (
            tools.is_cast(source)
            or tools.is_reshape(source)
            or tools.permutation(source) is not None
            or source.target is aten.constant_pad_nd.default
        )
    ):
        source = source.all_input_nodes[0]
    if source.op not in ("placeholder", "get_attr") or source.name.startswith("tangents"):
        return False
    known = is_parameter(source) if source.op == "placeholder" else None
    if known is False or nodes is None:
        return bool(known)
    if phase == "backward":
        # The matmul of a weight's gradient may have a gathered activation on the right, and a transposed gradient on
        # the left. Beside a gathered weight, the left operand is not transposed. So a gather beside a transposed left
        # operand is no gather of a weight.
        return all(c.operand == "rhs" and tools.permutation(c.matmul.lhs) is None for c in nodes.consumers)
    return all(c.operand == "rhs" for c in nodes.consumers)


class AllGatherMatmul:
    """Pattern ``all-gather -> matmul`` (see ``Pattern``). If a setting of Inductor already hides FSDP's gather of a
    weight, the gather is no site."""

    name = "all_gather_matmul"
    kind = "all_gather"
    early = True
    example = examples.ALL_GATHER_MATMUL

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        if not tools.shape(collective.input):
            return Miss([Reason("no_matmul", beside.NO_MATMUL)], final=True)
        nodes, obstacles = find_gather(collective)
        broadcast = _only_broadcast(collective.wait)
        is_weight = is_weight_gather(collective, None if broadcast else nodes, search.phase)
        if is_weight and (hides := gather_hider()) is not None:
            text = (
                f"{collective.input.name} is a weight that is gathered before its use (FSDP);"
                f" torch._inductor.config.{hides} is on and moves the gather under earlier work"
            )
            anchor = nodes.consumers[0].matmul.node if nodes is not None else None
            return Miss([Reason("fsdp_weight_gather", text)], final=True, anchor=anchor)
        if is_weight and broadcast:
            text = (
                f"{collective.input.name} is a weight that is broadcast to all tokens, as that of a norm or a bias is;"
                " no matmul multiplies it, so none hides its gather"
            )
            return Miss([Reason("no_matmul", text)], final=True)
        if nodes is None:
            return Miss(obstacles)
        first = nodes.consumers[0]
        return Match(nodes, _logical_dim(nodes), first.role)


def _only_broadcast(weight: fx.Node) -> bool:
    """Whether ``weight`` is only read, possibly cast, viewed or computed element by element, where it is broadcast to a
    larger tensor, or as the bias of a matmul."""
    pending, broadcast = [(weight, False)], False
    while pending:
        node, expanded = pending.pop()
        for user in node.users:
            matmul = matmuls.parse(user)
            if matmul is not None and matmul.bias is node:
                broadcast = True
            elif user.target is aten.expand.default:
                same = same_size(tools.numel(tools.shape(user)), tools.numel(tools.shape(node)))
                pending.append((user, expanded or not same))
            elif user.target is aten.slice.Tensor or tools.is_reshape(user) or tools.permutation(user) is not None:
                pending.append((user, expanded))
            elif not tools.is_pointwise(user):
                if user.op != "output":
                    return False
            elif len(tools.shape(user)) > len(tools.shape(node)) or (expanded and len(user.all_input_nodes) > 1):
                broadcast = True
            else:
                pending.append((user, expanded))
    return broadcast


def _logical_dim(nodes: GatherNodes) -> int | None:
    """The dim along which the program gathers: the dim of the ``cat`` that joins the shards, or 0 without a ``cat``."""
    sources = [n for n in nodes.through if n.target is aten.cat.default]
    return operators.argument(sources[0], "dim") % len(tools.shape(sources[0])) if sources else 0
