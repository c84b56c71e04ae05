# SPDX-License-Identifier: Apache-2.0
"""The rules by which rows propagate: for each kind of op, whether it can be computed on rows, and how.

T tokens, W ranks, t = ceil(T / W)::

    add [B, S, H] + [B, S, H]      -> [t, H] + [t, H]                an operand that is not held as rows is cut first
    mul [B, S, H] * weight [H]     -> [t, H] * [H]
    mean(x [T, H], -1, keepdim)    -> mean(x [t, H], -1, keepdim)    a reduction over features
    sum(x [B, S, H], [0, 1])       -> sum(x [t, H], 0), summed over the ranks       a reduction over all tokens
    view [B, S, H] as [T, H]       -> the same rows
    permute, slice, split, cat     -> the same op, on features of the rows

These are examples. An op needs all rows if neither ``rule_of`` nor the modules ``sums`` and ``replicated`` of this
folder know it. The rules follow DTensor's op strategies (torch/distributed/tensor/_ops). In DTensor's terms, rows are
``Shard`` on the tokens. Tensors that are equal on all ranks are ``Replicate``, and a rank's part of a sum over tokens
is ``Partial``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from typing import Protocol

import torch
from torch import fx

from overlap_inductor.passes.sequence.rows import NotRowWise
from overlap_inductor.passes.sequence.rows import Rows
from overlap_inductor.passes.sequence.rows import Tokens
from overlap_inductor.passes.sequence.rows import features
from overlap_inductor.passes.sequence.rows import is_one
from overlap_inductor.passes.sequence.rows import leading_dims
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import row_wise
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.torch_compat import operators

aten = tools.aten
Held = Mapping[fx.Node, Rows]


class Writer(Protocol):
    """The methods of the rewrite (``passes.sequence.write``) that ``Rule.write`` calls."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write a node and evaluate its value."""
        ...

    def rows(self, node: fx.Node) -> fx.Node:
        """The rank's rows of ``node``, which is held as rows."""
        ...

    def cut(self, node: fx.Node, tokens: Tokens, ahead: int, dims: list[Any]) -> fx.Node:
        """The rank's rows of ``node``, which is equal on all ranks. Its first ``ahead`` dims are token dims. They are
        expanded to ``dims`` before the cut."""
        ...

    def reshape(self, node: fx.Node, shape: list[Any]) -> fx.Node:
        """``node`` in ``shape``. If ``node`` is a reshaped tensor that had this shape, returns that tensor."""
        ...

    def size(self, size: Any) -> Any:
        """``size`` as an argument: an int, or the node that computes it."""
        ...


class Rule(Protocol):
    """How one kind of op is computed on rows."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        """How the result of ``node`` is held. At least one input is in ``held``. Raises ``NotRowWise`` if the op needs
        all rows."""
        ...

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        """Write ``node`` for a rank's rows."""
        ...


class _Pointwise:
    """Elementwise ops. A broadcast must not repeat the tokens of an input that is held as rows."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        if operators.is_mutable(node):
            raise NotRowWise(f"{node.target} writes in place")
        if not tools.is_tensor(node):
            raise NotRowWise(f"{node.target} has several results")
        return broadcast(node, list(tools.tensor_inputs(node)), held)

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        return same_op(node, rows, held, writer)


class _Like:
    """``full_like``, ``zeros_like``, ``ones_like``."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        return held[node.args[0]]

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        return writer.call(node.target, writer.rows(node.args[0]), *node.args[1:], **node.kwargs)


class _Along:
    """Ops along one feature dim that keep the shape, such as ``softmax``."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        rows = held[node.args[0]]
        feature_dim(node, operators.argument(node, "dim"), rows)
        return rows

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        return on_dim(node, feature_dim(node, operators.argument(node, "dim"), rows), writer)


class _Reduction:
    """Reductions over features."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        source: Any = node.args[0]
        rows, rank = held[source], len(tools.shape(source))
        if any(d < rows.lead for d in reduced_dims(node, rank)):
            raise NotRowWise(f"{node.target} reduces over tokens")
        return rows

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        source: Any = node.args[0]
        dims = [d - rows.lead + 1 for d in reduced_dims(node, len(tools.shape(source)))]
        given = operators.argument(node, "dim")
        args, kwargs = operators.with_arguments(node, {"dim": dims[0] if isinstance(given, int) else dims})
        return writer.call(node.target, writer.rows(source), *args[1:], **kwargs)


class _Element:
    """``getitem``, which takes one of an op's several results."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        return held[node.args[0]]

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        return writer.call(node.target, writer.rows(node.args[0]), node.args[1])


class _Reshape:
    """Views that keep the order of elements. The tokens must be leading dims of the result too."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        source: Any = node.args[0]
        rows = held[source]
        lead = leading_dims(tools.shape(node), rows.tokens.count, features(source, rows))
        if lead is None:
            raise NotRowWise(f"{node.target} to {tools.shape(node)} joins tokens with features")
        return Rows(rows.tokens, lead)

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        return writer.reshape(writer.rows(node.args[0]), [rows.tokens.shard, *features(node, rows)])


class _Expand:
    """``expand`` along features."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        return broadcast(node, [node.args[0]], held)

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        shape = [writer.size(s) for s in (rows.tokens.shard, *features(node, rows))]
        return writer.call(node.target, writer.rows(node.args[0]), shape)


class _Permute:
    """Permutations of the feature dims. Token dims of size 1 may also move among the token dims."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        source: Any = node.args[0]
        rows, order, shape = held[source], tools.permutation(node) or [], tools.shape(source)
        large = [d for d in order if d < rows.lead and not is_one(shape[d])]
        if large != sorted(large) or any(d >= rows.lead for d in order[: rows.lead]):
            raise NotRowWise(f"{node.target} moves tokens behind features or changes their order")
        return rows

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        order = [d - rows.lead + 1 for d in (tools.permutation(node) or [])[rows.lead :]]
        local = writer.rows(node.args[0])
        return local if order == sorted(order) else writer.call(aten.permute.default, local, [0, *order])


class _OnDim:
    """Slices, selections and splits along one feature dim."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        rows = held[node.args[0]]
        dim = feature_dim(node, operators.argument(node, "dim"), rows)
        if _may_be_own_part(node, dim, rows.tokens.world_size):
            text = f"{node.name} takes one of {rows.tokens.world_size} equal parts, which may be the rank's own"
            raise NotRowWise(text)
        return rows

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        return on_dim(node, feature_dim(node, operators.argument(node, "dim"), rows), writer)


class _Cat:
    """``cat`` along a feature dim."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        parts: list[fx.Node] = list(node.args[0])
        first = next(held[p] for p in parts if p in held)
        feature_dim(node, operators.argument(node, "dim"), first)
        for part in parts:
            if part in held and not (held[part].tokens.same(first.tokens) and held[part].lead == first.lead):
                text = f"{node.name} concatenates tensors with different tokens, or with tokens in different dims"
                raise NotRowWise(text)
            ahead = tools.shape(part)[: first.lead]
            if not all(map(same_size, ahead, tools.shape(node)[: first.lead])):
                raise NotRowWise(f"{node.name} concatenates tensors that may have different token counts")
        return first

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        parts: list[fx.Node] = list(node.args[0])
        dims = tools.shape(node)[: rows.lead]
        local = [writer.rows(p) if p in held else writer.cut(p, rows.tokens, rows.lead, dims) for p in parts]
        dim = feature_dim(node, operators.argument(node, "dim"), rows) - rows.lead + 1
        return writer.call(node.target, local, dim)


class _Pad:
    """Padding of feature dims."""

    def held(self, node: fx.Node, held: Held) -> Rows:
        source: Any = node.args[0]
        amounts: Any = node.args[1]
        if len(amounts) // 2 > len(tools.shape(source)) - held[source].lead:
            raise NotRowWise(f"{node.target} pads tokens")
        return held[source]

    def write(self, node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
        return writer.call(node.target, writer.rows(node.args[0]), *node.args[1:], **node.kwargs)


_LIKE = {aten.full_like.default, aten.zeros_like.default, aten.ones_like.default}
_ON_DIM = {aten.slice.Tensor, aten.select.int, *tools.SPLITS}


def _may_be_own_part(node: fx.Node, dim: int, world_size: int) -> bool:
    """Whether ``node`` may take the rank's own part of ``dim``: it takes one of ``world_size`` equal parts, and some
    part is never read. If each rank took its own part, the ranks' rows would hold different features."""
    source: Any = node.args[0]
    size = tools.shape(source)[dim]
    if node.target in tools.SPLITS:
        lengths = [part.shape[dim] for part in tools.value(node)]
        alike_all = len(lengths) == world_size and all(same_size(n, lengths[0]) for n in lengths)
        return alike_all and len({u.args[1] for u in node.users}) < world_size
    rank = len(tools.shape(source))
    alike = [u for u in source.users if u.target is node.target and operators.argument(u, "dim", 0) % rank == dim]
    if node.target is aten.select.int:
        return same_size(size, world_size) and len({operators.argument(u, "index") for u in alike}) < world_size
    part = tools.shape(node)[dim]
    start = operators.argument(node, "start") or 0
    if not same_size(part * world_size, size) or not same_size(start % part, 0):
        return False
    if operators.argument(node, "step", 1) != 1:
        return False
    starts = {operators.argument(u, "start") or 0 for u in alike if same_size(tools.shape(u)[dim], part)}
    return len(starts) < world_size


def rule_of(node: fx.Node) -> Rule | None:
    """The rule for the op of ``node``, or ``None``."""
    if getattr(node.target, "__name__", "") == "getitem":
        return _Element()
    if operators.has_tag(node, torch.Tag.nondeterministic_seeded):
        return None
    if node.target in _LIKE:
        return _Like()
    if node.target in row_wise.REDUCTIONS:
        return _Reduction()
    if node.target in row_wise.ALONG:
        return _Along()
    if node.target is aten.expand.default:
        return _Expand()
    if tools.is_reshape(node):
        return _Reshape()
    if tools.permutation(node) is not None:
        return _Permute()
    if node.target in _ON_DIM:
        return _OnDim()
    if node.target is aten.cat.default:
        return _Cat()
    if node.target is aten.constant_pad_nd.default:
        return _Pad()
    return _Pointwise() if tools.is_pointwise(node) else None


def reduced_dims(node: fx.Node, rank: int) -> list[int]:
    """The dims that a reduction reduces, counted from 0. ``rank``: number of dims of its input."""
    given = operators.argument(node, "dim")
    return [d % rank for d in ([given] if isinstance(given, int) else given or range(rank))]


def feature_dim(node: fx.Node, dim: Any, rows: Rows) -> int:
    """``dim`` of the first input of ``node``, counted from 0. Raises ``NotRowWise`` if it is a token dim."""
    source: Any = node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]
    dim = int(dim or 0) % len(tools.shape(source))
    if dim < rows.lead:
        raise NotRowWise(f"{node.target} works along the tokens")
    return dim


def on_dim(node: fx.Node, dim: int, writer: Writer) -> fx.Node:
    """Write ``node`` for a rank's rows. ``dim``: the dim of the whole input along which the op works."""
    source: Any = node.args[0]
    local = writer.rows(source)
    fewer = len(tools.shape(source)) - len(tools.shape(local))
    args, kwargs = operators.with_arguments(node, {"dim": dim - fewer})
    return writer.call(node.target, local, *args[1:], **kwargs)


def broadcast(node: fx.Node, inputs: list[fx.Node], held: Held) -> Rows:
    """How the result of an elementwise ``node`` is held. Raises ``NotRowWise``, for example, if inputs differ in tokens
    or token dims."""
    shape = tools.shape(node)
    found: Rows | None = None
    for source in inputs:
        if source not in held:
            continue
        rows = held[source]
        lead = len(shape) - len(tools.shape(source)) + rows.lead
        if found is not None and not (found.tokens.same(rows.tokens) and found.lead == lead):
            raise NotRowWise(f"{node.name} combines tensors with different tokens, or with tokens in different dims")
        if not same_size(tools.numel(shape[:lead]), rows.tokens.count):
            raise NotRowWise(f"{node.name} repeats the tokens")
        found = Rows(rows.tokens, lead)
    assert found is not None
    for source in inputs:
        ahead = tools.shape(source)[: max(len(tools.shape(source)) - len(shape) + found.lead, 0)]
        dims = shape[found.lead - len(ahead) : found.lead]
        if source not in held and not all(is_one(a) or same_size(a, d) for a, d in zip(ahead, dims, strict=True)):
            raise NotRowWise(f"{source.name} {tools.shape(source)} cannot be shown to have the tokens of {node.name}")
    return found


def same_op(node: fx.Node, rows: Rows, held: Held, writer: Writer) -> fx.Node:
    """Write the elementwise ``node`` for a rank's rows. An input that has token dims but is not held as rows is cut or
    reshaped."""
    shape = tools.shape(node)

    def operand(source: fx.Node) -> fx.Node:
        if not tools.is_tensor(source):
            return source
        if source in held:
            return writer.rows(source)
        own = tools.shape(source)
        ahead = len(own) - (len(shape) - rows.lead)
        if ahead <= 0:
            return source
        if all(map(is_one, own[:ahead])):
            return writer.reshape(source, [1, *own[ahead:]])
        return writer.cut(source, rows.tokens, ahead, shape[: rows.lead])

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operand)
    return writer.call(node.target, *args, **kwargs)
