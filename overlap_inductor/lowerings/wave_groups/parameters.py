# SPDX-License-Identifier: Apache-2.0
"""The plan module of schedule ``wave_groups`` (``one_op.schedule.OpPlan``): its parameters, and which waves of a matmul
share a collective. This module does not import Triton.

A matmul's tiles finish in waves, one band of rows after the other. A *group* is a run of neighbouring bands with a
collective of its own. The predictor of a call's time is FlashOverlap's (arXiv 2504.19519, algorithm 1). A collective
starts when its group's tiles are stored and the previous collective has ended. Its seconds come from a measured curve,
by its bytes. ::

    matmul        | group 0 | group 1      | group 2      |
    collectives             | bytes of 0 |   | bytes of 1 | | bytes of 2 |

The paper searches all partitions of the waves. This module searches by dynamic programming over (groups, bands), and
still finds the best of all ``partitions``. An earlier end of one collective never delays a later collective. So the
best partition of the first bands does not depend on the bands after them.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from overlap_inductor.errors import OverlapError
from overlap_inductor.lowerings.one_op.operands import why_not as why_not
from overlap_inductor.transports.registry import names_of
from overlap_inductor.transports.transport import WholeCollectives

MAX_GROUPS = 16
"""Largest number of groups of one call: each group has a counter and costs two launches."""
MAX_UNITS = 32
"""Largest number of units. The search cuts only between units, and a unit has one or more waves."""


@dataclass(frozen=True)
class WaveParameters:
    """The tunable parameters.

    Attributes:
        blocks: number of the device's SMs.
        free: numbers of SMs to leave to the collectives. The first call of each size tries all and keeps the fastest.
        partition: the first bands of all groups and, last, the number of bands. For example, ``(0, 3, 8)`` has two
            groups: bands 0 to 2, and bands 3 to 7. ``None``: the predictor's choice.
        halves: store tiles in two halves, which leaves shared memory for one more stage.
        transport: name of the ``WholeCollectives`` transport; empty: the first one.
    """

    blocks: int
    free: tuple[int, ...] = (8, 16, 24, 32)
    partition: tuple[int, ...] | None = None
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    warps: int = 8
    stages: int = 4
    halves: bool = True
    transport: str = ""


def transports_of(pattern: str) -> tuple[str, ...]:
    return names_of(WholeCollectives)


def automatic(pattern: str) -> tuple[str, ...]:
    return transports_of(pattern)[:1]


def settings_for(pattern: str, transport: str) -> dict[str, Any]:
    return {} if transport in ("auto", *automatic(pattern)) else {"transport": transport}


@functools.cache
def parameters_of(settings: str, blocks: int) -> WaveParameters:
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(settings).items()
    }
    return WaveParameters(blocks, **given)


@dataclass(frozen=True)
class Curve:
    """Seconds of a collective by its bytes. Between two measured ``points``, the curve is a straight line if both axes
    are logarithmic. Below the first point, the seconds are those of the first point. Beyond the last point, the
    bandwidth is that of the last point."""

    points: tuple[tuple[float, float], ...]

    def seconds(self, nbytes: float) -> float:
        if nbytes <= self.points[0][0]:
            return self.points[0][1]
        for (x, y), (x2, y2) in itertools.pairwise(self.points):
            if nbytes <= x2:
                return y * (y2 / y) ** (math.log(nbytes / x) / math.log(x2 / x))
        x, y = self.points[-1]
        return y * nbytes / x


@dataclass(frozen=True)
class Waves:
    """A matmul as the predictor sees it. Bands are assumed to finish one after the other.

    Attributes:
        bands: number of bands of a shard. A band has ``block_m`` rows. It finishes when its tiles in all shards are
            stored.
        tiles: number of a band's tiles in all shards.
        blocks: number of tiles that are multiplied at the same time.
        seconds: seconds of a wave of ``blocks`` tiles.
        rows: number of rows of a shard. An all-reduce has one shard.
        row_bytes: bytes of a row of the result, times the number of shards.
    """

    bands: int
    tiles: int
    blocks: int
    seconds: float
    rows: int
    block_m: int
    row_bytes: int

    def done(self, bands: int) -> float:
        """Seconds until the first ``bands`` bands are stored."""
        return -(-bands * self.tiles // self.blocks) * self.seconds

    def nbytes(self, first: int, end: int) -> int:
        """Bytes that a rank gives to the collective of bands ``first`` to ``end - 1``."""
        return (min(end * self.block_m, self.rows) - first * self.block_m) * self.row_bytes


def predicted(partition: tuple[int, ...], waves: Waves, curve: Curve) -> float:
    """Seconds until the last collective has ended."""
    end = 0.0
    for first, last in itertools.pairwise(partition):
        end = max(end, waves.done(last)) + curve.seconds(waves.nbytes(first, last))
    return end


def cuts(waves: Waves) -> tuple[int, ...]:
    """Where groups may begin and end: after the last band that each wave completes. If there are more than
    ``MAX_UNITS`` waves, several count as one."""
    total = -(-waves.bands * waves.tiles // waves.blocks)
    unit = -(-total // MAX_UNITS) * waves.blocks
    inside = {end // waves.tiles for end in range(unit, waves.bands * waves.tiles, unit)}
    return tuple(sorted(inside | {0, waves.bands}))


def best_partition(waves: Waves, curve: Curve, groups: int = MAX_GROUPS) -> tuple[int, ...]:
    """The partition into at most ``groups`` groups that is predicted to end first; of several, one with the fewest
    groups."""
    at = cuts(waves)
    seconds = [[curve.seconds(waves.nbytes(f, e)) if f < e else 0.0 for e in at] for f in at]
    # After round n, ends[j] is the earliest end of the collectives of all bands before cut j, in exactly n groups, and
    # the partition that reaches it.
    ends: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    best: tuple[float, tuple[int, ...]] | None = None
    for _ in range(min(groups, len(at) - 1)):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for j in range(1, len(at)):
            done = waves.done(at[j])
            ways = [(max(end, done) + seconds[i][j], way) for i, (end, way) in ends.items() if i < j]
            if ways:
                end, way = min(ways)
                following[j] = end, (*way, at[j])
        ends = following
        whole = ends.get(len(at) - 1)
        if whole is not None and (best is None or whole[0] < best[0]):
            best = whole
    assert best is not None
    return best[1]


def partitions(waves: Waves, groups: int = MAX_GROUPS) -> Iterator[tuple[int, ...]]:
    """Every partition that ``best_partition`` chooses from."""
    first, *inner, last = cuts(waves)
    for count in range(min(groups, len(inner) + 1)):
        for chosen in itertools.combinations(inner, count):
            yield (first, *chosen, last)


def check_partition(partition: tuple[int, ...], bands: int) -> None:
    """Raises ``OverlapError`` if ``partition`` does not cut ``bands`` bands into at most ``MAX_GROUPS`` groups."""
    rising = all(a < b for a, b in itertools.pairwise(partition))
    if (
        len(partition) < 2
        or partition[0] != 0
        or partition[-1] != bands
        or not rising
        or len(partition) > MAX_GROUPS + 1
    ):
        raise OverlapError(
            f"partition {list(partition)} does not cut {bands} bands into at most {MAX_GROUPS} groups; expected rising"
            f" numbers from 0 to {bands}. Leave it out to have it chosen."
        )
