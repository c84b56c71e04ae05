# SPDX-License-Identifier: Apache-2.0
"""Compute the layout of the result of a row-wise op after a gather, for example of a norm.

Rows are the indices of the gathered dim. An op is row-wise if each row of its result depends only on the same row of
its inputs. So the op can be computed on a part of the rows. A bracket holds the *atoms* of one dim: the dim itself,
or its factors (``sites.layouts``). R counts the ranks::

    gathered [R s] [h] -> pow, mean(-1), rsqrt, mul -> [R s] [h]      the mean needs the whole of h
    gathered [R s] [h] * scale [rows] [1] -> [R s] [h]                scale is cut with the rows
    cat(gathered [R s] [h], y [rows] [c], 1) -> [R s] [h + c]         y is cut with the rows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.torch_compat import operators

aten = tools.aten
Dim = tuple[Atom, ...]

REDUCTIONS = {
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.prod.dim_int,
    aten.var.correction,
    aten.var_mean.correction,
}
ALONG = {aten._softmax.default, aten._log_softmax.default, aten.cumsum.default}
"""Ops that work along one dim and keep the shape."""
CUTS = tools.SPLITS | {aten.unbind.int}
"""Ops that return a list of pieces along one dim."""


@dataclass
class RowWise:
    """What is known about the result of a row-wise op.

    Attributes:
        whole: atoms of the dims that the op needs whole, such as the ``h`` of a mean.
        rows_of: inputs that do not come from the gather but have the gathered dim. They are cut along it, too.
    """

    layout: Layout
    whole: list[Atom] = field(default_factory=list)
    rows_of: list[fx.Node] = field(default_factory=list)


def may_be(node: fx.Node) -> bool:
    """Whether the function ``result`` has a rule for the op of ``node``."""
    known = REDUCTIONS | ALONG | CUTS | {aten.slice.Tensor, aten.select.int, aten.cat.default}
    element = getattr(node.target, "__name__", "") == "getitem"
    return node.target in known or element or (tools.is_pointwise(node) and not operators.is_mutable(node))


def result(node: fx.Node, layouts: Mapping[fx.Node, Layout]) -> RowWise:
    """Compute the layout of the result of ``node``, an op for which ``may_be`` is true.

    Args:
        layouts: the layouts of tensors that are computed from the gathered tensor.

    Raises:
        LayoutError: ``node`` cannot be shown to be row-wise; the message says why.
    """
    if operators.has_tag(node, torch.Tag.nondeterministic_seeded):
        raise LayoutError(f"{node.target} draws random numbers for the whole tensor")
    if getattr(node.target, "__name__", "") == "getitem":
        return _element(node, layouts)
    if node.target is aten.cat.default:
        return _joined(node, layouts)
    source: fx.Node = next(n for n in node.all_input_nodes if n in layouts)
    dims = layouts[source].refined().dims
    if node.target in REDUCTIONS:
        reduced = _dims_of(operators.argument(node, "dim"), len(dims))
        _none_gathered(node, [dims[d] for d in reduced])
        whole = [a for d in reduced for a in dims[d]]
        keeps = operators.argument(node, "keepdim", False)
        kept = [() if d in reduced else dim for d, dim in enumerate(dims) if keeps or d not in reduced]
        return RowWise(Layout(tuple(kept)), whole)
    if node.target in ALONG:
        (dim,) = _dims_of(operators.argument(node, "dim"), len(dims))
        _none_gathered(node, [dims[dim]])
        return RowWise(layouts[source], list(dims[dim]))
    if node.target in CUTS:
        (dim,) = _dims_of(operators.argument(node, "dim"), len(dims))
        _none_gathered(node, [dims[dim]])
        # The op returns a list. Its node gets the source's layout, and ``_element`` computes the pieces' layouts.
        return RowWise(layouts[source], list(dims[dim]))
    if node.target is aten.select.int:
        (dim,) = _dims_of(operators.argument(node, "dim"), len(dims))
        _none_gathered(node, [dims[dim]])
        return RowWise(Layout((*dims[:dim], *dims[dim + 1 :])), list(dims[dim]))
    if node.target is aten.slice.Tensor:
        (dim,) = _dims_of(operators.argument(node, "dim"), len(dims))
        _none_gathered(node, [dims[dim]])
        return RowWise(_with(layouts[source], dim, tools.shape(node)[dim]), list(dims[dim]))
    return _pointwise(node, layouts)


def _dims_of(given: Any, rank: int) -> list[int]:
    given = [given] if isinstance(given, int) else list(given or range(rank))
    return [d % rank for d in given]


def _none_gathered(node: fx.Node, dims: list[Dim]) -> None:
    if any(a.rank for dim in dims for a in dim):
        raise LayoutError(f"{node.target} works along the sharded dim")


def _with(layout: Layout, dim: int, size: Any) -> Layout:
    dims = list(layout.refined().dims)
    dims[dim] = (Atom(size),)
    return Layout(tuple(dims))


def _element(node: fx.Node, layouts: Mapping[fx.Node, Layout]) -> RowWise:
    source, _ = node.args
    layout = layouts[source]
    if source.target not in CUTS:
        return RowWise(layout)
    dim = operators.argument(source, "dim") % len(layout.dims)
    if source.target is aten.unbind.int:
        dims = layout.refined().dims
        return RowWise(Layout((*dims[:dim], *dims[dim + 1 :])))
    return RowWise(_with(layout, dim, tools.shape(node)[dim]))


def _joined(node: fx.Node, layouts: Mapping[fx.Node, Layout]) -> RowWise:
    shape = tools.shape(node)
    joined = operators.argument(node, "dim") % len(shape)
    parts: list[fx.Node] = list(node.args[0])
    whole = [a for part in parts if part in layouts for a in layouts[part].refined().dims[joined]]
    if any(a.rank for a in whole):
        raise LayoutError(f"{node.name} concatenates the collective's result with other tensors along the sharded dim")
    dims = [(Atom(size),) if d == joined else _dim(node, d, parts, layouts, 0, whole) for d, size in enumerate(shape)]
    return RowWise(Layout(tuple(dims)), whole, [p for p in parts if p not in layouts])


def _pointwise(node: fx.Node, layouts: Mapping[fx.Node, Layout]) -> RowWise:
    shape = tools.shape(node)
    inputs = list(tools.tensor_inputs(node))
    whole: list[Atom] = []
    dims = tuple(_dim(node, d, inputs, layouts, len(shape), whole) for d in range(len(shape)))
    if sum(any(a.rank for a in dim) for dim in dims) != 1:
        raise LayoutError(f"{node.name} has the sharded dim in none or in several of its dims; expected exactly one")
    gathered = next(d for d, dim in enumerate(dims) if any(a.rank for a in dim))
    rows_of = []
    for other in inputs:
        at = gathered - len(shape) + len(tools.shape(other))
        if other not in layouts and at >= 0 and not _is_one(tools.shape(other)[at]):
            rows_of.append(other)
    return RowWise(Layout(dims), whole, rows_of)


def _dim(
    node: fx.Node, dim: int, inputs: list[fx.Node], layouts: Mapping[fx.Node, Layout], rank: int, whole: list[Atom]
) -> Dim:
    """The atoms of dim ``dim`` of the result of ``node``. If the inputs' atoms differ, the result gets a new atom.

    Args:
        rank: number of dims of the result, if inputs may have fewer and broadcast; else 0.
        whole: if the result gets a new atom, the inputs' atoms are added to this list.

    Raises:
        LayoutError: an input is not known to have the result's size in this dim, or the inputs order the rows
            differently.
    """
    size, found = tools.shape(node)[dim], list[Dim]()
    for source in inputs:
        at = dim - (rank and rank - len(tools.shape(source)))
        if at < 0 or _is_one(tools.shape(source)[at]):
            continue
        if source in layouts:
            found.append(layouts[source].refined().dims[at])
        elif not same_size(tools.shape(source)[at], size):
            raise LayoutError(
                f"{source.name} of shape {tools.shape(source)} cannot be shown to have as many rows or columns as the"
                " collective's result"
            )
    if not found:
        return () if _is_one(size) else (Atom(size),)
    if all(Layout((other,)).same_elements(Layout((found[0],))) for other in found[1:]):
        return found[0]
    if any(a.rank for mine in found for a in mine):
        raise LayoutError(f"{node.name} combines tensors that hold the ranks' rows in different orders")
    whole += [a for mine in found for a in mine]
    return (Atom(size),)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
