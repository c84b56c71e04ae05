"""Ordering edges between nodes that no data ties together (Inductor's ``control_deps``)."""

from __future__ import annotations

from torch import fx


def preserve_order(graph: fx.Graph, edges: dict[fx.Node, set[fx.Node]]) -> None:
    """Make Inductor schedule every key after its values.

    Wraps the keys in ``control_deps``, which hides their targets from later matching: call it last.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    position = {n: i for i, n in enumerate(graph.nodes)}
    ordered = {n: OrderedSet(sorted(after, key=position.__getitem__)) for n, after in edges.items() if after}
    if ordered:
        preserve_node_ordering(graph, ordered)
