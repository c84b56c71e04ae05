# SPDX-License-Identifier: Apache-2.0
"""``all-to-all -> experts -> all-to-all`` in schedule ``chunked`` (after Comet, arXiv:2502.19811, section 3). Copy
engines move the rows of both exchanges, so no SM does. Each rank's rows are computed as a piece of their own::

    round 0:        send rows to every rank                                         # side stream
                    compute the first half of the own rows
    each round:     for each rank: wait for its rows; compute them; send them back   # back: side stream
                    for each rank: wait for the rows that it returns; copy them out  # receiving stream
                    let the ranks send their next rows, and their next results
    last:           compute the second half of the own rows

The first half of the own rows hides the rows that arrive first, and the second half the rows that return last. A round
moves what fits into the messages' room (``transports.messages``), so there is one round unless a rank gets many more
rows than the plan expected. A piece's rows are read straight from the workspace. If they do not arrive in the order of
the experts (``sites.sorted_parts``), they are read in this order (``kernels.row_order``).

The host knows its own numbers of rows only. It reads no more numbers than the program does, and waits for no rank.

Forward progress. A round has three phases in the launch order of every rank: send, compute and return, receive. Every
wait is for something that a peer does in an earlier phase:

- a send: the peer has taken the rows of the last round (second phase of that round);
- a return: the peer has taken the results of the last round (third phase of that round);
- a piece: the peer has sent its rows (first phase);
- received results: the peer has returned them (second phase).

So the earliest unfinished phase of all ranks never waits, even if all streams share one hardware queue.

CUDA graphs: the numbers of rows come from the host, so a call is not captured (``experts_ops``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.messages import spoil_rows
from overlap_inductor.lowerings.chunked.gated_pieces import Weights
from overlap_inductor.lowerings.chunked.gated_pieces import gated_pieces
from overlap_inductor.lowerings.chunked.row_order import RowOrder
from overlap_inductor.lowerings.chunked.row_order import Rows
from overlap_inductor.lowerings.one_op.operands import left_operand
from overlap_inductor.lowerings.uneven_parts import check_parts
from overlap_inductor.runtime.side_stream import InOrder
from overlap_inductor.runtime.side_stream import SideStream
from overlap_inductor.runtime.side_stream import one_call
from overlap_inductor.runtime.side_stream import receiving_stream
from overlap_inductor.runtime.side_stream import side_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.sites.row_program import RowProgram
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.messages import BACK
from overlap_inductor.transports.messages import THERE
from overlap_inductor.transports.messages import messages_of


@dataclass(frozen=True)
class Layer:
    """The arguments of one call.

    Attributes:
        x: ``[sum(sent), width]``, rows of whole 16-byte words.
        index, ends, rows, whole, program, arrive_sorted: see ``Experts``.
        weights: the weights of a gated program (``gated_pieces``); ``None`` for other programs.
        sent, received: rows of the first exchange to and from each rank. The second exchange returns them.
    """

    x: torch.Tensor
    index: torch.Tensor
    ends: torch.Tensor
    rows: Sequence[torch.Tensor]
    whole: Sequence[torch.Tensor]
    program: RowProgram
    weights: Weights | None
    sent: Sequence[int]
    received: Sequence[int]
    arrive_sorted: bool


class Experts:
    """The experts of one call: computes pieces of the arrived rows.

    The call's ``index`` holds, for each row in the order of the experts, its place among the arrived rows. In this
    order, each expert's rows end at ``ends``, and ``rows`` are tensors with a row for each arrived row. Tensors in
    ``whole`` serve all rows, for example weights. ``arrive_sorted``: the rows of a piece arrive in the order of the
    experts.

    Args:
        bounds, returned: see ``RowOrder``.
        place: a place of arrived rows, as ``messages.place`` returns it.
        results: the same for results.

    Attributes:
        handed_out: the values that the program returns besides its results, in the order of the experts.
        alive: tensors that other streams read.
    """

    def __init__(
        self,
        layer: Layer,
        bounds: Sequence[int],
        returned: int,
        place: torch.Tensor,
        results: torch.Tensor,
        launch: Launch,
    ) -> None:
        self.rows, self.whole, self.program = layer.rows, layer.whole, layer.program
        self.arrive_sorted = layer.arrive_sorted
        only_ends = layer.arrive_sorted and not layer.rows and not layer.program.handed_out
        self.order = RowOrder(layer.index, layer.ends, bounds, returned, only_ends, launch)
        self.handed_out = [
            layer.x.new_empty(bounds[-1], *h.sizes, dtype=getattr(torch, h.dtype)) for h in self.program.handed_out
        ]
        self.alive: list[torch.Tensor] = []
        self._gated = None
        if only_ends and layer.weights is not None and bounds[-1]:
            longest = max(end - first for first, end in itertools.pairwise(bounds))
            ends = self.order.ends((bounds[0], bounds[1]))
            self._gated = gated_pieces(layer.weights, layer.whole, place, results, ends, longest)

    def compute(self, piece: Rows, arrived: torch.Tensor) -> torch.Tensor:
        """The results of the rows ``arrived``, which are the arrived rows ``piece``, in the order of the experts. The
        stream may still read ``arrived``."""
        order = self.order
        if self._gated is not None:
            out = arrived.new_empty(len(arrived), self.program.width)
            self._gated(arrived, order.ends(piece), out)
            return out
        first = arrived if self.arrive_sorted else arrived[order.places(piece)]
        others = [r[order.ordered(piece)] for r in self.rows]
        values = self.program.run([first, *others], self.whole, order.ends(piece))
        for shared, one in zip(self.handed_out, self.program.handed_out, strict=True):
            shared.index_copy_(0, order.ordered(piece), values[one.value])
        result: torch.Tensor = values[self.program.result]
        return result

    def as_arrived(self, piece: Rows, results: torch.Tensor) -> torch.Tensor:
        """The results of ``piece`` in the order in which its rows arrived."""
        return results if self.arrive_sorted else results[self.order.back(piece)]

    def store(self, piece: Rows, arrived: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the results of ``piece``, and store them in the order in which its rows arrived."""
        if self._gated is not None:
            self._gated(arrived, self.order.ends(piece), out)
            return
        results = self.compute(piece, arrived)
        if self.arrive_sorted:
            out.copy_(results)
        else:
            torch.ops.aten.index.Tensor_out(results, [self.order.back(piece)], out=out)


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)]


def _parts(start: int, count: int, most: int) -> Iterator[Rows]:
    """The messages of ``count`` rows from row ``start`` on, each of at most ``most`` rows."""
    return ((first, min(first + most, start + count)) for first in range(start, start + count, most))


def all_to_all_experts(layer: Layer, launch: Launch, site: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """``(returned rows [sum(sent), program.width], program.handed_out)``.

    Raises:
        ValueError: the numbers of rows do not describe an all-to-all.
        UnsupportedError: a row is larger than a message.
        TransferError: the group was aborted, for example because a rank did not come in time.
    """
    launch.faults.check()
    side, receiving = side_stream(layer.x.device), receiving_stream(layer.x.device)
    with one_call(launch, side, receiving):
        check_parts(layer.x.shape[0], layer.sent, layer.received, launch.rank, site)
        buffer, experts = _computed(layer, launch, side, receiving)
    _spoil(buffer, experts.order.returned, launch)
    for shared in experts.handed_out:
        _spoil(shared, experts.order.arrived, launch)
    return buffer, experts.handed_out


def _computed(
    layer: Layer, launch: Launch, side: SideStream | InOrder, receiving: SideStream | InOrder
) -> tuple[torch.Tensor, Experts]:
    """Launch the call. Returns ``(buffer of the returned rows, the experts)``. The caller joins the streams."""
    x, program, sent, received = left_operand(layer.x), layer.program, layer.sent, layer.received
    world_size, rank = launch.world_size, launch.rank
    messages, dtype = messages_of(launch), getattr(torch, program.dtype)
    most = messages.room // max(x.shape[1] * x.element_size(), program.width * dtype.itemsize)
    if not most:
        raise UnsupportedError(f"the workspace has room for messages of {messages.room} bytes, which hold no row")
    buffer = x.new_empty(len(x), program.width, dtype=dtype)
    cuts, places = _starts(sent), _starts(received)
    peers = [(rank + step) % world_size for step in range(1, world_size)]
    sources = [(rank - step) % world_size for step in range(1, world_size)]
    going = {p: list(_parts(cuts[p], sent[p], most)) for p in peers}
    coming = {s: list(_parts(places[s], received[s], most)) for s in sources}
    halves = _halves((places[rank], places[rank + 1]), any(coming.values()), any(going.values()))
    ends_of_parts = [row for parts in coming.values() for part in parts for row in part]
    bounds = sorted({0, places[-1], *(row for half in halves for row in half), *ends_of_parts})
    alive, experts = [], None

    def compute_own(piece: Rows) -> None:
        there = cuts[rank] - places[rank]
        mine = slice(piece[0] + there, piece[1] + there)
        if piece[0] < piece[1]:
            assert experts is not None
            experts.store(piece, x[mine], buffer[mine])

    turns = max(1, *map(len, (*going.values(), *coming.values())))
    # In a call of several rounds, rows are sent and taken without regard to results, so that rounds overlap.
    one_round = turns == 1
    for turn in range(turns):
        to, come = ([r for r, parts in every.items() if len(parts) > turn] for every in (going, coming))
        if to or (come and one_round):
            with side:
                messages.begin(to, come if one_round else ())
                for peer in to:
                    messages.send(THERE, peer, x[slice(*going[peer][turn])])
        if experts is None:
            # After the first sends, because these need nothing from here.
            place = messages.place(THERE, sources[0], x.shape[1], x.dtype)
            results = messages.place(BACK, peers[0], program.width, dtype)
            experts = Experts(layer, bounds, len(x), place, results, launch)
            compute_own(halves[0])
        if come and not one_round:
            with side:
                messages.begin((), come)
        for source in come:
            piece = coming[source][turn]
            messages.wait(THERE, source)
            arrived = messages.received(THERE, source, piece[1] - piece[0], x.shape[1], x.dtype)
            results = experts.as_arrived(piece, experts.compute(piece, arrived)).contiguous()
            # The side stream reads the results until the streams are joined.
            alive.append(results)
            with side:
                messages.send(BACK, source, results)
        if come and not one_round:
            messages.end(come, ())
        if to:
            with receiving:
                for peer in to:
                    first, end = going[peer][turn]
                    messages.wait(BACK, peer)
                    messages.copy_out(BACK, peer, buffer[first:end])
                if not one_round:
                    messages.end((), to)
    compute_own(halves[1])
    receiving.join()
    if one_round and (to or come):
        messages.end(come, to)
    assert experts is not None
    experts.alive = [x, *alive]
    return buffer, experts


def _halves(own: Rows, some_come: bool, some_go: bool) -> tuple[Rows, Rows]:
    """The own rows that are computed before and after the rows of other ranks. The first half hides the rows that come,
    the second half those that return."""
    half = own[1] - (own[1] - own[0]) // 2 if some_come and some_go else own[1] if some_come else own[0]
    return (own[0], half), (half, own[1])


def _spoil(result: torch.Tensor, rows: torch.Tensor, launch: Launch) -> None:
    """Set ``result`` to NaN if the group has been aborted. ``rows``: int64 ``[1]`` on the device."""
    row_bytes = math.prod(result.shape[1:]) * result.element_size()
    key = "spoil rows", row_bytes
    kernel = launch.prepared.get(key)
    if kernel is None:
        fixed = {"row_bytes": row_bytes, "stop": launch.faults.stop, "BLOCK": 1024}
        kernel = PreparedKernel(spoil_rows, 1, {"result": result, "rows": rows}, fixed, num_warps=4)
        launch.remember(key, kernel)
    kernel(result, rows)
