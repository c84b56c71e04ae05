# SPDX-License-Identifier: Apache-2.0
"""``StepEmitter`` writes one site's overlap ops into a graph, in the chain of the site's group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.torch_compat.step_values import StepValues
from overlap_inductor.transports import routes

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor


@dataclass
class StepEmitter:
    """Writes nodes at the graph's insertion point. Every node gets its ``meta["val"]`` as soon as it is written.

    Attributes:
        site: the site's id.
        chain: the newest token of the group's chain.
        module: metadata of the site's module, copied to every node.
        values: evaluates the nodes, for all sites of a graph.
        emitted: the communicating overlap ops written so far.
        order: ``{node: nodes that must run before it, although it does not read their results}``.
        transport: last arguments of an op that takes a transport: ``(name,)``, or ``()`` for the schedule's default.
    """

    graph: fx.Graph
    group_name: str
    world_size: int
    site: str
    chain: fx.Node
    module: dict[str, Any]
    values: StepValues = field(default_factory=StepValues)
    emitted: list[fx.Node] = field(default_factory=list)
    order: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    transport: tuple[str, ...] = ()

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        return self.annotate(node)

    def annotate(self, node: fx.Node) -> fx.Node:
        node.meta["val"] = self.values.evaluate(node, self.site)
        node.meta.update(self.module)
        node.meta["overlap_site"] = self.site
        return node

    def communicate(self, target: Any, *args: Any) -> fx.Node:
        node = self.call(target, *args)
        self.emitted.append(node)
        return node

    def reshape(self, x: fx.Node, shape: Sequence[Size]) -> fx.Node:
        have = tools.shape(x)
        if len(have) == len(shape) and all(same_size(a, b) for a, b in zip(have, shape, strict=True)):
            return x
        if any(not isinstance(s, int) for s in have) and _slice_with_gaps(x):
            x = self.call(overlap.packed.default, x)
        return self.call(aten.reshape.default, x, list(shape))

    def contiguous(self, x: fx.Node) -> fx.Node:
        """``x``, cloned if it is not contiguous. Readers of a matmul's or collective's result may rely on it being
        contiguous."""
        return (
            x
            if tools.value(x).is_contiguous()
            else self.call(aten.clone.default, x, memory_format=torch.contiguous_format)
        )

    def narrow(self, x: fx.Node, dim: int, start: Size, length: Size) -> fx.Node:
        if same_size(length, tools.shape(x)[dim]):
            return x
        if isinstance(start, int) and isinstance(length, int):
            return self.call(aten.slice.Tensor, x, dim, start, start + length)
        # aten's slice clamps to the dim. Clamping symbolic sizes would add guards.
        return self.call(overlap.narrow.default, x, dim, start, length)

    def window(self, x: fx.Node, dim: int, start: Size, length: Size) -> fx.Node:
        """Like ``narrow``. Kernels that differ only in the windows that they read of a tensor are compiled once."""
        if same_size(length, tools.shape(x)[dim]):
            return x
        return self.call(overlap.window.default, x, dim, start, length)

    def take(self, x: fx.Node, dim: int, shift: int, chunk: Size, start: Size, length: Size) -> fx.Node:
        return self.call(overlap.take.default, x, dim, shift, chunk, start, length, self.group_name)

    def take_sharded(self, x: fx.Node, dim: int, sharded: ShardedDim, shift: int, block: Block) -> fx.Node:
        """The rows of ``x`` along ``dim`` (layout ``sharded``) that belong to ``block`` of rank ``r + shift``,
        where ``r`` is this rank. No shard in ``x`` may lack rows (``whole_chunks``)."""
        if isinstance(sharded.outer, int) and sharded.outer == 1:
            return self.take(x, dim, shift, sharded.chunk, block.start, block.length)
        shape = tools.shape(x)
        split = self.reshape(x, [*shape[:dim], sharded.outer, self.world_size * sharded.chunk, *shape[dim + 1 :]])
        part = self.take(split, dim + 1, shift, sharded.chunk, block.start, block.length)
        part = self.narrow(part, dim, block.outer_start, block.outer_length)
        return self.reshape(part, [*shape[:dim], block.outer_length * block.length, *shape[dim + 1 :]])

    def take_ranks(
        self, x: fx.Node, dim: int, shifts: Sequence[int], chunk: Size, start: Size, length: Size
    ) -> fx.Node:
        """``take`` for each of ``shifts``, copied to one tensor and joined along ``dim``."""
        return self.call(overlap.take_ranks.default, x, dim, list(shifts), chunk, start, length, self.group_name)

    def whole_chunks(self, x: fx.Node, dim: int, sharded: ShardedDim) -> fx.Node:
        """``x`` with zeros for the rows that are missing along ``dim``, whose layout is ``sharded``."""
        if not sharded.short:
            return x
        shape = tools.shape(x)
        have = shape[dim] // sharded.outer
        split = self.reshape(x, [*shape[:dim], sharded.outer, have, *shape[dim + 1 :]])
        padded = self.call(aten.constant_pad_nd.default, split, [0, 0] * (len(shape) - 1 - dim) + [0, sharded.missing])
        return self.reshape(padded, [*shape[:dim], sharded.outer * (have + sharded.missing), *shape[dim + 1 :]])

    def cut_to_size(self, x: fx.Node, dim: int, sharded: ShardedDim) -> fx.Node:
        """``x`` without the rows that ``whole_chunks`` adds to ``dim``."""
        if not sharded.short:
            return x
        shape, full = tools.shape(x), self.world_size * sharded.chunk
        split = self.reshape(x, [*shape[:dim], sharded.outer, full, *shape[dim + 1 :]])
        kept = self.narrow(split, dim + 1, 0, full - sharded.missing)
        return self.reshape(kept, [*shape[:dim], sharded.size, *shape[dim + 1 :]])

    def without_padding(self, x: fx.Node, sharded: ShardedDim, shift: int, block: Block) -> fx.Node:
        """``x`` with its padding rows set to zero, so that they add nothing to a sum over rows. A rank may have sent
        any values in them. Along dim ``sharded.dim``, ``x`` holds ``block`` of rank ``r + shift``, where ``r``
        is this rank."""
        if not sharded.short:
            return x
        dim, shape = sharded.dim, tools.shape(x)
        split = self.reshape(x, [*shape[:dim], block.outer_length, block.length, *shape[dim + 1 :]])
        size = self.world_size * sharded.chunk - sharded.missing
        where = (dim + 1, shift, sharded.chunk, block.start, size, self.group_name)
        return self.reshape(self.call(overlap.rows_below.default, split, *where), shape)

    def convert(self, x: fx.Node, source: Layout, target: Layout, sizes: dict[int, Size] | None = None) -> fx.Node:
        """``x`` brought from layout ``source`` into layout ``target``. Both layouts have the same atoms (dims
        or factors of dims), perhaps in another order. The result is a view if possible. ``sizes`` gives other sizes to
        some atoms, by ``id(atom)``."""
        source, target = source.refined(), target.refined()
        if source.same_elements(target):
            return self.reshape(x, target.shape(sizes))
        atoms, wanted = source.flat(), target.flat()
        flat = self.reshape(x, [(sizes or {}).get(id(a), a.size) for a in atoms])
        order = [next(i for i, a in enumerate(atoms) if a is w) for w in wanted]
        return self.reshape(self.call(aten.permute.default, flat, order), target.shape(sizes))


@dataclass(frozen=True)
class Block:
    """A sub-chunk of one rank's shard along a sharded dim (``ShardedDim``): ``outer_length`` outer indices, each with
    ``length`` rows."""

    start: Size
    length: Size
    outer_start: Size
    outer_length: Size

    @classmethod
    def whole(cls, sharded: ShardedDim) -> Block:
        return cls(0, sharded.chunk, 0, sharded.outer)


def _slice_with_gaps(x: fx.Node) -> bool:
    """Whether ``x`` comes from ``take`` or ``narrow`` and may have gaps between its rows. To reshape it, torch would
    compare symbolic sizes and add guards."""
    ours = (overlap.take.default, overlap.narrow.default)
    cut, gaps = False, False
    while x.target in (*ours, aten.slice.Tensor):
        dim: Any = x.args[1] if len(x.args) > 1 else 0
        cut |= x.target in ours
        gaps |= any(not isinstance(s, int) or s != 1 for s in tools.shape(x)[:dim])
        x = x.args[0]
    return cut and gaps


def part_count(size: Size, parts: int) -> int:
    """Number of sub-chunks for a dim of ``size`` rows: ``parts``, or ``size`` if ``size`` is known and smaller. At
    least 1 if ``size`` is known."""
    return max(1, min(parts, size)) if isinstance(size, int) else parts


def pieces_of(size: Size, parts: int) -> list[tuple[Size, Size]]:
    """``(start, length)`` of each sub-chunk of ``size`` rows."""
    cuts: list[Any] = routes.bounds(size, parts)
    return [(a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
