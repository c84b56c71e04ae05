# SPDX-License-Identifier: Apache-2.0
"""The looping op of experts between two exchanges (Comet, arXiv:2502.19811). Rows arrive, are computed by their experts
and return, piece by piece::

    start all hops of the first exchange
    experts(first half of the own rows)
    for each hop: wait for it; experts(its rows); start the hop of the second exchange that returns them
    experts(second half of the own rows)

The first half hides the first pieces that arrive. The second half hides the last pieces that return. The op may return
while pieces are under way. The op ``exchange_wait`` waits for these pieces.

In the experts' order, row i is the arrived row ``index[i]``, and the rows of expert e end at ``ends[e]``. The GPU finds
where each expert's rows end in a piece, so the host reads no row counts::

    ordered = sort(positions of the piece's rows in the experts' order)     # from the inverse of index
    ends'   = searchsorted(ordered, ends)                                   # where each expert's rows end in the piece
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.ring.looped_uneven_ops import in_elements
from overlap_inductor.lowerings.uneven_parts import check_parts
from overlap_inductor.sites.row_program import RowProgram
from overlap_inductor.sites.row_program import from_text
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.transports import exchange as exchanges
from overlap_inductor.transports import routes

Tensors = list[torch.Tensor]
Results = tuple[torch.Tensor, torch.Tensor, Tensors, torch.Tensor]


class Experts:
    """Runs the experts on the rows of ``arrived``, some rows at a time.

    Attributes:
        results: the results of all rows, in the order of ``arrived``.
        handed_out: the values that the program returns besides its results (``RowProgram.handed_out``), with rows in
            the order of the experts.
    """

    def __init__(
        self,
        arrived: torch.Tensor,
        index: torch.Tensor,
        ends: torch.Tensor,
        rows: Sequence[torch.Tensor],
        whole: Sequence[torch.Tensor],
        program: RowProgram,
    ) -> None:
        self.arrived, self.rows, self.whole, self.program = arrived, rows, whole, program
        count = arrived.shape[0]
        self.index = torch.where(index < 0, index + count, index)
        self.inverse = torch.empty_like(self.index)
        self.inverse[self.index] = torch.arange(count, device=index.device, dtype=index.dtype)
        self.ends = ends.to(index.dtype)
        self.results, *self.handed_out = _outputs(arrived, program)

    def compute(self, start: int, stop: int) -> None:
        if start == stop:
            return
        ordered = self.inverse[start:stop].sort().values
        places = self.index[ordered]
        ends = torch.searchsorted(ordered, self.ends, out_int32=True)
        values = self.program.run([self.arrived[places], *(r[ordered] for r in self.rows)], self.whole, ends)
        self.results[places] = values[self.program.result]
        for shared, one in zip(self.handed_out, self.program.handed_out, strict=True):
            shared[ordered] = values[one.value]


def _outputs(arrived: torch.Tensor, program: RowProgram) -> Tensors:
    """Empty tensors: one for the results of all rows, then one for each value of ``RowProgram.handed_out``."""
    sizes = [((program.width,), program.dtype), *((h.sizes, h.dtype) for h in program.handed_out)]
    return [arrived.new_empty(arrived.shape[0], *size, dtype=getattr(torch, dtype)) for size, dtype in sizes]


def _all_to_all_experts(
    chain: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    ends: torch.Tensor,
    rows: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
    program: str,
    sent: Sequence[int],
    received: Sequence[int],
    parts: int,
    group_name: str,
    site: str,
    transport: str = "",
) -> Results:
    group, parsed = resolve_group(group_name), from_text(program)
    world_size, rank, width = group.size(), group.rank(), x.shape[1]
    check_parts(x.shape[0], sent, received, rank, site)
    cuts, places = routes.places(sent, parts), routes.places(received, parts)
    x = x.contiguous()
    arrived = x.new_empty(places[-1][-1], width)
    arrived[places[rank][0] : places[rank][-1]].copy_(x[cuts[rank][0] : cuts[rank][-1]])
    there = exchanges.open_uneven(arrived, in_elements(places, width), "direct", group, site, transport)
    # An exchange is found by its buffer's address, or by its site if the buffer is empty. If no rows arrive and none
    # return, both exchanges have the same key. So the first is forgotten here. This op still holds it, so its hops run.
    exchanges.close_exchange(arrived, group, site)
    buffer = x.new_empty(cuts[-1][-1], parsed.width, dtype=getattr(torch, parsed.dtype))
    back = exchanges.open_uneven(buffer, in_elements(cuts, parsed.width), "direct", group, site, transport)
    # A transport may move messages between two ranks in the order in which they start. So on every rank, all hops of
    # the first exchange start before those of the second.
    for hop in range(there.hop_count):
        step, part = divmod(hop, parts)
        to = cuts[(rank + 1 + step) % world_size]
        there.post(hop, x[to[part] : to[part + 1]].view(-1))
    experts = Experts(arrived, index, ends, rows, whole, parsed)
    first, last = places[rank][0], places[rank][-1]

    def compute_own(start: int, stop: int) -> None:
        experts.compute(start, stop)
        in_buffer = cuts[rank][0] - first
        buffer[in_buffer + start : in_buffer + stop].copy_(experts.results[start:stop])

    # The last returned rows still travel when all rows of other ranks are computed. Half of the own rows are computed
    # meanwhile. If no rows come from other ranks, none return, so the own rows stay one piece.
    held_back = (last - first) // 2 if sum(received) > received[rank] else 0
    compute_own(first, last - held_back)
    for hop in range(there.hop_count):
        step, part = divmod(hop, parts)
        start, stop = places[(rank - 1 - step) % world_size][part : part + 2]
        there.wait(hop)
        experts.compute(start, stop)
        # The rows came from rank ``rank - 1 - step``. Route ``direct`` sends to that rank in step
        # ``world_size - 2 - step``.
        back.post((world_size - 2 - step) * parts + part, experts.results[start:stop].view(-1))
    compute_own(last - held_back, last)
    return buffer, experts.results, experts.handed_out, chain.new_empty(1)


def _all_to_all_experts_fake(
    chain: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    ends: torch.Tensor,
    rows: object,
    whole: object,
    program: str,
    sent: Sequence[int],
    received: Sequence[int],
    *args: object,
) -> Results:
    parsed = from_text(program)
    results, *handed_out = _outputs(x.new_empty(sum(received), x.shape[1]), parsed)
    buffer = x.new_empty(sum(sent), parsed.width, dtype=results.dtype)
    return buffer, results, handed_out, chain.new_empty(1)


# Returns ``(buffer of the returned rows, results that are being sent, values of RowProgram.handed_out, next token of
# the chain)``. ``sent``, ``received``: rows of the first exchange to and from each rank. ``parts``: pieces of each
# rank's rows.
define(
    "all_to_all_experts(Tensor chain, Tensor x, Tensor index, Tensor ends, Tensor[] rows, Tensor[] whole, str program,"
    " SymInt[] sent, SymInt[] received, int parts, str group_name, str site, str transport='') -> (Tensor, Tensor,"
    " Tensor[], Tensor)",
    _all_to_all_experts,
    _all_to_all_experts_fake,
)
