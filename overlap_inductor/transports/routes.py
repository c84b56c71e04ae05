# SPDX-License-Identifier: Apache-2.0
"""Routes: which pieces a rank sends and receives in each hop, and its peers. Pure index arithmetic.

W is the number of ranks, and r is this rank. A shard is cut into S sub-chunks (``parts``). Hop (i, j) moves sub-chunk j
in step i, over each of its links. ``slot`` is the place of a piece's shard in the exchange buffer.

=============  =======  ======  ================================================  ===================================
route          hops     links   what moves                                        source
=============  =======  ======  ================================================  ===================================
ring           (W-1) S  1       own shard first; what came from r-1 goes to r+1   CommFuse (arXiv 2604.24013) Alg. 1
bidirectional  W//2 S   2 [1]_  as ``ring``, half of the shards each way          XLA windowed einsum (ASPLOS'23)
owner          (W-1) S  1       partial sum for rank r+1+i, straight there        CommFuse Fig. 8b
travel         (W-1) S  1       sum so far for rank r-1-i, to r+1                 CommFuse Alg. 2
broadcast      S        W-1     own piece j to every other rank                   direct all-gather
direct         (W-1) S  1       slice for rank r+1+i, straight there; the slice   CommFuse sections 1.5, 1.6
                                from rank q is received in slot q
=============  =======  ======  ================================================  ===================================

.. [1] If W is even, the last step uses one link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUTES = ("ring", "bidirectional", "owner", "travel", "broadcast", "direct")


@dataclass(frozen=True)
class Move:
    """A piece that moves over one link. ``slot`` and ``part`` are its place in the receiver's buffer. ``peer``: the
    other rank of the link, as a rank of the group."""

    slot: int
    part: int
    peer: int


@dataclass(frozen=True)
class Hop:
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


def slots(route: str, world_size: int) -> int:
    """Number of shards that the exchange buffer of a route holds."""
    return world_size - 1 if route in ("owner", "travel") else world_size


def distances(route: str, world_size: int) -> list[tuple[int, ...]]:
    """The shards that a rank receives in each step of a gather or an all-to-all. In step i, rank r receives the shard
    of rank ``r + d`` for each d in ``distances[i]``.

    Raises:
        ValueError: ``route`` does not receive shards in steps.
    """
    if route in ("ring", "direct"):
        return [(-(i + 1),) for i in range(world_size - 1)]
    if route == "bidirectional":
        right, left = world_size // 2, (world_size - 1) // 2
        return [(-(i + 1), i + 1) if i < left else (-(i + 1),) for i in range(right)]
    raise ValueError(
        f"on route {route!r}, shards do not come step by step; expected 'ring', 'bidirectional' or 'direct'"
    )


def hop_count(route: str, world_size: int, parts: int) -> int:
    steps = {"bidirectional": world_size // 2, "broadcast": 1}.get(route, world_size - 1)
    return steps * parts


def hop(route: str, world_size: int, rank: int, parts: int, index: int) -> Hop:
    """Hop ``index`` of ``rank``, where ``index = step * parts + part``.

    Raises:
        ValueError: ``route`` is unknown.
    """
    step, part = divmod(index, parts)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    if route == "ring" or route == "bidirectional":
        sends = [Move((rank - step) % world_size, part, right)]
        receives = [Move((rank - step - 1) % world_size, part, left)]
        if route == "bidirectional" and step < (world_size - 1) // 2:
            sends.append(Move((rank + step) % world_size, part, left))
            receives.append(Move((rank + step + 1) % world_size, part, right))
        return Hop(tuple(sends), tuple(receives))
    if route == "owner":
        send = Move(step, part, (rank + 1 + step) % world_size)
        return Hop((send,), (Move(step, part, (rank - 1 - step) % world_size),))
    if route == "direct":
        to, source = (rank + 1 + step) % world_size, (rank - 1 - step) % world_size
        return Hop((Move(rank, part, to),), (Move(source, part, source),))
    if route == "travel":
        return Hop((Move(step, part, right),), (Move(step, part, left),))
    if route == "broadcast":
        peers = [(rank + 1 + i) % world_size for i in range(world_size - 1)]
        sources = [(rank - 1 - i) % world_size for i in range(world_size - 1)]
        return Hop(tuple(Move(rank, part, p) for p in peers), tuple(Move(p, part, p) for p in sources))
    raise ValueError(f"unknown route {route!r}; expected one of {', '.join(ROUTES)}")


def bounds(total: int, parts: int) -> list[int]:
    """The ``parts + 1`` bounds of ``total`` rows in ``parts`` pieces. The sizes of the pieces differ by at most one
    row, and may be 0. ``total`` may be a ``torch.SymInt``: ``*`` and ``//`` add no guard."""
    return [total * j // parts for j in range(parts)] + [total]


def places(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """The ``bounds`` of each slot's parts. Slot ``s`` has ``sizes[s]`` rows. Slots follow each other in the buffer."""
    found, start = [], 0
    for size in sizes:
        found.append([start + bound for bound in bounds(size, parts)])
        start += size
    return found
