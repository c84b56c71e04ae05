# SPDX-License-Identifier: Apache-2.0
"""Find ``all-to-all -> matmul``: follow the result forward to its matmuls, and the input backward through its views.

The site sends elements in the order in which the first matmul reads them. So the permuted copies before and after the
all-to-all become one copy before it, or none::

    clone(permute(x)) -> all_to_all -> permute -> clone -> mm        # as written
    x in the matmul's order -> slices -> mm of each slice            # the site

The all-to-all's own order is kept if

- a row-wise op stands before a matmul, or
- the first matmul does not read exactly the received elements, or
- the parts that the ranks send may differ in size.
"""

from __future__ import annotations

from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.passes.follow import Follower
from overlap_inductor.passes.follow import add_row_wise
from overlap_inductor.passes.follow import consumers_of
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.all_to_all import Splits
from overlap_inductor.sites.all_to_all import is_uneven
from overlap_inductor.sites.all_to_all import layouts_of
from overlap_inductor.sites.exchange_nodes import ReceivedNodes
from overlap_inductor.sites.gather_epilogue import find_epilogue
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.uneven_nodes import UnevenReceivedNodes

Received = ReceivedNodes | UnevenReceivedNodes


def find_received(collective: CollectiveNode) -> tuple[Received | None, list[Reason]]:
    """``(site at an all-to-all or None, obstacles)``. If there is neither a site nor an obstacle, the
    walk reached no matmul."""
    try:
        return _found(collective)
    except LayoutError as error:
        return None, [Reason("layout", str(error))]


def _found(collective: CollectiveNode) -> tuple[Received | None, list[Reason]]:
    sent, given = layouts_of(collective)
    if is_uneven(collective):
        return _uneven(collective, given)
    # ``sent`` and ``given`` share atoms (factors of a dim: ``layouts.Atom``), which ``behind_views`` may split. So it
    # runs before the consumers' layouts are made.
    source, layout = behind_views(collective.input, sent)
    follower = Follower(collective, given)
    follower.run()
    consumers = consumers_of(follower)
    if not consumers:
        return None, follower.obstacles
    epilogue = find_epilogue(collective, consumers)
    nodes = ReceivedNodes(
        collective, given, consumers, follower.through, epilogue, source=source, source_layout=layout, given=given
    )
    add_row_wise(nodes, follower)
    nodes.raw = _wire(given, consumers[0].layout if not nodes.layouts else given)
    return nodes, follower.obstacles


def _uneven(collective: CollectiveNode, given: Layout) -> tuple[Received | None, list[Reason]]:
    follower = Follower(collective, given)
    follower.run()
    consumers, obstacles = consumers_of(follower), follower.obstacles
    nodes = UnevenReceivedNodes(collective, given, consumers, follower.through)
    computed = next((c.operand_node for c in consumers if not nodes.only_views(c.operand_node)), None)
    if computed is not None:
        text = f"{computed.name} is computed from parts of {collective.node.name}, which {Splits.of(collective.node)}"
        obstacles = [*obstacles, Reason("uneven_splits", f"{text}; expected views only")]
    split = next((c for c in consumers if c.sharded.before or c.sharded.after), None)
    if split is not None:
        sent = f"{collective.node.name} {Splits.of(collective.node)}"
        text = f"{sent}, and {split.matmul.node.name} reads each received row as parts of several rows"
        expected = "expected each received row to be one row of the matmul"
        obstacles = [*obstacles, Reason("uneven_splits", f"{text}; {expected}")]
    return (nodes if consumers and computed is None and split is None else None), obstacles


def _wire(given: Layout, read: Layout) -> Layout:
    """The layout of what is sent: a slice for each rank. The elements of a slice have the order of layout ``read``. If
    ``read`` and ``given`` differ in their elements, the order is that of ``given``."""
    rank, atoms = next(a for a in given.flat() if a.rank), given.without_rank().flat()
    wanted = read.without_rank().flat()
    if {id(a) for a in wanted} == {id(a) for a in atoms}:
        atoms = wanted
    return Layout(((rank, *atoms[:1]), *((a,) for a in atoms[1:])))


def behind_views(node: fx.Node, layout: Layout) -> tuple[fx.Node, Layout]:
    """``(source, layout of source)``, where ``node``, of layout ``layout``, is a view or a permuted copy of ``source``.
    A reshape that the layout cannot follow ends the search for ``source``."""
    while node.op == "call_function":
        order = tools.permutation(node)
        if order is not None:
            layout = layout.permute(sorted(range(len(order)), key=order.__getitem__))
        elif tools.is_reshape(node):
            try:
                layout = layout.reshape(tools.shape(node.args[0]))
            except LayoutError:
                break
        elif node.target not in tools.SAME:
            break
        node = node.args[0]
    return node, layout
