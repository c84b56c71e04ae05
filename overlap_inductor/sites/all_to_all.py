# SPDX-License-Identifier: Apache-2.0
"""Read an all-to-all: which part each rank gets, and which dims are divided among ranks.

If all parts have one size, input and result hold the same *atoms*: dims, or factors of dims (``sites.layouts``). A
bracket holds the atoms of one dim. The rank atom ``R`` counts the receivers in the input, and the senders in the
result::

    all_to_all_single(x [R c, h])                     [R c] [h]      ->  [R c] [h]
    shard_dim_alltoall(x [a, R b], gather 0, shard 1)  [a] [R b]     ->  [R a] [b]

If the parts may differ in size, input and result have different rank atoms, which count rows (``Atom.uneven``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from overlap_inductor.facts.decision import Reason
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.torch_compat import operators


def changes_shards(node: fx.Node) -> bool:
    """Whether ``node`` is DTensor's exchange of shard dims, whose result needs no wait."""
    return operators.qualified_name(node) == ("_dtensor", "shard_dim_alltoall")


def refusal(collective: CollectiveNode) -> Reason | None:
    """Why no pattern can overlap this all-to-all, or ``None``."""
    node, ranks = collective.node, collective.world_size
    if not changes_shards(node):
        return None
    size = tools.shape(collective.input)[_dims(node)[1]]
    if statically_known_true(size % ranks == 0):
        return None
    text = f"a dim of size {size} is cut between {ranks} ranks; expected a multiple of {ranks}"
    return Reason("uneven_splits", text)


def unequal(collective: CollectiveNode) -> Reason | None:
    """Why the ranks may get unequal parts of the input, or ``None``."""
    if not is_uneven(collective):
        return refusal(collective)
    text = f"{collective.node.name} {Splits.of(collective.node)}; expected equal parts"
    return Reason("uneven_splits", text)


@dataclass(frozen=True)
class Splits:
    """The numbers of rows that this rank sends to and receives from each rank: ints, or nodes of the graph."""

    sent: list[Any]
    received: list[Any]

    @classmethod
    def of(cls, node: fx.Node) -> Splits:
        sent, received = (list(operators.argument(node, f"{way}_split_sizes")) for way in ("input", "output"))
        return cls(sent, received)

    def __str__(self) -> str:
        sent, received = (", ".join(map(str, _sizes(sizes))) for sizes in (self.sent, self.received))
        return f"sends [{sent}] rows and receives [{received}]"


def write_row_counts(collective: CollectiveNode) -> None:
    """Replace each read of the result's number of rows by a sum of the received parts' sizes. Then the collective can
    be moved down or erased."""
    if changes_shards(collective.node):
        return
    received = Splits.of(collective.node).received
    for source in collective.chain():
        for user in [u for u in source.users if u.target is torch.ops.aten.sym_size.int and u.args[1] == 0]:
            with user.graph.inserting_before(user):
                count = user.graph.call_function(torch.sym_sum, (received,))
            count.meta["val"] = tools.value(user)
            user.replace_all_uses_with(count)
            user.graph.erase_node(user)


def is_uneven(collective: CollectiveNode) -> bool:
    """Whether the ranks' parts are not known to be equal."""
    node, ranks = collective.node, collective.world_size
    if changes_shards(node):
        return False
    rows, splits = tools.shape(collective.input)[0], Splits.of(node)
    sizes = _sizes([*splits.sent, *splits.received])
    whole = same_size(sizes[0] * ranks, rows) or (
        statically_known_true(rows % ranks == 0) and same_size(sizes[0], rows // ranks)
    )
    return not whole or not all(same_size(size, sizes[0]) for size in sizes)


def layouts_of(collective: CollectiveNode) -> tuple[Layout, Layout]:
    """``(layout of the input, layout of the result)``."""
    shape, ranks = tools.shape(collective.input), collective.world_size
    if is_uneven(collective):
        others = [Atom(size) for size in shape[1:]]
        return Layout.uneven(shape[0], others), Layout.uneven(tools.shape(collective.wait)[0], others)
    if not changes_shards(collective.node):
        layout = _by_ranks(collective)
        return layout, layout
    gathered, scattered = _dims(collective.node)
    rank = Atom(ranks, rank=True)
    dims = [(Atom(size // ranks if d == scattered else size),) for d, size in enumerate(shape)]

    def with_rank(at: int) -> Layout:
        return Layout(tuple((rank, *atoms) if d == at else atoms for d, atoms in enumerate(dims)))

    return with_rank(scattered), with_rank(gathered)


def _by_ranks(collective: CollectiveNode) -> Layout:
    """The layout of an input whose dim 0 is cut into equal parts.

    If a view with symbolic sizes flattens a tensor ``[R, ...]`` to this input, the layout has that tensor's atoms. A
    later ``Layout.reshape`` could not split an atom of symbolic size into these atoms.
    """
    shape, ranks, source = tools.shape(collective.input), collective.world_size, collective.input
    known = all(isinstance(size, int) for size in shape)
    while not known and (tools.is_reshape(source) or source.target in tools.SAME):
        source = source.args[0]
        first, *others = tools.shape(source)
        if others and isinstance(first, int) and first == ranks:
            atoms = ((Atom(ranks, rank=True),), *((Atom(size),) for size in others))
            return Layout(atoms).reshape(shape)
    return Layout.scattered(shape, ranks)


def _dims(node: fx.Node) -> tuple[int, int]:
    """``(gather_dim, shard_dim)`` of an exchange of shard dims, not negative."""
    count = len(tools.shape(node.args[0]))
    gathered, scattered = (int(operators.argument(node, f"{kind}_dim")) % count for kind in ("gather", "shard"))
    return gathered, scattered


def _sizes(splits: list[Any]) -> list[Any]:
    return [tools.value(size) if isinstance(size, fx.Node) else size for size in splits]
