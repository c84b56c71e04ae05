"""Padding of an output that is gathered: a rank whose shard of the output is smaller than others' appends zeros, since
an all-gather moves as much of every rank.

The site is what it is on ranks that have all of it; on this one each piece is padded when it leaves::

    mm [rows, 50] -> view [b, t, 50] -> pad [b, t, 51] -> all_gather         # elsewhere 51 columns, and no padding
    for band in rows: send pad(mm(band))                                      # bands of the rows that all ranks have

Bands, sizes and the order of what moves rest on the gathered tensor, never on what this rank has of it.
"""

from __future__ import annotations

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import product
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import Padding
from overlap_inductor.sites.nodes import ReduceNodes
from overlap_inductor.sites.pieces import padded


def padding_before(node: fx.Node) -> fx.Node | None:
    """The node that appends zeros to what ``node`` is in another shape, if there is one."""
    while tools.is_reshape(node) or node.target in tools.SAME:
        node = node.args[0]  # type: ignore[assignment]
    found = padded(node)
    return node if found is not None and isinstance(tools.shape(found[0])[found[1]], int) else None


def nodes_between(node: fx.Node, source: fx.Node) -> set[fx.Node]:
    """``node`` and what it is a view of or pads, without ``source``."""
    found = set()
    while node is not source:
        found.add(node)
        node = node.args[0]  # type: ignore[assignment]
    return found


def padded_output(
    padding: fx.Node, leaf: MatmulNode, layout: Layout, sharded: ShardedDim
) -> tuple[Padding, ShardedDim]:
    """What ``padding`` appends zeros to, and how the output of ``leaf`` (in ``layout``) is cut then: as ``sharded``
    where that is columns, with missing rows where it is rows. Raises ``LayoutError`` where it is neither."""
    source, dim = padded(padding)  # type: ignore[misc]
    shape, out = tools.shape(source), tools.shape(leaf.node)
    appended = tools.shape(padding)[dim] - shape[dim]
    if dim == len(shape) - 1 and same_size(shape[-1], out[-1]):
        return Padding(padding, appended), sharded
    atoms, ahead = layout.refined().dims[0], tools.numel(shape[:dim])
    if same_size(ahead, 1) and same_size(shape[dim], out[0]):
        return Padding(padding, 0), ShardedDim(0, 1, shape[dim] + appended, shape[dim], (), (), appended)
    # (Only views stand between, so that the padded dim is one atom of the rows.)
    at = next(
        (i for i, a in enumerate(atoms) if same_size(a.size, shape[dim]) and same_size(product(atoms[:i]), ahead)), None
    )
    if at is None or len(out) != 2:
        raise LayoutError(
            f"zeros are appended to dim {dim} of the output {shape}, "
            f"which is neither rows nor columns of {leaf.node.name} {out}"
        )
    before, after = atoms[:at], atoms[at + 1 :]
    unit = product(after)
    return Padding(padding, 0), ShardedDim(
        0, product(before), (shape[dim] + appended) * unit, out[0], tuple(before), tuple(after), appended * unit
    )


def gathered_shape(nodes: ReduceNodes) -> list[Size]:
    """The shape of the matmul's result with the rows and columns that its rank appends before it is gathered: the same
    on every rank."""
    shape, sharded = nodes.shape, nodes.sharded
    if nodes.padding is None:
        return shape
    return [
        sharded.outer * sharded.chunk if sharded.short else shape[0],
        *shape[1:-1],
        shape[-1] + nodes.padding.columns,
    ]
