# SPDX-License-Identifier: Apache-2.0
"""Handle the padding of an output that is gathered. A rank with a smaller shard than other ranks
appends zeros to its shard.

Missing columns are appended to each piece before it is sent. Missing rows are appended to the matmul's operand instead.
For missing columns::

    mm [rows, 50] -> view [b, t, 50] -> pad [b, t, 51] -> all_gather         # on other ranks 51 columns, no padding
    for band in rows: send pad(mm(band))                                      # the same bands on all ranks

Bands, sizes and the order of transfers depend only on the gathered tensor, so they are equal on all ranks.
"""

from __future__ import annotations

from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import product
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.pieces import padded
from overlap_inductor.sites.reduce_nodes import Padding


def padding_before(node: fx.Node) -> fx.Node | None:
    """Follows views and copies from ``node`` back to their source. Returns the source if it appends zeros to one dim of
    known size; else ``None``."""
    while tools.is_reshape(node) or node.target in tools.SAME:
        node = node.args[0]
    found = padded(node)
    return node if found is not None and isinstance(tools.shape(found[0])[found[1]], int) else None


def nodes_between(node: fx.Node, source: fx.Node) -> set[fx.Node]:
    """``node`` and the chain of first arguments down to ``source``, without ``source``."""
    found = set()
    while node is not source:
        found.add(node)
        node = node.args[0]
    return found


def padded_output(
    padding: fx.Node, leaf: MatmulNode, layout: Layout, sharded: ShardedDim
) -> tuple[Padding, ShardedDim]:
    """Returns a ``Padding`` for the node ``padding``, and how the output of ``leaf`` is cut.

    Args:
        padding: the node that ``padding_before`` found. If it appends no columns, the returned ``ShardedDim`` counts
            what it appends as missing.
        layout: layout of the output of ``leaf``.
        sharded: how the output would be cut without padding.

    Raises:
        LayoutError: the padded dim is neither dim 0 of the output of ``leaf`` nor its last dim. In an output of two
            dims, it may also be a part of dim 0.
    """
    source, dim = padded(padding)  # type: ignore[misc]
    shape, out = tools.shape(source), tools.shape(leaf.node)
    appended = tools.shape(padding)[dim] - shape[dim]
    if dim == len(shape) - 1 and same_size(shape[-1], out[-1]):
        return Padding(padding, appended), sharded
    atoms, ahead = layout.refined().dims[0], tools.numel(shape[:dim])
    if same_size(ahead, 1) and same_size(shape[dim], out[0]):
        return Padding(padding, 0), ShardedDim(0, 1, shape[dim] + appended, shape[dim], (), (), appended)
    # The elements of ``source`` have the same order as those of the output of ``leaf``. So a padded dim that is a part
    # of dim 0 is looked for among the atoms of dim 0.
    at = next(
        (i for i, a in enumerate(atoms) if same_size(a.size, shape[dim]) and same_size(product(atoms[:i]), ahead)), None
    )
    if at is None or len(out) != 2:
        raise LayoutError(
            f"zeros are appended along dim {dim} of the output {shape}; this dim is neither dim 0 nor the last dim of"
            f" {leaf.node.name} {out}"
        )
    before, after = atoms[:at], atoms[at + 1 :]
    unit = product(after)
    return Padding(padding, 0), ShardedDim(
        0, product(before), (shape[dim] + appended) * unit, out[0], tuple(before), tuple(after), appended * unit
    )
