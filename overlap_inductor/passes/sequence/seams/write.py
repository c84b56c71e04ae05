# SPDX-License-Identifier: Apache-2.0
"""Write seams in bands, after the steps of their sites were written. A band goes through the token-wise work and into
the gather while later bands still travel to this rank.

Before and after, for two bands (``lowerings.ring.unrolled_bands`` wrote the steps). ``s0``, ``s1``: the scatter's
sums. ``own[i]``: this rank's rows of band ``i`` in the gather's buffer. ``wait``: a wait of the scatter.
``gather's wait``: a wait for the other ranks' rows of a band, which are multiplied after it::

    wait 0; s0 = ...; wait 1; s1 = ...              wait 0; s0 = ...; r0 = s0 + x[band 0]; n0 = norm(r0)
    s = cat(s0, s1); r = s + x; n = norm(r)         send n0; y0 = own[0] @ w
    send n[band 0]; y0 = own[0] @ w             ->  wait 1 (after y0); s1 = ...; r1 = s1 + x[band 1]; n1 = norm(r1)
    send n[band 1]; y1 = own[1] @ w                 send n1; y1 = own[1] @ w
    gather's wait 0; ...                            r = cat(r0, r1)                     # if other nodes read r
                                                    gather's wait 0; ...

Contract: the graph computes the same numbers. Waits of one group must keep their order, so no step of another site may
stand between the seam's steps. Source: Domino (Wang et al., arXiv:2409.15241).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from overlap_inductor.passes.sequence.rows import Rows
from overlap_inductor.passes.sequence.rows import Tokens
from overlap_inductor.passes.sequence.rules import rule_of
from overlap_inductor.passes.sequence.seams.find import Seam
from overlap_inductor.passes.sequence.seams.find import between
from overlap_inductor.passes.sequence.seams.find import held_rows
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.step_values import NOT_COPIED
from overlap_inductor.torch_compat.step_values import StepValues
from overlap_inductor.torch_compat.step_values import mark

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor
SITE = "overlap_site"


def write(
    graph: fx.Graph,
    seam: Seam,
    emitted: Iterable[fx.Node],
    parts: dict[fx.Node, list[fx.Node]],
    values: StepValues,
) -> None:
    """Write ``seam`` in bands.

    Args:
        emitted: the communicating ops of all sites.
        parts: the bands of each tensor of earlier seams. This seam adds its own bands.
        values: evaluates the nodes that are written.

    Raises:
        RuntimeError: a step of another site stands between the steps of the seam.
    """
    steps: dict[str, list[fx.Node]] = {}
    for node in emitted:
        steps.setdefault(node.meta[SITE], []).append(node)
    found = _Steps(graph, seam, steps)
    first, last = found.waits[0], found.sends[-1]
    for site, nodes in steps.items():
        if site not in found.sites and any(first < n < last for n in nodes):
            raise RuntimeError(f"a step of site {site} stands between the steps of the seam's two sites")
    _write(found, parts, values)


class _Steps:
    """The steps of one seam.

    Attributes:
        waits: the scatter's wait for each band.
        rows: this rank's scattered rows, a ``cat`` of the bands.
        sends: the gather's send of each band.
        start: the op that makes the gather's buffer.
    """

    def __init__(self, graph: fx.Graph, seam: Seam, steps: Mapping[str, list[fx.Node]]) -> None:
        self.graph, self.sites = graph, (seam.scatter.facts.id, seam.gather.facts.id)
        scatter, gather = (steps[site] for site in self.sites)
        self.group_name = seam.scatter.facts.collective.group_name
        self.waits = [n for n in scatter if n.target is overlap.exchange_wait.default]
        self.start = gather[0]
        self.sends = [n for n in gather if n.target is overlap.exchange_send.default]
        node = self.waits[-1]
        while not (node.target is aten.cat.default and node.meta.get(SITE) == self.sites[0]):
            node = node.next
        self.rows = node

    @property
    def bands(self) -> int:
        return len(self.waits)

    def sums(self, band: int) -> list[fx.Node]:
        """The scatter's nodes from the wait of ``band`` to the next band's wait, or to ``rows``."""
        ends = [*self.waits, self.rows]
        return _range(ends[band], ends[band + 1])


def _write(steps: _Steps, parts: dict[fx.Node, list[fx.Node]], values: StepValues) -> None:
    pieces: list[Any] = [n.args[2] for n in steps.sends]
    gathered = pieces[0].args[0]
    region = between(steps.rows, gathered)
    assert region is not None
    held = held_rows(steps.rows, region, steps.group_name, steps.bands)
    readers = _readers(steps.rows, steps.sends[-1], set(region), set(pieces))
    parts[steps.rows] = list(steps.rows.args[0])
    own = [_results(_range(*pair)) for pair in pairwise(steps.sends)]
    kept = [n for n in (steps.rows, *region) if not {*region, *pieces}.issuperset(n.users)]
    for band, (send, piece) in enumerate(zip(steps.sends, pieces, strict=True)):
        before = steps.start if band == 0 else send
        if band:
            wait = steps.waits[band]
            for node in steps.sums(band):
                before.prepend(node)
            # The wait comes after the matmuls of the previous band, and after the epilogue that reads them.
            wait.args = (*wait.args, own[band - 1])
            mark(wait)
        writer = _BandWriter(steps, band, parts, values, {*region})
        # If nodes outside the region also read a tensor, the kernel of each band stores its part of the tensor. If the
        # part were not stored, each kernel that reads it might compute it anew. The band's partial sums would then stay
        # in memory.
        with steps.graph.inserting_before(before):
            if steps.rows in kept:
                parts[steps.rows][band] = writer.stored(parts[steps.rows][band], steps.waits[band])
            for node in region:
                part = writer.write(node, held)
                parts.setdefault(node, []).append(writer.stored(part, steps.waits[band]) if node in kept else part)
        piece.replace_all_uses_with(parts[gathered][band])
        steps.graph.erase_node(piece)
        mark(send)
    steps.rows.args = (parts[steps.rows],)
    values.keep(steps.rows)
    _give_whole(steps, region, readers, parts, values)


def _give_whole(
    steps: _Steps,
    region: list[fx.Node],
    readers: list[fx.Node],
    parts: dict[fx.Node, list[fx.Node]],
    values: StepValues,
) -> None:
    """After the last send, join the bands of each node of ``region`` that nodes outside read. Then move
    ``readers``, the nodes outside that are computed from the scattered rows, behind the joined bands."""
    inside, last = set(region), steps.sends[-1]
    behind = last.next
    behind.prepend(steps.rows)
    for node in region:
        outside = [u for u in node.users if u not in inside]
        if not outside:
            continue
        with steps.graph.inserting_before(behind):
            shape = tools.shape(node)
            joined = write_like(steps.graph, node, values, aten.cat.default, parts[node])
            if tools.shape(joined) != shape:
                joined = write_like(steps.graph, node, values, aten.reshape.default, joined, shape)
        parts[joined] = parts[node]
        for user in outside:
            user.replace_input_with(node, joined)
            values.keep(user)
    for node in readers:
        behind.prepend(node)
    for node in reversed([*region, steps.rows]):
        if not node.users:
            steps.graph.erase_node(node)


def _readers(rows: fx.Node, last: fx.Node, inside: set[fx.Node], pieces: set[fx.Node]) -> list[fx.Node]:
    """In graph order, the nodes before ``last`` that are computed from ``rows``, except those ``inside`` and those that
    depend on ``rows`` only through ``pieces``."""
    found: list[fx.Node] = []

    def visit(node: fx.Node) -> bool:
        if not node < last or node in pieces:
            return False
        if node not in inside:
            found.append(node)
        return True

    tools.walk([rows], visit)
    return found


def _range(first: fx.Node, end: fx.Node) -> list[fx.Node]:
    """The nodes from ``first`` on, without ``end``."""
    found = []
    while first is not end:
        found.append(first)
        first = first.next
    return found


def _results(nodes: list[fx.Node]) -> list[fx.Node]:
    """The matmuls among ``nodes``, and those of ``nodes`` that are computed from a matmul. A node that another one of
    ``nodes`` reads is left out."""
    computed: set[fx.Node] = set()
    for node in nodes:
        if matmuls.parse(node) is not None or not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
    return [n for n in nodes if n in computed and computed.isdisjoint(n.users)]


def _only_source(node: fx.Node) -> fx.Node | None:
    """The only tensor that ``node`` reads, if ``node`` is elementwise, has the shape of this tensor and draws no random
    numbers. Else ``None``."""
    sources = node.all_input_nodes
    random = operators.has_tag(node, torch.Tag.nondeterministic_seeded)
    if len(sources) != 1 or random or not tools.is_pointwise(node) or sources[0] not in node.args:
        return None
    same = tools.is_tensor(sources[0]) and tools.shape(sources[0]) == tools.shape(node)
    return sources[0] if same else None


def write_like(graph: fx.Graph, like: fx.Node, values: StepValues, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Write a node with the metadata of ``like``, and evaluate it."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k not in NOT_COPIED}
    node.meta["val"] = values.evaluate(node, "")
    return node


class _BandWriter:
    """Writes the token-wise work of one band. Implements ``rules.Writer``. ``parts``: for each tensor, its bands that
    were already written. ``inside``: the nodes that are computed in bands."""

    def __init__(
        self,
        steps: _Steps,
        band: int,
        parts: Mapping[fx.Node, list[fx.Node]],
        values: StepValues,
        inside: set[fx.Node],
    ) -> None:
        self._graph, self._band, self._bands = steps.graph, band, steps.bands
        self._parts, self._values = parts, values
        self._like, self._inside = steps.rows, inside

    def write(self, node: fx.Node, held: Mapping[fx.Node, Rows]) -> fx.Node:
        rule = rule_of(node)
        assert rule is not None
        self._like = node
        return rule.write(node, held[node], held, self)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return write_like(self._graph, self._like, self._values, target, *args, **kwargs)

    def stored(self, part: fx.Node, wait: fx.Node) -> fx.Node:
        """Have ``part`` computed once, after ``wait``, and written to memory."""
        return self.call(overlap.after.default, part, wait)

    def rows(self, node: fx.Node) -> fx.Node:
        return self._parts[node][self._band]

    def size(self, size: Any) -> Any:
        return size

    def reshape(self, node: fx.Node, shape: list[Any]) -> fx.Node:
        return node if tools.shape(node) == list(shape) else self.call(aten.reshape.default, node, list(shape))

    def cut(self, node: fx.Node, tokens: Tokens, ahead: int, dims: list[Any]) -> fx.Node:
        known = self._parts.get(node, [])
        shape = tools.shape(node)
        if len(known) == self._bands and tools.shape(known[self._band]) == [tokens.shard, *shape[ahead:]]:
            return known[self._band]
        if self._inside.issuperset(node.users) and (source := _only_source(node)) is not None:
            # All readers of ``node`` are written in bands, so ``node`` is too: its op runs on the band of its input.
            self._inside.add(node)
            part = self.cut(source, tokens, ahead, dims)
            return self.call(node.target, *(part if a is source else a for a in node.args), **node.kwargs)
        if tools.numel(shape[:ahead]) != tokens.count:
            node = self.reshape(node, [*[1] * (len(dims) - ahead), *shape])
            node = self.call(aten.expand.default, node, [*dims, *shape[ahead:]])
        flat = self.reshape(node, [tokens.count, *shape[ahead:]])
        start = self._band * tokens.shard
        return self.call(overlap.window.default, flat, 0, start, tokens.shard)
