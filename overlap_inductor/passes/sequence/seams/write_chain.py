# SPDX-License-Identifier: Apache-2.0
"""Reorder the steps of a chain, after both seams were written in bands. A band's products are multiplied again and sent
before the next band is multiplied.

Before and after for three bands. ``g``: the first seam's gather and its matmuls. ``s``: the matmuls and sends of the
second seam's scatter. ``next``: a wait for a band of the scatter, the token-wise work, and the send of the second
seam's gather::

    g's wait 0; y0 = g[0] @ up                      s: own = cat(own rows of y) @ down
    g's wait 1; y1 = g[1] @ up                      g's wait 0; y0 = g[0] @ up
    g's wait 2; y2 = g[2] @ up                      s: send y0 @ down
    y = assemble(y0, y1, y2)                        g's wait 1; y1 = g[1] @ up
    s: send y[band 0] @ down                    ->  s: send y1 @ down
    s: send y[band 1] @ down                        next 0
    s: send y[band 2] @ down                        g's wait 2; y2 = g[2] @ up
    s: own = y[own rows] @ down                     s: send y2 @ down
    next 0; next 1; next 2                          next 1
    second gather's wait 0; ...; wait 1; ...        second gather's wait 0; ...
                                                    next 2
                                                    second gather's wait 1; ...

So the link carries the scatter's bands, and those of the second gather, while the first gather's bands are multiplied.
Bands of the second gather that were sent so early are multiplied while the scatter's last band travels.

Contract: the graph computes the same numbers. Ranks with equal plans write the same order. The second scatter's steps
pass the steps of sites that stand between the two seams. Raises ``RuntimeError`` if a step that must move needs a node
that cannot move. Source: Domino (Wang et al., arXiv:2409.15241), without its division of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from overlap_inductor.passes.sequence.seams.chains import Chain
from overlap_inductor.passes.sequence.seams.chains import free_to_move
from overlap_inductor.passes.sequence.seams.write import SITE
from overlap_inductor.passes.sequence.seams.write import write_like
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.placement import needed_behind
from overlap_inductor.torch_compat.step_values import StepValues
from overlap_inductor.torch_compat.step_values import mark

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor
_SETTINGS = 8
"""The number of arguments of ``exchange_wait`` in front of ``computed``."""


def write(chain: Chain, emitted: Iterable[fx.Node], values: StepValues) -> None:
    """Reorder the steps of ``chain``, as the module says. First, the second scatter reads pieces. Then its own rows
    move ahead, then its other steps, then the matmuls of the second gather's first bands.

    Args:
        emitted: the communicating ops of all sites.
        values: evaluates the nodes that are written.
    """
    steps: dict[str, list[fx.Node]] = {}
    for node in sorted(emitted):
        steps.setdefault(node.meta[SITE], []).append(node)
    sites = (chain.first.gather, chain.second.scatter, chain.second.gather)
    gather, scatter, second = (steps[site.facts.id] for site in sites)
    arrivals, waits = _only(gather, "exchange_wait"), _only(scatter, "exchange_wait")
    partial, sends = _only(scatter, "exchange_send"), _only(second, "exchange_send")
    held: Any = waits[0].args[2]
    own, count = held[-1], len(partial) // len(waits)
    _read_pieces(chain, partial[-1], values)
    # The matmuls of the rank's own rows in the second gather move, too, so copies of their results must move.
    movable = {*scatter, *second, *_placed(own.graph, chain.second.gather.facts.id)}
    _compute_after(own, _only(gather, "exchange_send")[-1], partial)
    _move([scatter[0], own], arrivals[0], movable)
    _run_after(arrivals[0], [*_computed(arrivals[0]), own])
    for band, before in enumerate(arrivals[1:]):
        _move(partial[band * count : (band + 1) * count], before, movable)
        if band:
            _move([waits[band - 1], sends[band - 1]], before, movable)
    _multiply_early(_only(second, "exchange_wait"), waits[-1], movable)


def _only(steps: Iterable[fx.Node], name: str) -> list[fx.Node]:
    return [n for n in steps if n.target is getattr(overlap, name).default]


def _placed(graph: fx.Graph, site: str) -> list[fx.Node]:
    copies = graph.find_nodes(op="call_function", target=overlap.place_ranks.default)
    return [n for n in copies if n.meta.get(SITE) == site]


def _compute_after(own: fx.Node, token: fx.Node, partial: Sequence[fx.Node]) -> None:
    """Have the nodes that compute ``own`` run after ``token``, no longer after a send among ``partial``."""
    pending = [own]
    while pending:
        node = pending.pop()
        if token < node:
            if node.target is overlap.after.default and node.args[1] in partial:
                node.args = (node.args[0], token)
                mark(node)
            pending += node.all_input_nodes


def _multiply_early(arrivals: Sequence[fx.Node], last: fx.Node, movable: set[fx.Node]) -> None:
    """Move the matmuls of the second gather's first bands in front of ``last``, the scatter's last wait. These bands
    were sent during the first gather. ``arrivals``: the second gather's waits; the last two stay behind ``last``."""
    moved, stay = arrivals[:-2], arrivals[-2]
    if not moved:
        return
    computed = _computed(moved[0])
    _run_after(moved[0], [n for n in computed if n < last])
    _run_after(last, [*_computed(last), *_computed(stay)])
    _run_after(stay, [*_computed(stay), *(n for n in computed if not n < last)])
    for wait, end in zip(moved, arrivals[1:], strict=False):
        steps = [wait]
        while (node := steps[-1].next) is not end:
            steps.append(node)
        _move([n for n in steps if n.meta.get(SITE) == wait.meta[SITE]], last, movable)


def _computed(wait: fx.Node) -> list[fx.Node]:
    """The nodes after which ``wait`` runs, although it does not read them."""
    arguments: Any = wait.args
    return list(arguments[_SETTINGS]) if len(arguments) > _SETTINGS else []


def _run_after(wait: fx.Node, computed: Sequence[fx.Node]) -> None:
    wait.args = (*wait.args[:_SETTINGS], list(computed))
    mark(wait)


def _read_pieces(chain: Chain, last: fx.Node, values: StepValues) -> None:
    """Have the second scatter read the pieces that the first gather computes, not the tensor that is assembled from
    them. ``last``: the scatter's last send."""
    graph, source = last.graph, chain.first.gather.facts.id
    site, world_size = chain.second.scatter.facts.id, chain.second.scatter.facts.collective.world_size
    takes = (overlap.take.default, overlap.take_ranks.default)
    taken = [n for n in graph.nodes if n.target in takes and n.meta.get(SITE) == site]
    bases = {n: base for n in taken if (base := _assembled(n.args[0])) is not None and base.meta.get(SITE) == source}
    pieces = {base: _pieces(base, world_size) for base in bases.values()}
    for node, base in bases.items():
        arguments: Any = node.args
        _, _, shifts, chunk, start, length, group = arguments
        ranks = tuple(s % world_size for s in (shifts if isinstance(shifts, (list, tuple)) else [shifts]))
        piece, own = pieces[base].get((ranks, start, length, chunk, group)), ranks == (0,)
        if piece is None and own and base.target is overlap.assemble.default:
            rows = sorted((at, part) for (of, at, *_), part in pieces[base].items() if of == ranks)
            with graph.inserting_before(node):
                piece = write_like(graph, node, values, aten.cat.default, [part for _, part in rows])
        if piece is not None and tools.shape(piece) == tools.shape(node):
            for reader in node.replace_all_uses_with(piece):
                values.keep(reader)
            _erase_unused(node)
        elif not own or piece is not None:
            raise RuntimeError(
                f"{node.name} reads rows {start} to {start + length} of the ranks {ranks}, which are no"
                f" piece of {base.name}"
            )
    for base in set(bases.values()):
        if base.target is not overlap.assemble.default:
            _without_copies(base, world_size)
        elif base.users:
            _keep_until(base, last, values)


def _without_copies(base: fx.Node, world_size: int) -> None:
    """If only the rank's own rows of ``base`` are still read, erase the copies of other ranks' rows to ``base``."""
    copies = [n for n in base.users if n.target is overlap.place_ranks.default]
    readers: list[fx.Node] = []

    def visit(node: fx.Node) -> bool:
        if node not in copies and not tools.is_reshape(node):
            readers.append(node)
        return tools.is_reshape(node)

    tools.walk([base], visit)
    group = copies[0].args[6]
    if any(n.target is not overlap.take.default or (n.args[2], n.args[6]) != (0, group) for n in readers):
        return
    for node in copies:
        shifts: Any = node.args[2]
        if any(s % world_size for s in shifts):
            for reader in node.replace_all_uses_with(node.args[1]):
                mark(reader)
            node.graph.erase_node(node)


def _keep_until(base: fx.Node, last: fx.Node, values: StepValues) -> None:
    """Have all readers of ``base`` run after ``last``. The pieces lie in the memory of ``base``, which may be freed
    after its last reader. Readers before ``last`` move behind it."""
    early: list[fx.Node] = []

    def visit(node: fx.Node) -> bool:
        if node < last:
            early.append(node)
        return node < last

    tools.walk([base], visit)
    for node in early:
        ours = SITE in node.meta and not (tools.is_reshape(node) or node.target is overlap.after.default)
        if ours or not free_to_move(node):
            raise RuntimeError(f"{node.name} reads {base.name} before {last.name}")
    readers = list(base.users)
    with base.graph.inserting_after(max(base, last)):
        kept = write_like(base.graph, base, values, overlap.after.default, base, last)
    for node in sorted(early, reverse=True):
        kept.append(node)
    for reader in readers:
        reader.replace_input_with(base, kept)
        values.keep(reader)


def _assembled(node: Any) -> fx.Node | None:
    """The node that joins the pieces from which ``node`` is viewed: ``assemble``, or the tensor to whose places
    ``place_ranks`` copies them."""
    while tools.is_reshape(node) or node.target is overlap.after.default:
        node = node.args[0]
    placed = any(u.target is overlap.place_ranks.default and u.args[0] is node for u in node.users)
    return node if placed or node.target is overlap.assemble.default else None


def _pieces(base: fx.Node, world_size: int) -> dict[Any, fx.Node]:
    """``{(ranks' distances, start, length, chunk, group): piece}``: the piece holds rows ``[start, start + length)`` of
    the shard of each of these ranks. A shard has ``chunk`` rows."""
    if base.target is overlap.assemble.default:
        arguments: Any = base.args
        nodes, shape, dim, chunk, shifts, starts, group = arguments
        parts = zip(shifts, starts[dim :: len(shape)], nodes, strict=True)
        return {((s % world_size,), start, tools.shape(node)[dim], chunk, group): node for s, start, node in parts}
    placed: list[Any] = [u.args for u in base.users if u.target is overlap.place_ranks.default]
    return {
        (tuple(s % world_size for s in shifts), start, length, chunk, group): part
        for _, part, shifts, chunk, start, length, group in placed
    }


def _move(nodes: Sequence[fx.Node], before: fx.Node, movable: set[fx.Node]) -> None:
    """Move ``nodes``, and what they need, in front of ``before``. ``movable``: ops that may move although they write in
    place."""
    for node in needed_behind(list(nodes), before):
        written = SITE not in node.meta and tools.written_between(before.prev, node, node.all_input_nodes)
        if node is before or written or (node not in movable and not free_to_move(node)):
            raise RuntimeError(f"{node.name} cannot move in front of {before.name}")
        before.prepend(node)


def _erase_unused(node: Any) -> None:
    while not node.users and node.op == "call_function":
        source = node.all_input_nodes[0]
        node.graph.erase_node(node)
        if not (tools.is_reshape(source) or source.target is overlap.after.default):
            return
        node = source
