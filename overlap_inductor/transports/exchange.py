# SPDX-License-Identifier: Apache-2.0
"""``Exchange``: one buffer whose pieces travel hop by hop along a route, as messages of an ``Exchanges`` transport.

Each piece is received into its final place. A compiled graph passes only tensors from op to op, so ops find an exchange
by the address of its buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch
import torch.distributed as dist

from overlap_inductor.errors import TransferError
from overlap_inductor.runtime import agreement
from overlap_inductor.runtime.group_state import Kind
from overlap_inductor.transports import routes
from overlap_inductor.transports.registry import transport_named
from overlap_inductor.transports.transport import Exchanges
from overlap_inductor.transports.transport import Message
from overlap_inductor.transports.transport import Pending

# Message tags start here, far from tags that users pick. So a user's own message on the group does not match.
_TAG_BASE = 0x0A1D_0000
_HOPS_PER_EXCHANGE = 1 << 15
_EXCHANGES_IN_FLIGHT = 1 << 14


@dataclass
class Exchange:
    """One buffer in flight.

    Attributes:
        places: for each slot (a shard's place in the buffer), ``parts + 1`` indices into ``flat``: where the shard's
            parts begin, and where the last part ends.
        route: one of ``routes.ROUTES``.
        site: the site's id, for error texts and for ``_key``.
        sequence: number of the exchange on its group, equal on all ranks.
        hops: messages that were started and not yet waited for, by hop.
    """

    flat: torch.Tensor
    places: Sequence[Sequence[int]]
    route: str
    group: dist.ProcessGroup
    site: str
    transport: Exchanges
    sequence: int = 0
    hops: dict[int, list[Pending]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        self.world_size = self.group.size()
        self.parts = len(self.places[0]) - 1
        self.receives_first = self.transport.receives_first(self.flat.device)

    @property
    def hop_count(self) -> int:
        return routes.hop_count(self.route, self.world_size, self.parts)

    def piece(self, slot: int, part: int) -> torch.Tensor:
        return self.flat[self.places[slot][part] : self.places[slot][part + 1]]

    def _moves(self, index: int) -> routes.Hop:
        return routes.hop(self.route, self.world_size, self.rank, self.parts, index)

    def _fail(self, what: str, peers: Sequence[int], error: Exception) -> TransferError:
        exchanges = _EXCHANGES.known(self.group)
        if exchanges is not None:
            exchanges.in_flight.pop(_key(self.flat, self.site), None)
        ranks = ", ".join(str(dist.get_global_rank(self.group, p)) for p in peers)
        return TransferError(
            f"site {self.site}: {what} with rank {ranks} of group {self.group.group_name!r} failed on rank"
            f" {dist.get_rank()}: {error}. {agreement.plans_waiting(self.group)}A peer probably died, or runs another"
            " program; see its own log first."
        )

    def start_receives(self) -> None:
        """Start every receive, if the transport starts receives before sends. Raises ``TransferError`` if one cannot be
        started."""
        if self.receives_first:
            for index in range(self.hop_count):
                self._start(index, receives=True)

    def post(self, index: int, piece: torch.Tensor | None = None) -> None:
        """Start the sends of hop ``index``, and its receives if ``start_receives`` has not started them. Pieces without
        elements are neither sent nor received.

        Args:
            piece: what is sent, flat and contiguous; ``None`` if it is in the buffer.

        Raises:
            TransferError: the transport could not start a message.
        """
        self._start(index, receives=not self.receives_first, sends=True, piece=piece)

    def _start(self, index: int, *, receives: bool, sends: bool = False, piece: torch.Tensor | None = None) -> None:
        moves, started = self._moves(index), self.hops.setdefault(index, [])
        # Hops of two exchanges may interleave. The sequence number in the tag keeps their messages apart. The number is
        # equal on all ranks, because the graph chains the ops of a group.
        tag = (
            _TAG_BASE
            + self.sequence % _EXCHANGES_IN_FLIGHT * _HOPS_PER_EXCHANGE
            + index % (_HOPS_PER_EXCHANGE // 2) * 2
        )
        received = self._messages(moves.receives, tag, None) if receives else []
        sent = self._messages(moves.sends, tag, piece) if sends else []
        if not received and not sent:
            return
        try:
            started.extend(self.transport.start(self.group, received, sent))
        except RuntimeError as error:
            raise self._fail(
                f"starting hop {index}", [m.peer for m in (*moves.sends, *moves.receives)], error
            ) from error

    def _messages(self, moves: Sequence[routes.Move], tag: int, piece: torch.Tensor | None) -> list[Message]:
        found = [
            Message(self.piece(m.slot, m.part) if piece is None else piece, m.peer, tag + lane)
            for lane, m in enumerate(moves)
        ]
        return [message for message in found if message.tensor.numel()]

    def wait(self, index: int) -> None:
        """Wait until hop ``index`` is complete. Then its received pieces may be read, and its sent pieces overwritten.

        Raises:
            TransferError: a message failed, or the hop was not started or was waited for before.
        """
        started = self.hops.pop(index, None)
        if started is None:
            raise TransferError(
                f"site {self.site}: hop {index} was waited for, but it was not started or has been waited for before;"
                " this is a bug of the pass"
            )
        for messages in started:
            try:
                messages.wait()
            except RuntimeError as error:
                moves = self._moves(index)
                raise self._fail(
                    f"hop {index}", sorted({m.peer for m in (*moves.sends, *moves.receives)}), error
                ) from error


@dataclass
class _GroupExchanges:
    """The exchanges of one group that are in flight, by ``_key`` of the buffer. ``opened``: how many were opened so
    far, equal on all ranks."""

    opened: int = 0
    in_flight: dict[int | str, Exchange] = field(default_factory=dict)


def _key(buffer: torch.Tensor, site: str) -> int | str:
    """The buffer's address. All buffers without elements have address 0, so their key is the site's id."""
    return buffer.data_ptr() or site


_EXCHANGES = Kind("exchanges", lambda owner: _GroupExchanges())


def open_exchange(
    buffer: torch.Tensor, bounds: Sequence[int], route: str, group: dist.ProcessGroup, site: str, transport: str = ""
) -> Exchange | None:
    """Register ``buffer`` as in flight, and call ``Exchange.start_receives``.

    Args:
        buffer: contiguous, of at least ``slots * bounds[-1]`` elements.
        bounds: ``parts + 1`` offsets in a shard, in elements.
        transport: name of an ``Exchanges`` transport; if empty, the first registered one.

    Returns:
        the exchange, or ``None`` if a shard has no elements.

    Raises:
        TransferError: the transport could not start a receive.
        UnsupportedError: the transport is not registered in this process.
    """
    elements = bounds[-1]
    if elements == 0:
        return None
    places = [[s * elements + b for b in bounds] for s in range(routes.slots(route, group.size()))]
    return _open(buffer, places, route, group, site, transport_named(Exchanges, transport))


def open_uneven(
    buffer: torch.Tensor,
    places: Sequence[Sequence[int]],
    route: str,
    group: dist.ProcessGroup,
    site: str,
    transport: str = "",
) -> Exchange:
    """``open_exchange`` for slots of different sizes, given by ``places`` (see ``Exchange``).

    All ranks call this together, even a rank without a message, so that all count the same exchanges. Also raises
    ``TransferError`` if a rank does not join (``Exchanges.join``).
    """
    moved_by = transport_named(Exchanges, transport)
    try:
        moved_by.join(group, buffer.device)
    except RuntimeError as error:
        raise TransferError(
            f"site {site}: the ranks of group {group.group_name!r} did not all join the exchange: {error}."
            f" {agreement.plans_waiting(group)}A peer probably died, or runs another program; see its own log first."
        ) from error
    return _open(buffer, places, route, group, site, moved_by)


def _open(
    buffer: torch.Tensor,
    places: Sequence[Sequence[int]],
    route: str,
    group: dist.ProcessGroup,
    site: str,
    moved_by: Exchanges,
) -> Exchange:
    exchanges = _EXCHANGES.of(group)
    exchanges.opened += 1
    exchange = Exchange(buffer.view(-1), places, route, group, site, moved_by, exchanges.opened)
    exchanges.in_flight[_key(buffer, site)] = exchange
    exchange.start_receives()
    return exchange


def find_exchange(buffer: torch.Tensor, group: dist.ProcessGroup, site: str) -> Exchange:
    """The open exchange of ``buffer``. Raises ``TransferError`` if there is none."""
    try:
        return _EXCHANGES.of(group).in_flight[_key(buffer, site)]
    except KeyError:
        raise TransferError(
            f"site {site}: no transfer is in flight for this buffer. The op that starts the transfer must run earlier"
            " in the same graph; an error may have stopped that op."
        ) from None


def close_exchange(buffer: torch.Tensor, group: dist.ProcessGroup, site: str) -> None:
    """Forget the exchange of ``buffer``. Call this after the wait for the last hop of the exchange."""
    _EXCHANGES.of(group).in_flight.pop(_key(buffer, site), None)
