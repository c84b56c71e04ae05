# SPDX-License-Identifier: Apache-2.0
"""Write ``matmul -> row-wise ops -> all-to-all`` in bands of tokens (``sites.banded_nodes``). ``r``: the rank::

    buffer = exchange_start()
    for band: y = f(x[band] @ w); for i in 0 .. W-2: send the part of y for rank r + 1 + i
    buffer[r] = the parts of all bands for r
    kept = cat(pieces of all bands)                    # for each result that is also read elsewhere
    wait for all hops                                  # where the program waits

One matmul computes a band. The band is written to memory once, as one contiguous part for each rank.
So a part is sent without a copy.
"""

from __future__ import annotations

import torch
from torch import fx

from overlap_inductor.lowerings.exchanged_rows import arranged
from overlap_inductor.lowerings.ring.gather_pieces import annotate_new
from overlap_inductor.lowerings.ring.unrolled_exchange import ROUTE
from overlap_inductor.lowerings.schedule import Replaced
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.banded_nodes import BandedNodes
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.row_pieces import BandPieces
from overlap_inductor.sites.row_pieces import place_of
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.sites.step_emitter import part_count
from overlap_inductor.sites.step_emitter import pieces_of

aten = torch.ops.aten
overlap = torch.ops.overlap_inductor


def rewrite(emit: StepEmitter, nodes: BandedNodes, parts: int) -> Replaced:
    """Write the steps. ``parts``: the number of bands."""
    (collective,) = nodes.collectives
    world_size, dtype = emit.world_size, tools.dtype(collective.input)
    cuts = pieces_of(nodes.lead, part_count(nodes.lead, parts))
    bounds = [start * nodes.rest for start, _ in cuts] + [nodes.lead * nodes.rest]
    where, shape = (ROUTE, emit.group_name, emit.site), [world_size, bounds[-1]]
    buffer = emit.communicate(overlap.exchange_start.default, emit.chain, shape, bounds, dtype, *where, *emit.transport)
    sent: dict[int, fx.Node] = {}
    own: list[fx.Node] = []
    after: fx.Node | None = None
    kept: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes.kept}
    for number, (start, length) in enumerate(cuts):
        pieces = _pieces(emit, nodes, start, length, after)
        band = _in_memory(emit, nodes, pieces, after)
        for node, found in kept.items():
            found.append(pieces.of(node))
        for step in range(world_size - 1):
            hop = step * len(cuts) + number
            sent[hop] = emit.take(band, 0, step + 1, 1, 0, 1)
            after = emit.communicate(overlap.exchange_send.default, emit.chain, buffer, sent[hop], bounds, hop, *where)
        own.append(emit.take(band, 0, 0, 1, 0, 1))
    mine = own[0] if len(own) == 1 else emit.call(aten.cat.default, own, 1)
    emit.call(overlap.exchange_keep.default, buffer, mine, emit.group_name)
    joined = {node: _joined(emit, nodes, node, found) for node, found in kept.items()}
    with emit.graph.inserting_before(collective.wait):
        hops = sorted(sent)
        emit.communicate(
            overlap.exchange_wait.default, emit.chain, buffer, [sent[h] for h in hops], bounds, hops, *where
        )
        return joined | arranged(emit, nodes, buffer)


def _joined(emit: StepEmitter, nodes: BandedNodes, node: fx.Node, pieces: list[fx.Node]) -> fx.Node:
    dim = place_of(nodes.layouts[node], nodes.band)
    if dim is None:
        raise RuntimeError(f"the pieces of {node.name} cannot be joined; expected a site without such a node")
    whole = pieces[0] if len(pieces) == 1 else emit.call(aten.cat.default, pieces, dim)
    return emit.contiguous(whole)


def _pieces(emit: StepEmitter, nodes: BandedNodes, start: Size, length: Size, after: fx.Node | None) -> BandPieces:
    """Write the matmul of one band. Returns the band's ``BandPieces``. The matmul's rows are
    one dim, or a product of several (*atoms*: ``sites.layouts``). ``nodes.band`` is the one that is cut into bands. The
    band has ``length`` of its indices, from index ``start`` on. Each index stands for ``nodes.unit`` rows. ``after``:
    the token of the last send, if any."""
    leaf, rows = nodes.leaves[0], (start * nodes.unit, length * nodes.unit)
    lhs = emit.narrow(leaf.lhs, 0, *rows)
    product = matmuls.emit(emit.graph, leaf, lhs, leaf.rhs, {"M": lambda x, dim: emit.narrow(x, dim, *rows)})
    annotate_new(emit, product)
    if after is not None:
        # Without this edge, Inductor may run all matmuls before the first send.
        product = emit.call(overlap.after.default, product, after)
    return BandPieces(emit, nodes, {leaf.node: product}, nodes.band, start, length)


def _in_memory(emit: StepEmitter, nodes: BandedNodes, pieces: BandPieces, after: fx.Node | None) -> fx.Node:
    """The band's result, written to memory as ``[W, elements]``: for each receiving rank, the part that goes to it."""
    last = nodes.collectives[0].input
    band = emit.convert(pieces.of(last), nodes.layouts[last].without_rank(), nodes.in_bands, pieces.sizes)
    return emit.call(overlap.after.default, band, after or emit.chain)
