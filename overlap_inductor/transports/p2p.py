"""Transport ``p2p``: pieces move by ``torch.distributed`` send and receive on the group's own backend (gloo, NCCL).

An ``Exchange`` is one buffer with its hops in flight. The buffer's receives are posted as early as the route allows,
each into its final place, so that nothing is copied afterwards. Between two calls the exchange is found by its buffer's
address, because a compiled graph passes tensors only.

On NCCL, sends and receives of a hop are one coalesced batch (the communicator needs one order on all ranks); on gloo
every receive is posted before any send, which keeps both directions of a link busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch
import torch.distributed as dist

from overlap_inductor.errors import TransferError
from overlap_inductor.runtime import agreement
from overlap_inductor.transports import routes

# Away from the tags that users pick, so that their own send and receive on the group are never met by ours.
_TAG_BASE = 0x0A1D_0000
_HOPS_PER_EXCHANGE = 1 << 15
_EXCHANGES_IN_FLIGHT = 1 << 14


@dataclass
class _Hop:
    works: list[dist.Work] = field(default_factory=list)


@dataclass
class Exchange:
    """One buffer in flight. ``flat`` is ``[slots, elements of a shard]``; ``bounds`` cuts a shard into parts
    (elements)."""

    flat: torch.Tensor
    bounds: Sequence[int]
    route: str
    group: dist.ProcessGroup
    site: str
    sequence: int = 0
    hops: dict[int, _Hop] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        self.world_size = self.group.size()
        self.parts = len(self.bounds) - 1
        self.batched = self.flat.device.type != "cpu"

    @property
    def hop_count(self) -> int:
        return routes.hop_count(self.route, self.world_size, self.parts)

    def piece(self, slot: int, part: int) -> torch.Tensor:
        return self.flat[slot, self.bounds[part] : self.bounds[part + 1]]

    def _moves(self, index: int) -> routes.Hop:
        return routes.hop(self.route, self.world_size, self.rank, self.parts, index)

    def _is_empty(self, index: int) -> bool:
        part = index % self.parts
        return self.bounds[part] == self.bounds[part + 1]

    def _global(self, peer: int) -> int:
        return dist.get_global_rank(self.group, peer)

    def _fail(self, what: str, peers: Sequence[int], error: Exception) -> TransferError:
        _IN_FLIGHT.pop(_key(self.group, self.flat), None)
        ranks = ", ".join(str(self._global(p)) for p in peers)
        return TransferError(
            f"site {self.site}: {what} with rank {ranks} of group {self.group.group_name!r} failed on rank"
            f" {dist.get_rank()}: {error}. {agreement.plans_waiting(self.group)}A peer probably died, or runs another"
            " program; see its own log first."
        )

    def post_receives(self) -> None:
        """Post every receive of the exchange at once (backends without launch-order rules)."""
        if not self.batched:
            for index in range(self.hop_count):
                self._post(index, receives=True, piece=None)

    def post(self, index: int, piece: torch.Tensor | None = None) -> None:
        """Start hop ``index``; ``piece`` is what is sent where it does not lie in the buffer itself."""
        self._post(index, receives=self.batched, sends=True, piece=piece)

    def _post(self, index: int, *, receives: bool, piece: torch.Tensor | None, sends: bool = False) -> None:
        if self._is_empty(index):
            return
        moves = self._moves(index)
        state = self.hops.setdefault(index, _Hop())
        # Two exchanges may be in flight with interleaved hops: the sequence number, equal on all ranks because the
        # graph chains the ops of a group, keeps their messages apart.
        tag = (
            _TAG_BASE
            + self.sequence % _EXCHANGES_IN_FLIGHT * _HOPS_PER_EXCHANGE
            + index % (_HOPS_PER_EXCHANGE // 2) * 2
        )
        try:
            if self.batched:
                ops = [
                    dist.P2POp(dist.irecv, self.piece(m.slot, m.part), self._global(m.peer), self.group)
                    for m in moves.receives
                ]
                source = [self.piece(m.slot, m.part) if piece is None else piece for m in moves.sends]
                ops += [
                    dist.P2POp(dist.isend, s, self._global(m.peer), self.group) for s, m in zip(source, moves.sends)
                ]
                state.works += dist.batch_isend_irecv(ops)
            elif receives:
                state.works += [
                    _work(dist.irecv(self.piece(m.slot, m.part), self._global(m.peer), self.group, tag + lane))
                    for lane, m in enumerate(moves.receives)
                ]
            elif sends:
                state.works += [
                    _work(
                        dist.isend(
                            self.piece(m.slot, m.part) if piece is None else piece,
                            self._global(m.peer),
                            self.group,
                            tag + lane,
                        )
                    )
                    for lane, m in enumerate(moves.sends)
                ]
        except RuntimeError as error:
            raise self._fail(
                f"starting hop {index}", [m.peer for m in (*moves.sends, *moves.receives)], error
            ) from error

    def wait(self, index: int) -> None:
        """Wait until hop ``index`` is complete: what was to arrive is here, what was sent may be overwritten."""
        state = self.hops.pop(index, None)
        if state is None:
            if self._is_empty(index):
                return
            raise TransferError(
                f"site {self.site}: hop {index} was waited for but never started; this is a bug of the pass"
            )
        for work in state.works:
            try:
                work.wait()
            except RuntimeError as error:
                moves = self._moves(index)
                raise self._fail(
                    f"hop {index}", sorted({m.peer for m in (*moves.sends, *moves.receives)}), error
                ) from error


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise TransferError("this rank is not in the group of the transfer; an overlap op ran on a wrong rank")
    return work


_IN_FLIGHT: dict[tuple[str, int], Exchange] = {}
_SEQUENCE: dict[str, tuple[dist.ProcessGroup, int]] = {}


def _next_sequence(group: dist.ProcessGroup) -> int:
    """Number of the exchange on this group; starts again when a group is destroyed and its name is used anew."""
    known, number = _SEQUENCE.get(group.group_name, (None, 0))
    number = number + 1 if known is group else 1
    _SEQUENCE[group.group_name] = (group, number)
    return number


def _key(group: dist.ProcessGroup, buffer: torch.Tensor) -> tuple[str, int]:
    return group.group_name, buffer.data_ptr()


def open_exchange(
    buffer: torch.Tensor, bounds: Sequence[int], route: str, group: dist.ProcessGroup, site: str
) -> Exchange | None:
    """Register ``buffer`` (contiguous, ``slots * bounds[-1]`` elements or more) as in flight. ``None`` where nothing
    moves."""
    elements = bounds[-1]
    if elements == 0:
        return None
    slots = routes.slots(route, group.size())
    flat = buffer.view(-1)[: slots * elements].view(slots, elements)
    exchange = Exchange(flat, bounds, route, group, site, _next_sequence(group))
    _IN_FLIGHT[_key(group, buffer)] = exchange
    exchange.post_receives()
    return exchange


def find_exchange(buffer: torch.Tensor, group: dist.ProcessGroup, site: str) -> Exchange:
    """The exchange that ``open_exchange`` registered for ``buffer``. Raises ``TransferError`` where there is none."""
    try:
        return _IN_FLIGHT[_key(group, buffer)]
    except KeyError:
        raise TransferError(
            f"site {site}: no transfer is in flight for this buffer. Expected the op that starts it to have run just"
            " before in the same graph; an earlier error may have stopped it."
        ) from None


def close_exchange(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Forget the exchange of ``buffer`` once its last hop has been waited for."""
    _IN_FLIGHT.pop(_key(group, buffer), None)
