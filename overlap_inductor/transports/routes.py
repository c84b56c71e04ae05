# SPDX-License-Identifier: Apache-2.0
"""Routes: for each hop, which piece a rank sends, to which rank, and which piece the rank receives. Pure index
arithmetic.

A shard is cut into ``parts`` sub-chunks. A *hop* moves one sub-chunk over one link. With ``bidirectional``, a hop moves
one sub-chunk over each of two links. (If the number of ranks is even, the last step uses one link.) With ``broadcast``,
a hop moves one sub-chunk to every other rank. ``slot`` is the place of a piece's shard in the exchange buffer.

In the table, W is the number of ranks, S is ``parts``, r is this rank, and hop (i, j) moves sub-chunk j in step i.

=============  =======  ==================================================  =====================================
route          hops     what moves                                          source
=============  =======  ==================================================  =====================================
ring           (W-1) S  own shard first; what came from r-1 goes to r+1     CommFuse (arXiv 2604.24013) Alg. 1
bidirectional  W//2 S   as ``ring``, half of the shards in each direction   XLA windowed einsum (ASPLOS'23)
owner          (W-1) S  hop (i, j): partial for rank r+1+i, straight there  CommFuse Fig. 8b
travel         (W-1) S  hop (i, j): accumulator of slice r-1-i, to r+1      CommFuse Alg. 2
broadcast      S        own piece j to every other rank                     direct all-gather
direct         (W-1) S  hop (i, j): slice for rank r+1+i, straight there;   CommFuse sections 1.5, 1.6
                        every slice received has a slot of its own
=============  =======  ==================================================  =====================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUTES = ("ring", "bidirectional", "owner", "travel", "broadcast", "direct")


@dataclass(frozen=True)
class Move:
    """A piece that moves over one link. ``slot`` and ``part`` give its place in the buffer; ``peer`` is a rank of the
    group."""

    slot: int
    part: int
    peer: int


@dataclass(frozen=True)
class Hop:
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


def slots(route: str, world_size: int) -> int:
    """Number of shards that the exchange buffer of a route holds: one per rank for gathers and all-to-alls, one per
    other rank for reductions."""
    return world_size - 1 if route in ("owner", "travel") else world_size


def distances(route: str, world_size: int) -> list[tuple[int, ...]]:
    """For gathers and all-to-alls: the shards that rank r receives in each step. A step has ``parts`` hops. In step i,
    rank r receives the shards of ranks ``r + d`` for each d in ``distances[i]``.

    Raises:
        ValueError: ``route`` is not one that receives shards in steps.
    """
    if route in ("ring", "direct"):
        return [(-(i + 1),) for i in range(world_size - 1)]
    if route == "bidirectional":
        right, left = world_size // 2, (world_size - 1) // 2
        return [(-(i + 1), i + 1) if i < left else (-(i + 1),) for i in range(right)]
    raise ValueError(f"route {route!r} receives no shards in steps; expected 'ring', 'bidirectional' or 'direct'")


def hop_count(route: str, world_size: int, parts: int) -> int:
    """Number of hops of the whole route, if a shard has ``parts`` sub-chunks."""
    steps = {"bidirectional": world_size // 2, "broadcast": 1}.get(route, world_size - 1)
    return steps * parts


def hop(route: str, world_size: int, rank: int, parts: int, index: int) -> Hop:
    """Hop ``index`` of ``rank``. Hops are numbered step-major: ``index = step * parts + part``.

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
    """The ``parts + 1`` bounds of ``total`` rows cut into ``parts`` pieces whose sizes differ by at most one row. If
    there are fewer rows than pieces, some pieces are empty.

    Works for ``torch.SymInt`` too: only ``*`` and ``//`` are used, so no guard is added.
    """
    return [total * j // parts for j in range(parts)] + [total]


def places(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """The ``bounds`` of each slot's parts, in a buffer in which slots of ``sizes`` rows follow each other."""
    found, start = [], 0
    for size in sizes:
        found.append([start + bound for bound in bounds(size, parts)])
        start += size
    return found
