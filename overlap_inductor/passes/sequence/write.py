# SPDX-License-Identifier: Apache-2.0
"""Rewrite stretches.

T tokens, W ranks, t = ceil(T / W). Op ``take`` cuts the rows of the rank that runs it, so the graph holds no rank
number::

    w = wait_tensor(all_reduce(p [B, S, H]))       p [T, H], padded to [W t, H] if W does not divide T
    r = add(w, residual)                      ->   w = wait_tensor(reduce_scatter(p)) [t, H]
    n = norm(r)                                    r = add(w, take(residual)) [t, H]; n = norm(r) [t, H]
    y = mm(view(n), wq)                            g = wait_tensor(all_gather(n)) [W t, H], cut to [T, H]
                                                   y = mm(view(g), wq)

All users that need all rows of a node share one gather. Every new node has the metadata (module, stack trace, recompute
tag) of the node that it replaces. If T is symbolic and W does not divide it, ``padded_matmuls`` then moves each padding
before the matmul, and each cut behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.registry import define_ops
from overlap_inductor.passes.find_reduce import is_matmul_result
from overlap_inductor.passes.find_region import sums_experts
from overlap_inductor.passes.sequence.early_cuts import DEEPEST
from overlap_inductor.passes.sequence.early_cuts import cut_early
from overlap_inductor.passes.sequence.find import Source
from overlap_inductor.passes.sequence.find import Stretch
from overlap_inductor.passes.sequence.flat_sums import flat_sum
from overlap_inductor.passes.sequence.flat_sums import views_split_ranks
from overlap_inductor.passes.sequence.gather_again import save_rows
from overlap_inductor.passes.sequence.late_sums import behind
from overlap_inductor.passes.sequence.late_sums import combine
from overlap_inductor.passes.sequence.late_sums import is_late
from overlap_inductor.passes.sequence.late_sums import of_the_backward
from overlap_inductor.passes.sequence.padded_matmuls import compute_padded
from overlap_inductor.passes.sequence.replicated import write_rows
from overlap_inductor.passes.sequence.rows import Rows
from overlap_inductor.passes.sequence.rows import Tokens
from overlap_inductor.passes.sequence.rules import rule_of
from overlap_inductor.passes.sequence.sizes import SizeNodes
from overlap_inductor.passes.sequence.sums import EXTREMA
from overlap_inductor.passes.sequence.sums import REDUCE_OPS
from overlap_inductor.passes.sequence.sums import wide
from overlap_inductor.passes.sequence.sums import write_partial
from overlap_inductor.passes.sequence.sums import write_result
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.torch_compat.step_values import NOT_COPIED
from overlap_inductor.torch_compat.step_values import StepValues

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
overlap = torch.ops.overlap_inductor
_TO_A_SHAPE = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


class RowWriter:
    """Rewrites stretches of one graph, in place. Implements ``rules.Writer``.

    Attributes:
        gathered_again: the forward's gathers that the backward repeats.
        made: for each collective that was written, the number of its stretch and the node whose place it takes.
    """

    def __init__(
        self, graph: fx.Graph, held: Mapping[fx.Node, Rows], config: OverlapConfig, values: StepValues
    ) -> None:
        """``values`` evaluates the nodes. The writers of a graph and of its copies can share it."""
        define_ops()
        self.graph, self.held, self.config, self._values = graph, held, config, values
        self.gathered_again: list[fx.Node] = []
        self.made: dict[fx.Node, tuple[int, fx.Node]] = {}
        self._sizes = SizeNodes(graph)
        self._local: dict[fx.Node, fx.Node] = {}
        self._gathered: dict[fx.Node, fx.Node] = {}
        self._cuts: dict[tuple[fx.Node, str, str], fx.Node] = {}
        self._written: set[fx.Node] = set()
        self._meta: dict[str, Any] = {}
        self._stretch = 0
        self._late: dict[tuple[Any, ...], list[tuple[int, fx.Node, fx.Node]]] = {}
        self._backward = of_the_backward(graph)
        self._in_backward, self._early = False, 0
        self._short: dict[fx.Node, Tokens] = {}
        self._pads: dict[fx.Node, Tokens] = {}

    def apply(self, stretches: list[tuple[int, Stretch]]) -> None:
        """Rewrite the numbered ``stretches``. After an error, the graph is only partly rewritten."""
        members: dict[fx.Node, tuple[int, Source | None]] = {}
        sums: dict[fx.Node, int] = {}
        for number, stretch in stretches:
            members.update({s.result: (number, s) for s in stretch.sources})
            members.update(dict.fromkeys(stretch.rows, (number, None)))
            sums.update(dict.fromkeys(stretch.sums, number))
        for node in list(self.graph.nodes):
            self._in_backward = node in self._backward
            if node in sums:
                self._stretch = sums[node]
                self._sum(node)
            elif node in members:
                self._stretch, source = members[node]
                with self.in_place_of(node):
                    self._local[node] = self._scatter(source) if source is not None else self._row_node(node)
        for number, stretch in stretches:
            self._stretch = number
            readers = {node: self._readers(node, users) for node, users in stretch.needs_whole.items()}
            for node in sorted(readers, key=lambda n: min(readers[n])):
                self._gather(node, readers[node])
        for late in self._late.values():
            self._combine(late)
        inputs = [c.input for _, stretch in stretches for source in stretch.sources for c in source.collectives]
        for node in sorted((n for _, s in stretches for n in _members(s)), reverse=True):
            if not node.users:
                self.graph.erase_node(node)
        self._erase_unread(inputs)
        short, pads = ({n: t for n, t in of.items() if _is_symbolic(t)} for of in (self._short, self._pads))
        if short or pads:
            compute_padded(self.graph, short, pads, self)
            self._backward |= of_the_backward(self.graph)
        self.gathered_again = save_rows(self.graph, self.made, self._backward, self.config)
        self.graph.lint()

    def _erase_unread(self, nodes: list[fx.Node]) -> None:
        """Of ``nodes`` and what they are computed from, erase views and sums without a reader. They would still count
        as users of their matmuls."""
        left, pending = set(self.graph.nodes), list(nodes)
        while pending:
            node = pending.pop()
            if node in left and not node.users and (tools.is_reshape(node) or node.target is aten.add.Tensor):
                pending += node.all_input_nodes
                left.remove(node)
                self.graph.erase_node(node)

    def _readers(self, node: fx.Node, users: list[tuple[fx.Node, str]]) -> list[fx.Node]:
        """``users``, and the new nodes that read ``node``: the reduce-scatter, if ``node`` is all-reduced again."""
        return [*(user for user, _ in users), *(user for user in node.users if user in self._written)]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        self._written.add(node)
        node.meta = {**self._meta, "val": self._values.result(node)}
        return node

    def rows(self, node: fx.Node) -> fx.Node:
        return self._local[node]

    def size(self, size: Any) -> Any:
        return self._sizes.argument(size)

    def reshape(self, node: fx.Node, shape: list[Any]) -> fx.Node:
        source = node
        while source not in self.held:
            have = tools.shape(source)
            if len(have) == len(shape) and all(map(same_size, have, shape)):
                return source
            if not tools.is_reshape(source):
                break
            source = source.all_input_nodes[0]
        return self.call(aten.reshape.default, node, [self.size(s) for s in shape])

    def cut(self, node: fx.Node, tokens: Tokens, ahead: int, dims: list[Any]) -> fx.Node:
        # Two stretches may cut one tensor for different dims of tokens. For S tokens, [S, H] is cut as it is. For B * S
        # tokens, it is repeated B times before it is cut.
        key = node, tokens.group_name, str((ahead, dims))
        if key not in self._cuts:
            early = self._cut_early(node, tokens, ahead)
            self._cuts[key] = self._taken(node, tokens, ahead, dims) if early is None else early
        return self._cuts[key]

    def _cut_early(self, node: fx.Node, tokens: Tokens, ahead: int) -> fx.Node | None:
        if not self._in_backward or self._early == DEEPEST:
            return None
        self._early += 1
        try:
            return cut_early(node, tokens, ahead, self.held, self)
        finally:
            self._early -= 1

    def _taken(self, node: fx.Node, tokens: Tokens, ahead: int, dims: list[Any]) -> fx.Node:
        flat = self.padded(self.full(node, tokens, ahead, dims), tokens)
        rows = self.size(tokens.shard)
        return self.call(overlap.take.default, flat, 0, 0, rows, 0, rows, tokens.group_name)

    def full(self, node: fx.Node, tokens: Tokens, ahead: int, dims: list[Any]) -> fx.Node:
        """``node`` as ``[T, *features]``. Its first ``ahead`` dims are expanded to ``dims`` and joined."""
        shape = tools.shape(node)
        if not same_size(tools.numel(shape[:ahead]), tokens.count):
            node_in_dims = self.reshape(node, [*[1] * (len(dims) - ahead), *shape])
            node = self.call(aten.expand.default, node_in_dims, [self.size(s) for s in (*dims, *shape[ahead:])])
        return self.reshape(node, [tokens.count, *shape[ahead:]])

    def padded(self, flat: fx.Node, tokens: Tokens) -> fx.Node:
        """``flat [T, ...]`` with zero rows up to a multiple of the world size."""
        if tokens.even:
            return flat
        behind = len(tools.shape(flat)) - 1
        return self.call(
            aten.constant_pad_nd.default, flat, [0, 0] * behind + [0, self.size(tokens.padded - tokens.count)]
        )

    def _row_node(self, node: fx.Node) -> fx.Node:
        rule = rule_of(node)
        if rule is None:
            return write_rows(node, self)
        return rule.write(node, self.held[node], self.held, self)

    def _scatter(self, source: Source) -> fx.Node:
        rows, first = self.held[source.result], source.collectives[0]
        tokens = rows.tokens
        shape = [tokens.count, *tools.shape(source.result)[rows.lead :]]
        parts = [c.input for c in source.collectives]
        if not tokens.even:
            # The padding reads the matmul directly. A view in between would hide the padded rows from the finders.
            parts = [self.reshape(part, shape) for part in parts]
        elif views_split_ranks(tools.shape(source.result)[: rows.lead], tokens.world_size):
            parts = [flat_sum(part, shape, self.held, self) for part in parts]
        total = parts[0]
        for part in parts[1:]:
            total = self.call(aten.add.Tensor, total, part)
        flat = self.padded(self.reshape(total, shape), tokens)
        if not tokens.even:
            self._pads[flat] = tokens
        if not tools.is_contiguous(flat):
            flat = self.call(aten.clone.default, flat, memory_format=torch.contiguous_format)
        is_site = is_matmul_result(total) or (tokens.even and sums_experts(total))
        if tools.value(flat).device.type == "cpu" and not is_site:
            return self._sum_of_exchanged(first.node, flat, tokens)
        return self._exchanged(first.node, c10d.reduce_scatter_tensor.default, flat, "sum", tokens)

    def _sum_of_exchanged(self, old: fx.Node, flat: fx.Node, tokens: Tokens) -> fx.Node:
        """A reduce-scatter written as an all-to-all and a sum. Gloo's reduce-scatter takes longer than its all-reduce
        (110 ms against 70 ms for 4 MiB, 2 ranks, 500 Mbit/s). No matmul computes ``flat``, so no schedule could overlap
        a reduce-scatter."""
        behind, dtype = tools.shape(flat)[1:], tools.dtype(flat)
        splits = [self.size(tokens.shard)] * tokens.world_size
        node = self.call(c10d.all_to_all_single.default, flat, splits, splits, tokens.group_name)
        self.made[node] = (self._stretch, old)
        parts = self.call(c10d.wait_tensor.default, node)
        parts = self.reshape(parts, [tokens.world_size, tokens.shard, *behind])
        total = self.call(aten.sum.dim_IntList, parts, [0], False, dtype=wide(dtype))
        if tools.dtype(total) == dtype:
            return total
        return self.call(torch.ops.prims.convert_element_type.default, total, dtype)

    def _gather(self, node: fx.Node, users: list[fx.Node]) -> None:
        """Gather the rows of ``node`` before the first of ``users``. All of ``users`` then read all rows."""
        tokens, local = self.held[node].tokens, self._local[node]
        first = min(users)
        with self.in_place_of(node, first):
            if local not in self._gathered:
                sent = self._movable(local)
                if not tools.is_contiguous(local):
                    sent = self.call(aten.clone.default, sent, memory_format=torch.contiguous_format)
                full = self._exchanged(node, c10d.all_gather_into_tensor.default, sent, None, tokens)
                if tools.dtype(full) != tools.dtype(local):
                    full = self.call(aten.view.dtype, full, tools.dtype(local))
                if not tokens.even:
                    full = self.call(aten.slice.Tensor, full, 0, 0, self.size(tokens.count))
                    self._short[full] = tokens
                self._gathered[local] = full
            elif first < self._gathered[local]:
                raise RuntimeError(f"{first.name} needs all rows of {node.name} before they are gathered")
            full = self._gathered[local]
            # Users that reshape the rows read ``full`` directly. A view in between would hide the padded rows from the
            # finders. If W does not divide B, a view as [B, S, H] would also split the dim of the ranks.
            flat = [u for u in users if u.target in _TO_A_SHAPE]
            whole = self.reshape(full, tools.shape(node)) if len(flat) < len(users) else full
        for user in users:
            if user.op == "output":
                with self.in_place_of(node, user):
                    user.replace_input_with(node, self._with_strides_of(node, whole))
            else:
                user.replace_input_with(node, full if user in flat else whole)

    def _with_strides_of(self, node: fx.Node, whole: fx.Node) -> fx.Node:
        """``whole`` with the strides of ``node``. ``node`` is a result of the graph, and callers may rely on its
        strides."""
        wanted = tools.value(node).stride()
        if tools.value(whole).stride() == wanted or not all(isinstance(s, int) for s in (*wanted, *tools.shape(node))):
            return whole
        order = sorted(range(len(wanted)), key=lambda d: (-wanted[d], d))
        dense = self.call(aten.permute.default, whole, order)
        dense = self.call(aten.clone.default, dense, memory_format=torch.contiguous_format)
        return self.call(aten.permute.default, dense, sorted(range(len(order)), key=order.__getitem__))

    def _movable(self, local: fx.Node) -> fx.Node:
        """``local``, viewed as bytes if its dtype is fp8: gloo cannot move fp8."""
        dtype = tools.dtype(local)
        narrow = dtype.is_floating_point and dtype.itemsize == 1
        return self.call(aten.view.dtype, local, torch.uint8) if narrow else local

    def _exchanged(self, old: fx.Node, target: Any, sent: fx.Node, reduce_op: str | None, tokens: Tokens) -> fx.Node:
        terms = (tokens.world_size, tokens.group_name)
        node = self.call(target, sent, *(() if reduce_op is None else (reduce_op,)), *terms)
        self.made[node] = (self._stretch, old)
        return self.call(c10d.wait_tensor.default, node)

    def _sum(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        rows = self.held[source]
        with self.in_place_of(node):
            part = write_partial(node, rows, self)
            if is_late(node):
                value = tools.value(part)
                key = (rows.tokens.group_name, value.dtype, value.device, node in self._backward)
                self._late.setdefault(key, []).append((self._stretch, node, part))
                return
            if REDUCE_OPS[node.target] == "sum":
                combined = self._all_reduced(node, part, rows.tokens.group_name)
            else:
                # Some backends drop a NaN in an all-reduce with max or min. So each rank gathers the parts and combines
                # them.
                one = self.reshape(part, [1, *tools.shape(part)])
                parts = self._exchanged(node, c10d.all_gather_into_tensor.default, one, None, rows.tokens)
                combined = self.call(EXTREMA[REDUCE_OPS[node.target]], parts, [0])
            result = write_result(node, combined, self)
        node.replace_all_uses_with(result)

    def _combine(self, late: list[tuple[int, fx.Node, fx.Node]]) -> None:
        """At the end of the graph, write one all-reduce for several sums."""
        self._stretch, last, _ = late[-1]
        output = self.graph.output_node()
        group = self.held[last.args[0]].tokens.group_name
        with self.in_place_of(last, output):
            sums = combine([part for _, _, part in late], lambda part: self._all_reduced(last, part, group), self)
        for (_, node, _), total in zip(late, sums, strict=True):
            users = behind(node)
            with self.in_place_of(node, output):
                node.replace_all_uses_with(write_result(node, total, self))
            for user in users:
                output.prepend(user)

    def _all_reduced(self, node: fx.Node, part: fx.Node, group_name: str) -> fx.Node:
        combined = self.call(c10d.all_reduce.default, part, REDUCE_OPS[node.target], group_name)
        self.made[combined] = (self._stretch, node)
        return self.call(c10d.wait_tensor.default, combined)

    @contextmanager
    def in_place_of(self, node: fx.Node, before: fx.Node | None = None) -> Iterator[None]:
        """New nodes stand before ``before`` (by default ``node``), with the metadata of ``node``."""
        outer, self._meta = self._meta, {k: v for k, v in node.meta.items() if k not in NOT_COPIED}
        try:
            with self.graph.inserting_before(node if before is None else before):
                yield
        finally:
            self._meta = outer


def _is_symbolic(tokens: Tokens) -> bool:
    return isinstance(tokens.count, torch.SymInt)


def _members(stretch: Stretch) -> set[fx.Node]:
    """The nodes of ``stretch`` that may have no user after the rewrite."""
    replaced = (n for source in stretch.sources for n in _nodes_of(source))
    return {*stretch.rows, *stretch.whole_too, *stretch.sums, *replaced}


def _nodes_of(source: Source) -> list[fx.Node]:
    """The nodes that ``source`` replaces."""
    return [*source.adds, *(n for c in source.collectives for n in c.chain())]
