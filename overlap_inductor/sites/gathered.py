"""Who reads a gathered tensor."""

from __future__ import annotations

from operator import getitem

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import GatherNodes


def copies(node: fx.Node) -> bool:
    """Whether ``node`` holds the same elements as what it reads."""
    return tools.is_bitcast(node) or node.target in tools.SAME


def gathered_used(nodes: GatherNodes) -> bool:
    """Whether something besides the site's matmuls reads the gathered tensor."""
    matmuls = {c.matmul.node for c in nodes.consumers}
    pending = [nodes.collective.wait]
    while pending:
        for user in pending.pop().users:
            # (Pieces that are joined along another dim are pieces no more.)
            if user in nodes.through or copies(user) or user.target in (*tools.SPLITS, getitem):
                pending.append(user)
            elif user not in matmuls:
                return True
    return False
