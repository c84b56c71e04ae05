# SPDX-License-Identifier: Apache-2.0
"""Read an all-to-all: whether each rank gets an equal part, and where the ranks are in its input and in its result.

Input and result hold the same atoms (``sites.layouts``). In the input the rank atom counts the ranks that receive, in
the result those that sent::

    all_to_all_single(x [R c, h])                     [R c] [h]      ->  [R c] [h]
    shard_dim_alltoall(x [a, R b], gather 0, shard 1)  [a] [R b]     ->  [R a] [b]
"""

from __future__ import annotations

from typing import Any

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


def unequal(collective: CollectiveNode) -> Reason | None:
    """Why ranks do not get equal parts of the input, or ``None`` if they do."""
    node, ranks = collective.node, collective.world_size
    if changes_shards(node):
        size = tools.shape(collective.input)[_dims(node)[1]]
        if statically_known_true(size % ranks == 0):
            return None
        text = f"a dim of size {size} is cut between {ranks} ranks; expected a multiple of {ranks}"
        return Reason("uneven_splits", text)
    rows = tools.shape(collective.input)[0]
    sent, received = (_sizes(operators.argument(node, f"{way}_split_sizes")) for way in ("input", "output"))
    if any(tools.has_unbacked([size]) for size in (*sent, *received)):
        return Reason(
            "uneven_splits",
            f"the parts of {node.name} have sizes that are only known at run time; expected equal parts of known sizes",
        )
    whole = same_size(sent[0] * ranks, rows) or (
        statically_known_true(rows % ranks == 0) and same_size(sent[0], rows // ranks)
    )
    if not whole or not all(same_size(size, sent[0]) for size in (*sent, *received)):
        return Reason(
            "uneven_splits",
            f"{node.name} sends parts of {_text(sent)} of {rows} rows and receives {_text(received)}; expected {ranks}"
            " parts that are known to be equal",
        )
    return None


def layouts_of(collective: CollectiveNode) -> tuple[Layout, Layout]:
    """``(layout of the input, layout of the result)``."""
    shape, ranks = tools.shape(collective.input), collective.world_size
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
    """The layout of an input whose dim 0 is cut into equal parts. If the input is a flattened tensor ``[R, ...]`` of
    symbolic size, the layout has the atoms of that tensor, because a run of symbolic size cannot be split again."""
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


def _sizes(splits: Any) -> list[Any]:
    return [tools.value(size) if isinstance(size, fx.Node) else size for size in splits]


def _text(sizes: list[Any]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
