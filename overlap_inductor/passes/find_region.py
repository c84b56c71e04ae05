# SPDX-License-Identifier: Apache-2.0
"""Find ``matmuls -> sum over a dim, or cat, or op that broadcasts -> collective``. A sum or a ``cat`` changes the shape
of the matmuls' results. A *sum* is any op of ``REDUCTIONS``. An op *broadcasts* a tensor that has fewer elements than
its result. As in ``passes.find_reduce``, the *region* is the matmuls and the ops from them to the collective. A *plain
tensor* is a tensor that the region reads and does not compute. Only plain tensors may be broadcast.

A piece keeps the matmuls' dims, and a dim that was summed has size 1. The graph before, and the pieces that the rewrite
computes (R ranks, E experts)::

    bmm [E] [R t] [h] -> mul by share [E] [R t] [1] -> sum(0) -> [R t] [h]
        pieces [E, part of t, h] -> [1, part of t, h]
    mm [R t] [a], mm [R t] [b] -> cat(dim=1)              -> [R t] [a + b]
        pieces [part of t, a], [part of t, b] -> [part of t, a + b]
    mm [R t] [h] -> mul by gate [R t] [1], and the same for each other expert; add -> [R t] [h]
        pieces [part of t, h], each mm times [part of t, 1]

The dim that is cut must be neither summed nor joined. A plain tensor that has this dim is cut, too.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.passes.find_reduce import Tracer
from overlap_inductor.passes.find_reduce import reads_a_result
from overlap_inductor.passes.find_reduce import traced
from overlap_inductor.passes.find_reduce import used_elsewhere
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import grouped
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.reduce_nodes import Region
from overlap_inductor.torch_compat import operators

aten = tools.aten
REDUCTIONS = {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default}
STEPS = 16
"""The most steps of the search from a sum or a ``cat`` back to a matmul."""


class _RegionTracer(Tracer):
    """Also follows a sum or a ``cat`` that is computed from a matmul, and finds the layouts of tensors that are
    broadcast. (An atom is a dim, or a factor of a dim: ``layouts.Atom``.)

    Attributes:
        reduced: for each sum, the atoms of the summed dims.
        parts: for each ``cat``, the atom of the joined dim in each of its inputs.
        broadcast: for each broadcast tensor that is not a scalar, an op that reads it.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.reduced: dict[fx.Node, list[Atom]] = {}
        self.parts: dict[fx.Node, list[Atom]] = {}
        self.broadcast: dict[fx.Node, fx.Node] = {}

    def leaf(self, node: fx.Node) -> matmuls.MatmulNode | None:
        return _leaf(node)

    def visit_other(self, node: fx.Node, layout: Layout, pending: list[tuple[fx.Node, Layout]]) -> None:
        if node.target in REDUCTIONS and _has_matmul(node):
            source: fx.Node = node.args[0]
            sizes = tools.shape(source)
            given = operators.argument(node, "dim")
            taken = {d % len(sizes) for d in ([given] if isinstance(given, int) else given or range(len(sizes)))}
            keeps, kept = operators.argument(node, "keepdim", False), iter(layout.refined().dims)
            dims: list[tuple[Atom, ...]] = []
            for d, size in enumerate(sizes):
                if d not in taken or keeps:
                    mine = next(kept)
                dims.append((Atom(size),) if d in taken else mine)
            self.reduced[node] = [dims[d][0] for d in sorted(taken)]
            pending.append((source, Layout(tuple(dims))))
        elif node.target is aten.cat.default and _has_matmul(node):
            dim = operators.argument(node, "dim") % len(tools.shape(node))
            dims = list(layout.refined().dims)
            if any(a.rank for a in dims[dim]):
                raise LayoutError(f"{node.name} joins matmuls along the scattered dim; expected another dim")
            self.parts[node] = []
            for part in node.args[0]:
                atom = Atom(tools.shape(part)[dim])
                self.parts[node].append(atom)
                pending.append((part, Layout((*dims[:dim], (atom,), *dims[dim + 1 :]))))
        else:
            super().visit_other(node, layout, pending)

    def visit_pointwise(self, node: fx.Node, layout: Layout, pending: list[tuple[fx.Node, Layout]]) -> None:
        dims = layout.refined().dims
        for source in tools.tensor_inputs(node):
            if tools.same_shape(source, node):
                pending.append((source, layout))
                continue
            shape = tools.shape(source)
            if len(shape) > len(dims):
                raise LayoutError(f"{source.name} of shape {shape} has more dims than {node.name}, which reads it")
            aligned = dims[len(dims) - len(shape) :]
            mine = Layout(
                tuple(() if isinstance(s, int) and s == 1 else dim for s, dim in zip(shape, aligned, strict=True))
            )
            if source in self.layouts and not self.layouts[source].same_elements(mine):
                raise LayoutError(f"{source.name} is read in two different layouts; expected one")
            if source in self.region:
                raise LayoutError(
                    f"{node.name} broadcasts {source.name}, which the site computes; expected equal shapes"
                )
            self.layouts[source] = mine
            if not tools.is_scalar_like(source):
                self.broadcast[source] = node
            self._external(source)


def _leaf(node: fx.Node) -> matmuls.MatmulNode | None:
    return matmuls.parse(node) or grouped.parse(node)


def sums_experts(node: fx.Node) -> bool:
    """Whether ``node`` is computed from a ``GroupedMatmul``, and no node outside the ``GroupedMatmul`` reads its inner
    nodes. If so, a collective that moves ``node`` can be a site."""
    found = _nearest_leaf(node)
    members = [] if found is None else [*found.inner, found.node]
    return len(members) > 1 and all(u in members for n in members[:-1] for u in n.users)


def _has_matmul(node: fx.Node) -> bool:
    return _nearest_leaf(node) is not None


def _nearest_leaf(node: fx.Node) -> matmuls.MatmulNode | None:
    """The nearest matmul from which ``node`` is computed, or ``None``."""
    pending, seen = [(node, 0)], {node}
    for current, depth in pending:
        if (matmul := _leaf(current)) is not None:
            return matmul
        known = current.target in REDUCTIONS or current.target is aten.cat.default
        if depth < STEPS and (
            known or tools.is_reshape(current) or tools.permutation(current) is not None or tools.is_pointwise(current)
        ):
            following = [n for n in tools.tensor_inputs(current) if n not in seen]
            seen.update(following)
            pending += [(n, depth + 1) for n in following]
    return None


def find(
    collectives: list[CollectiveNode], result: fx.Node, owned: Collection[fx.Node], before: Reason | None
) -> tuple[ReduceNodes | None, Reason | None]:
    """``(nodes, obstacle)`` as from ``find_reduce.find_reduce``, with the same arguments. ``before``: the reason that
    ``find_reduce`` gave, or ``None``; returned if this finder has no better one."""
    if before is not None and before.code not in ("layout", "op_between"):
        return None, before
    try:
        tracer = traced(collectives, owned, (), _RegionTracer)
        assert isinstance(tracer, _RegionTracer)
        if (
            not (tracer.reduced or tracer.parts or tracer.broadcast or any(m.inner for m in tracer.leaves))
            or not tracer.leaves
            or tracer.obstacle is not None
            or any(m.node in owned for m in tracer.leaves)
            or tracer.padding is not None
        ):
            return None, before
        refusal = next((r for r in (m.refusal() for m in tracer.leaves) if r), None)
        if refusal is not None:
            return None, Reason("matmul_form", refusal)
        if (reason := reads_a_result(tracer)) is not None:
            return None, reason
        region, sharded = _region(tracer, collectives[0])
    except LayoutError as error:
        return None, before or Reason("layout", str(error))
    role = tracer.leaves[0].output_role(region.cut)
    # A node may first be a plain tensor and later join the region.
    externals = [n for n in tracer.externals if n not in tracer.region]
    nodes = ReduceNodes(
        collectives,
        result,
        tracer.leaves,
        tracer.layouts,
        tracer.through,
        externals,
        sharded,
        role,
        tracer.unfolded,
        region=region,
    )
    obstacle = used_elsewhere(collectives, tracer)
    if obstacle is not None and any(m.inner for m in tracer.leaves):
        return None, obstacle
    return nodes, obstacle


class _Dims:
    """The atoms of which each dim of the matmuls consists.

    Attributes:
        of: the dim of each atom, by ``_key``.
        runs: for each dim, lists of atoms. Each list is the whole dim in a matmul, or in an input or result of a
            ``cat``.
    """

    def __init__(self, tracer: _RegionTracer) -> None:
        first, *others = tracer.leaves
        self.of: dict[int | str, int] = {}
        self.runs: list[list[list[Atom]]] = [[] for _ in tools.shape(first.node)]
        for leaf in (first, *others):
            dims = tracer.layouts[leaf.node].refined().dims
            if len(dims) != len(self.runs):
                raise LayoutError(
                    f"{leaf.node.name} and {first.node.name} have different numbers of dims; expected the same number"
                )
            for d, dim in enumerate(dims):
                self.add(d, list(dim))

    def add(self, dim: int, run: list[Atom]) -> None:
        for atom in run:
            if self.of.setdefault(_key(atom), dim) != dim:
                raise LayoutError(
                    "a dim of the collective's input belongs to different dims of two matmuls; expected the same dim"
                )
        mine = _keys(run)
        for other in map(_keys, self.runs[dim]):
            if mine == other:
                return
            if not set(mine).isdisjoint(other):
                raise LayoutError(
                    "two matmuls have the elements of a dim in different orders, or one lacks some of them; expected"
                    " the same elements in the same order"
                )
        self.runs[dim].append(run)

    def whole(self, atoms: list[Atom]) -> int:
        """The dim that consists of exactly these atoms. Raises ``LayoutError`` if there is none."""
        found = next((d for d, runs in enumerate(self.runs) for run in runs if _same(run, atoms)), None)
        if found is None:
            raise LayoutError("a sum or a cat covers only a part of a matmul's dim; expected the whole dim")
        return found

    def place(self, node: fx.Node, layout: Layout) -> Layout:
        """``layout`` of ``node``, with one dim for each dim of the matmuls. A dim that ``layout`` lacks is empty.
        Raises ``LayoutError`` if ``layout`` has only a part of a dim."""
        atoms = set(map(_key, layout.flat()))
        dims: list[tuple[Atom, ...]] = []
        for runs in self.runs:
            mine = next((run for run in runs if _present(run) and set(map(_key, _present(run))) <= atoms), [])
            atoms -= set(map(_key, mine))
            dims.append(tuple(mine))
        if atoms:
            raise LayoutError(
                f"{node.name} of shape {tools.shape(node)} is read between matmul and collective and cannot be cut like"
                " the matmul"
            )
        return Layout(tuple(dims))


def _key(atom: Atom) -> int | str:
    """A key of an atom. All rank atoms (atoms that count the ranks) share one key, because a ``cat`` that moves the
    rank atom to another dim makes a new rank atom."""
    return "rank" if atom.rank else id(atom)


def _keys(run: list[Atom]) -> list[int | str]:
    return list(map(_key, _present(run)))


def _present(run: list[Atom]) -> list[Atom]:
    return Layout((tuple(run),)).flat()


def _same(run: list[Atom], other: list[Atom]) -> bool:
    return Layout((tuple(run),)).same_elements(Layout((tuple(other),)))


def _region(tracer: _RegionTracer, collective: CollectiveNode) -> tuple[Region, ShardedDim]:
    dims = _Dims(tracer)
    joined: dict[fx.Node, int] = {}
    # A ``cat`` may join the result of another ``cat``. ``dims`` must then know the atoms of that result already. So the
    # ``cat`` nearest to the matmuls comes first.
    for node, parts in reversed(tracer.parts.items()):
        at = operators.argument(node, "dim") % len(tools.shape(node))
        leaves = [atom.leaves() for atom in parts]
        known = {dims.whole(run) for run in leaves if all(_key(a) in dims.of for a in run)}
        if len(known) != 1:
            raise LayoutError(f"{node.name} joins tensors along a dim that no matmul has")
        (joined[node],) = known
        for run in (*leaves, list(tracer.layouts[node].refined().dims[at])):
            dims.add(joined[node], run)
    reduced = {node: sorted(dims.whole(atom.leaves()) for atom in atoms) for node, atoms in tracer.reduced.items()}
    summed = {d for taken in reduced.values() for d in taken}
    top = dims.place(collective.input, tracer.layouts[collective.input])
    kept = [d for d in range(len(dims.runs)) if d not in summed]
    if any(top.dims[d] for d in summed):
        raise LayoutError("some matmuls are summed over a dim that others keep")
    layout = Layout(tuple(top.dims[d] for d in kept)).refined()
    if collective.kind == "all_gather" and not layout.same_elements(tracer.layouts[collective.input]):
        raise LayoutError("the elements of the matmuls are gathered in another order than they are computed in")
    if collective.kind == "reduce_scatter":
        sharded = ShardedDim.of(layout)
    else:
        size = layout.shape()[0]
        sharded = ShardedDim(0, 1, size // collective.world_size, size, (), ())
    cut = kept[sharded.dim]
    if sharded.short:
        raise LayoutError(
            "zeros are appended to a sum or a cat of matmuls; expected them appended to a matmul's own result"
        )
    if any(leaf.inner and cut == len(tools.shape(leaf.node)) - 1 for leaf in tracer.leaves):
        raise LayoutError("the columns of a grouped matmul are cut; expected the tokens")
    if cut in joined.values():
        raise LayoutError("a cat joins matmuls along the dim that must be cut; expected another dim")
    places = {node: dims.place(node, tracer.layouts[node]) for node in tracer.externals if node not in tracer.region}
    return Region(reduced, joined, tracer.broadcast, places, cut, layout), sharded
