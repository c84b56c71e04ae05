# SPDX-License-Identifier: Apache-2.0
"""Find ``all-to-all -> experts -> all-to-all``: follow the rows from the first exchange through the experts to the
exchange that returns them (``sites.dispatched_nodes``)::

    wait_tensor(all_to_all(x))[index] -> grouped matmuls, pointwise ops -> index_put(empty, [index], y) -> all_to_all

The rewrite cuts the experts' rows into one piece for each rank that sent rows. A piece can be computed
alone, because every op between the exchanges computes each row by itself, and a row keeps its expert.

The index must hold each row once (``sites.permutations``). ``index_put`` would leave a missing row at its old values,
and a repeated row would be computed twice.
"""

from __future__ import annotations

from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import permutations
from overlap_inductor.sites.all_to_all import Splits
from overlap_inductor.sites.all_to_all import changes_shards
from overlap_inductor.sites.dispatched_nodes import DispatchedNodes
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.row_steps import is_grouped
from overlap_inductor.sites.row_steps import is_pointwise_on_rows
from overlap_inductor.torch_compat import operators

aten = tools.aten


def find_dispatched(
    dispatch: CollectiveNode, collectives: dict[fx.Node, CollectiveNode]
) -> tuple[DispatchedNodes | None, Reason | None]:
    """``(site at the first exchange, None)``, or ``(None, why there is no site)``. The reason is ``None`` if the
    nodes do not have the form above, for example if there is no grouped matmul. ``collectives``: those which may be
    part of a site, by node."""
    indexed = _indexed(dispatch)
    if indexed is None:
        return None, None
    steps = _steps(indexed)
    if not any(map(is_grouped, steps)):
        return None, None
    put = next((u for n in steps for u in n.users if u.target is aten.index_put.default and u.args[2] is n), None)
    combine = next((collectives[u] for u in put.users if u in collectives), None) if put is not None else None
    if put is None or combine is None or combine.kind != "all_to_all" or combine.group_name != dispatch.group_name:
        return None, None
    nodes = DispatchedNodes(dispatch, combine, steps, put)
    text = _why_not(nodes, indexed)
    return (nodes, None) if text is None else (None, Reason("grouped_matmul", text))


def _indexed(dispatch: CollectiveNode) -> fx.Node | None:
    """The only reader of the exchange's rows, if it puts them into the order of an index; else ``None``."""
    if changes_shards(dispatch.node) or len(tools.shape(dispatch.wait)) != 2:
        return None
    readers = [u for u in dispatch.wait.users if u.target is not aten.sym_size.int]
    if len(readers) != 1 or readers[0].target is not aten.index.Tensor:
        return None
    index = readers[0].args[1]
    whole = len(index) == 1 and tools.is_tensor(index[0]) and len(tools.shape(index[0])) == 1
    known = isinstance(tools.shape(readers[0])[1], int)
    return readers[0] if whole and known and not tools.dtype(index[0]).is_floating_point else None


def _steps(indexed: fx.Node) -> list[fx.Node]:
    """In graph order, ``indexed`` and the row-wise nodes from which the rows for ``index_put`` are computed."""
    found = {indexed}

    def visit(node: fx.Node) -> bool:
        if _by_rows(node, indexed, found):
            found.add(node)
            return True
        return False

    tools.walk([indexed], visit)
    return sorted(_needed(found))


def _needed(found: set[fx.Node]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    pending = [n for n in found if any(u.target is aten.index_put.default and u.args[2] is n for u in n.users)]
    while pending:
        node = pending.pop()
        if node in found and node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return needed


def _by_rows(node: fx.Node, indexed: fx.Node, found: set[fx.Node]) -> bool:
    """Whether ``node`` computes each of its rows from the same row of nodes in ``found``."""
    if node.op != "call_function" or not tools.is_tensor(node) or len(tools.shape(node)) != 2:
        return False
    rows = tools.shape(indexed)[0]
    if not same_size(tools.shape(node)[0], rows) or not isinstance(tools.shape(node)[1], int):
        return False
    if is_grouped(node):
        return node.args[0] in found and node.args[1] not in found
    return is_pointwise_on_rows(node, rows)


def _why_not(nodes: DispatchedNodes, indexed: fx.Node) -> str | None:
    """Why the nodes between the two exchanges cannot be computed in pieces, or ``None``."""
    put, dispatch, combine = nodes.put, nodes.dispatch, nodes.combine
    index = indexed.args[1][0]
    if list(put.args[1]) != [index]:
        return f"{indexed.name} and {put.name} have different indices; expected rows to return to their places"
    if not same_size(tools.shape(index)[0], tools.shape(dispatch.wait)[0]):
        return f"the index {index.name} does not have one element for each row of {dispatch.wait.name}"
    if not tools.same_shape(put, put.args[2]) or not same_size(tools.shape(put)[0], tools.shape(dispatch.wait)[0]):
        return f"{put.name} {tools.shape(put)} does not return one row for each row of {dispatch.wait.name}"
    base, adds = put.args[0], operators.argument(put, "accumulate", False)
    if adds and not (base.target is aten.full.default and base.args[1] == 0):
        return f"{put.name} adds rows to {base.name}, which is not known to be zero"
    if set(put.users) != {combine.node}:
        return f"{put.name} is also read by a node other than {combine.node.name}; expected no other reader"
    sent, returned = Splits.of(dispatch.node), Splits.of(combine.node)
    if (sent.sent, sent.received) != (returned.received, returned.sent):
        return f"{dispatch.node.name} {sent}, and {combine.node.name} {returned}; expected the same parts to return"
    ends = {m.ends for m in nodes.grouped}
    if len(ends) != 1:
        return f"the grouped matmuls have different ends of experts' rows ({', '.join(sorted(e.name for e in ends))})"
    known: dict[fx.Node, bool] = {}
    inside = {*nodes.steps}
    read = [n for step in nodes.steps[1:] for n in step.all_input_nodes if n not in inside]
    late = next((n for n in read if tools.depends_on(n, dispatch.wait, known)), None)
    if late is not None:
        return f"the experts read {late.name}, which is not computed row by row from {dispatch.wait.name}"
    blocking = nodes.immovable()
    if blocking is not None:
        return f"{blocking.name} reads the experts' rows before they are returned, and it cannot be moved"
    if not permutations.is_permutation(index):
        return f"{index.name}, by which {put.name} returns rows, is not known to hold each row once"
    return None
