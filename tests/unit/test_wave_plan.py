# SPDX-License-Identifier: Apache-2.0
"""How the waves of a matmul are divided among collectives: bandwidth curve, predicted time, and search. The search must
find a partition as fast as the one that brute force finds."""

from __future__ import annotations

import itertools
import random

import pytest

from overlap_inductor.errors import OverlapError
from overlap_inductor.lowerings.wave_groups.parameters import MAX_GROUPS
from overlap_inductor.lowerings.wave_groups.parameters import MAX_UNITS
from overlap_inductor.lowerings.wave_groups.parameters import Curve
from overlap_inductor.lowerings.wave_groups.parameters import WaveParameters
from overlap_inductor.lowerings.wave_groups.parameters import Waves
from overlap_inductor.lowerings.wave_groups.parameters import best_partition
from overlap_inductor.lowerings.wave_groups.parameters import check_partition
from overlap_inductor.lowerings.wave_groups.parameters import cuts
from overlap_inductor.lowerings.wave_groups.parameters import parameters_of
from overlap_inductor.lowerings.wave_groups.parameters import partitions
from overlap_inductor.lowerings.wave_groups.parameters import predicted

MIB = 2.0**20


def random_site(chance: random.Random) -> tuple[Waves, Curve]:
    bands, block_m = chance.randrange(1, 12), 128
    rows = bands * block_m - chance.randrange(block_m)
    waves = Waves(
        bands,
        chance.randrange(1, 300),
        chance.randrange(40, 132),
        chance.uniform(1e-5, 1e-4),
        rows,
        block_m,
        chance.choice((2048, 16384, 65536)),
    )
    latency, bandwidth = chance.uniform(5e-6, 2e-4), chance.uniform(1e9, 4e11)
    points = tuple((2.0**p, (latency + 2**p / bandwidth) * chance.uniform(0.8, 1.3)) for p in range(17, 27))
    return waves, Curve(points)


def test_a_curve_passes_through_its_points_and_is_a_power_law_between_them() -> None:
    curve = Curve(((MIB, 1e-3), (4 * MIB, 2e-3), (16 * MIB, 8e-3)))
    assert [curve.seconds(n * MIB) for n in (0.01, 1, 4, 16)] == pytest.approx([1e-3, 1e-3, 2e-3, 8e-3])
    assert curve.seconds(2 * MIB) == pytest.approx(2**0.5 * 1e-3) and curve.seconds(8 * MIB) == pytest.approx(4e-3)
    assert curve.seconds(64 * MIB) == pytest.approx(32e-3), "beyond the last point, the bandwidth is constant"


def test_groups_run_back_to_back_and_never_before_their_waves() -> None:
    """The expected times are computed by hand. A band is one wave, which takes 10 s. With ``curve``, a
    collective takes 1 s plus 4 s for each band. With ``slow``, it takes 10 s plus 5 s for each band."""
    waves, curve = Waves(3, 100, 100, 10.0, 3, 1, 1), Curve(((1, 5.0), (2, 9.0), (3, 13.0)))
    assert predicted((0, 3), waves, curve) == pytest.approx(30 + 13)
    assert predicted((0, 1, 2, 3), waves, curve) == pytest.approx(30 + 5)
    slow = Curve(((1, 15.0), (2, 20.0), (3, 25.0)))
    assert predicted((0, 1, 2, 3), waves, slow) == pytest.approx(10 + 3 * 15)
    assert predicted((0, 1, 3), waves, slow) == pytest.approx(30 + 20), "the second group waits for its waves"
    assert best_partition(waves, slow) == (0, 1, 3), "50 s; each of the other three partitions takes 55 s"


def test_the_search_finds_what_brute_force_finds() -> None:
    chance = random.Random(1)
    for _ in range(300):
        waves, curve = random_site(chance)
        groups = chance.choice((1, 2, 3, MAX_GROUPS))
        found = best_partition(waves, curve, groups)
        at = cuts(waves)
        every = [
            (0, *c, waves.bands) for n in range(min(groups, len(at) - 1)) for c in itertools.combinations(at[1:-1], n)
        ]
        assert sorted(every) == sorted(partitions(waves, groups)) and found in every
        best = min(predicted(p, waves, curve) for p in every)
        assert predicted(found, waves, curve) == pytest.approx(best)
        assert all(len(p) >= len(found) for p in every if predicted(p, waves, curve) < best * (1 + 1e-12))


def test_a_slow_link_starts_early_and_a_fast_one_ends_with_little() -> None:
    waves = Waves(32, 32, 116, 4e-5, 4096, 128, 16384)
    slow = best_partition(waves, Curve(tuple((2.0**p, 1e-4 + 2**p / 1e10) for p in range(17, 27))))
    fast = best_partition(waves, Curve(tuple((2.0**p, 2e-5 + 2**p / 2e12) for p in range(17, 27))))
    assert slow[1] <= 4, "the first wave's bands leave at once"
    assert fast[-1] - fast[-2] <= 4 < fast[1], "little is left for the end of the matmul"


def test_cuts_are_ends_of_waves_and_few() -> None:
    waves = Waves(16, 32, 116, 1e-5, 2048, 128, 16384)
    assert cuts(waves) == (0, 3, 7, 10, 14, 16), "a wave of 116 tiles completes 3 bands, two waves complete 7, ..."
    assert cuts(Waves(4, 256, 116, 1e-5, 512, 128, 16384)) == (0, 1, 2, 3, 4), "a wave is less than a band"
    many = Waves(1024, 32, 116, 1e-5, 131072, 128, 16384)
    assert (
        len(cuts(many)) <= MAX_UNITS + 1
        and len(best_partition(many, Curve(((1e5, 1e-5), (1e8, 1e-3))))) <= MAX_GROUPS + 1
    )


def test_bytes_of_a_last_band_that_is_not_full() -> None:
    waves = Waves(3, 8, 4, 1.0, 300, 128, 10)
    assert [waves.nbytes(f, e) for f, e in ((0, 1), (1, 3), (0, 3))] == [1280, 1720, 3000]
    assert [waves.done(b) for b in range(4)] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    "partition", [(0,), (0, 2), (1, 4), (0, 2, 2, 4), (0, 3, 2, 4), (0, 5), tuple(range(MAX_GROUPS + 2))]
)
def test_a_partition_that_does_not_fit_is_refused(partition: tuple[int, ...]) -> None:
    with pytest.raises(OverlapError, match="expected rising numbers from 0 to 4"):
        check_partition(partition, 4)
    check_partition((0, 1, 4), 4)


def test_settings_are_parameters() -> None:
    assert parameters_of("{}", 132) == WaveParameters(132)
    assert parameters_of('{"free": [4], "partition": [0, 2, 9]}', 8) == WaveParameters(8, (4,), (0, 2, 9))
