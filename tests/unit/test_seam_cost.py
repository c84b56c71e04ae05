# SPDX-License-Identifier: Apache-2.0
"""The estimates of a seam, in bands and with its two sites one after the other (``passes.sequence.seams.cost``)."""

from __future__ import annotations

import pytest

from overlap_inductor.passes.sequence.seams.cost import Work
from overlap_inductor.passes.sequence.seams.cost import in_bands
from overlap_inductor.passes.sequence.seams.cost import in_chain
from overlap_inductor.passes.sequence.seams.cost import in_turn


def test_a_slow_link_is_busy_while_bands_are_multiplied() -> None:
    """The times are in milliseconds, for the seam between ``o_proj`` and ``gate``, ``up`` of a Llama layer on a slow
    link. If the sites run one after the other, more than 20 ms of transfers are exposed. In bands, less than 8 ms are
    exposed."""
    scatter, gather = Work(12.7, 34.0), Work(69.0, 34.0)
    turn, bands = in_turn(scatter, gather, 2, (4, 4)), in_bands(scatter, gather, 2, 4)
    assert turn.compute - 81.7 > 20
    assert bands.compute - 81.7 < 8


def test_one_band_takes_as_long_as_two_rings_of_one_part() -> None:
    scatter, gather = Work(5.0, 7.0), Work(9.0, 4.0)
    assert in_bands(scatter, gather, 2, 1).compute == pytest.approx(in_turn(scatter, gather, 2, (1, 1)).compute)


@pytest.mark.parametrize("bands", [2, 4])
def test_time_is_matmuls_and_waits(bands: int) -> None:
    clocks = in_bands(Work(3.0, 8.0), Work(2.0, 8.0), 4, bands)
    assert clocks.compute == pytest.approx(5.0 + sum(clocks.waited))


def test_joined_bands_are_sent_later() -> None:
    """On 4 ranks with one band, a matmul of all other ranks' rows takes 3 s of the scatter's 4 s. Sent before that, the
    first rows would have arrived 2 s earlier."""
    scatter, gather = Work(4.0, 9.0), Work(4.0, 9.0)
    alone, joined = in_bands(scatter, gather, 4, 1), in_bands(scatter, gather, 4, 1, [3])
    assert (joined.compute, alone.compute) == (pytest.approx(24.0), pytest.approx(22.0))


def test_each_site_in_turn_has_its_own_sub_chunks() -> None:
    """With one sub-chunk, the scatter sends after 2 s, and its rows arrive at 10 s. The gather's last piece arrives at
    18 s and is multiplied in 1 s. With four sub-chunks, the scatter sends after 0.5 s."""
    assert in_turn(Work(4.0, 8.0), Work(8.0, 8.0), 2, (1, 4)).compute == pytest.approx(19.0)
    assert in_turn(Work(4.0, 8.0), Work(8.0, 8.0), 2, (4, 4)).compute == pytest.approx(17.5)


def test_a_short_matmul_in_front_of_a_long_one_needs_many_bands() -> None:
    """The times are in milliseconds, for the seam between ``o_proj`` and ``gate``, ``up`` on 2 ranks with 600 Mbit/s
    and 1.5e11 FLOP/s. Alone, ``o_proj`` is about as fast with 2 sub-chunks as with 4. In the seam, 4 bands hide more
    than 2 bands."""
    scatter, gather = Work(7.7, 28.0), Work(42.3, 28.0)
    turn = in_turn(scatter, gather, 2, (2, 4)).compute
    two, four = (in_bands(scatter, gather, 2, bands).compute for bands in (2, 4))
    assert turn > 1.05 * two and two > 1.05 * four


@pytest.mark.parametrize("bands", [1, 2, 4])
def test_a_chain_takes_its_matmuls_and_its_waits(bands: int) -> None:
    clocks = in_chain((Work(3.0, 8.0), Work(2.0, 8.0)), (Work(1.0, 4.0), Work(5.0, 6.0)), 4, bands)
    assert clocks.compute == pytest.approx(11.0 + sum(clocks.waited))
    assert len(clocks.waited) == 4


def test_a_chain_sends_while_the_first_gather_is_multiplied() -> None:
    """The times are in milliseconds, for a Llama layer on 4 ranks with 400 Mbit/s. One after the other, the two seams
    leave the link idle while ``gate`` and ``up`` are multiplied."""
    first, second = (Work(43.0, 126.0), Work(236.0, 126.0)), (Work(118.0, 126.0), Work(129.0, 126.0))
    alone = sum(in_bands(*seam, 4, 4, [3]).compute for seam in (first, second))
    assert alone - in_chain(first, second, 4, 4, [3]).compute > 30


def test_a_chain_keeps_the_link_s_order() -> None:
    """All transfers take 40 s on one link. Only the first band's matmul of 1 s comes before them."""
    seam = Work(4.0, 10.0), Work(4.0, 10.0)
    assert in_chain(seam, seam, 2, 2).link >= 41.0
