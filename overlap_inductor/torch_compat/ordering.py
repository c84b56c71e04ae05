# SPDX-License-Identifier: Apache-2.0
"""Keeps nodes in an order that no data dependency enforces, and checks that the order was kept.

Unrolled steps of a ring write to the buffer of a transfer in flight, and read from it. Some later passes of Inductor
move nodes by data dependencies alone. If such a pass is on (``moving_pass``), rings are not unrolled. If another pass
has moved a step (``moved``), the compile raises an error. Without this error, the graph could read data that has not
arrived.

``preserve_order`` makes each key of ``edges`` run after its values, with Inductor's ``control_deps``::

    start = gather_start(x); y = mm(x, w); wait = gather_step(start)     # edges {y: {start}, wait: {y}}
    ->
    start = gather_start(x); y = control_deps((start,), mm, x, w); wait = control_deps((y,), gather_step, start)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from overlap_inductor.torch_compat.operators import argument
from overlap_inductor.torch_compat.operators import qualified_name

STARTS = ("gather_start", "exchange_start")
"""Ops whose result is the buffer of a transfer in flight."""
MEMBERS = {
    "gather_step": "gathered",
    **dict.fromkeys(("exchange_send", "exchange_keep", "exchange_wait", "reduce_tail"), "buffer"),
}
"""Ops that write to such a buffer, and the name of the argument by which they take it."""
_PLACING = "place_ranks"
"""An op that writes a part of a result into its first argument, an empty tensor at first. The readers of the result
read this tensor itself. So only their order in the graph puts them after the writes."""
SCHEDULING = "aten_distributed_optimizations.enable_overlap_scheduling"
_NOTED = "overlap_inductor_order"


def starts_transfer(node: fx.Node) -> bool:
    namespace, name = qualified_name(node)
    return namespace == "overlap_inductor" and name in STARTS


def moving_pass() -> str | None:
    """The name of an Inductor setting that is on and lets a later pass move nodes past writes, or ``None``."""
    from torch._inductor import config

    for name in ("bucket_all_gathers_fx", "bucket_reduce_scatters_fx", "bucket_all_reduces_fx"):
        if getattr(config, name, "none") != "none":
            return name
    distributed: Any = getattr(config, "aten_distributed_optimizations", None)
    return SCHEDULING if getattr(distributed, "enable_overlap_scheduling", False) else None


def note_order(graph: fx.Graph) -> None:
    """Record, for each node that uses a buffer in flight or a result that is written in parts (``_PLACING``), how many
    writes to it precede the node."""
    _each_access(graph, lambda node, counts: node.meta.__setitem__(_NOTED, counts))


def moved(graph: fx.Graph) -> str | None:
    """The name of a node whose number of preceding writes differs from the record of ``note_order``, or ``None``. Nodes
    that were added after ``note_order`` have no record, and are not checked."""
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
        elif name == _PLACING:
            written[node.args[0]] = written.get(node.args[0], 0) + 1


def preserve_order(graph: fx.Graph, edges: dict[fx.Node, set[fx.Node]]) -> None:
    """Make Inductor schedule every key of ``edges`` after its values. No tensor is copied for this.

    Call this last in a pass: ``control_deps`` hides the targets of the keys from pattern matching.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    position = {n: i for i, n in enumerate(graph.nodes)}
    ordered = {n: OrderedSet(sorted(after, key=position.__getitem__)) for n, after in edges.items() if after}
    if ordered:
        preserve_node_ordering(graph, ordered)
