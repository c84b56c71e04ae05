"""The order of nodes that no data ties together: edges that keep it (Inductor's ``control_deps``), what in Inductor
does not keep it, and whether it was kept.

A ring's unrolled steps write into a buffer that is in flight and read it: they stand in the order of the graph, as
functional passes leave it. Inductor's own passes behind ours that move nodes look at data alone. So rings are not
unrolled where one is on; and where somebody else's pass has moved a step, the compile ends with an error, since a run
would read what has not arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from overlap_inductor.torch_compat.operators import argument
from overlap_inductor.torch_compat.operators import qualified_name

STARTS = ("gather_start", "exchange_start")
"""Ops whose result is the buffer of a transfer in flight."""
MEMBERS = {"gather_step": "gathered", "exchange_send": "buffer", "exchange_wait": "buffer", "reduce_tail": "buffer"}
"""Ops that write to it, and which argument it is."""
_NOTED = "overlap_inductor_order"


def moving_pass() -> str | None:
    """A setting of Inductor by which it moves nodes behind our pass without regard to what they write in place;
    ``None`` where there is none."""
    from torch._inductor import config

    for name in ("bucket_all_gathers_fx", "bucket_reduce_scatters_fx", "bucket_all_reduces_fx"):
        if getattr(config, name, "none") != "none":
            return name
    distributed: Any = getattr(config, "aten_distributed_optimizations", None)
    return (
        "aten_distributed_optimizations.enable_overlap_scheduling"
        if getattr(distributed, "enable_overlap_scheduling", False)
        else None
    )


def note_order(graph: fx.Graph) -> None:
    """Write down at each node that reads or writes a buffer in flight how many writes to it stand before."""
    _each_access(graph, lambda node, counts: node.meta.__setitem__(_NOTED, counts))


def moved(graph: fx.Graph) -> str | None:
    """The name of a node that does not stand where ``note_order`` found it, or ``None``. (Nodes that a pass has made
    anew know nothing of it.)"""
    found: list[str] = []
    _each_access(
        graph, lambda node, counts: found.append(node.name) if node.meta.get(_NOTED, counts) != counts else None
    )
    return found[0] if found else None


def _each_access(graph: fx.Graph, visit: Callable[[fx.Node, dict[str, int]], object]) -> None:
    written: dict[fx.Node, int] = {}
    for node in graph.nodes:
        counts = {buffer.name: written[buffer] for buffer in node.all_input_nodes if buffer in written}
        if counts:
            visit(node, counts)
        namespace, name = qualified_name(node)
        if namespace != "overlap_inductor":
            continue
        if name in STARTS:
            written[node] = 0
        elif name in MEMBERS and (buffer := argument(node, MEMBERS[name])) in written:
            written[buffer] += 1


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
