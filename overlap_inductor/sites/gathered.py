"""Find out whether other nodes than the site's matmuls read a gathered tensor."""

from __future__ import annotations

from operator import getitem

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.nodes import GatherNodes


def copies(node: fx.Node) -> bool:
    """Whether ``node`` is a copy or a bitcast of its input."""
    return tools.is_bitcast(node) or node.target in tools.SAME


def gathered_used(nodes: GatherNodes) -> bool:
    """Whether something besides the site's matmuls reads the gathered tensor."""
    matmuls = {c.matmul.node for c in nodes.consumers}
    pending = [nodes.collective.wait]
    while pending:
        for user in pending.pop().users:
            # Pieces joined along another dim are the gathered tensor again, so splits and their elements are followed.
            if user in nodes.through or copies(user) or user.target in (*tools.SPLITS, getitem):
                pending.append(user)
            elif user not in matmuls:
                return True
    return False
