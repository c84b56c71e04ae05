# SPDX-License-Identifier: Apache-2.0
"""Tests the estimate of seams in bands (``passes.sequence.seams.cost``)."""

from __future__ import annotations

import pytest

from overlap_inductor.passes.sequence.seams.cost import Work
from overlap_inductor.passes.sequence.seams.cost import in_bands
from overlap_inductor.passes.sequence.seams.cost import in_turn


def test_a_slow_link_is_busy_while_bands_are_multiplied() -> None:
    """Estimates the seam between ``o_proj`` and the matmuls ``gate`` and ``up`` of a Llama layer on a slow link. Times
    are in milliseconds. If the two sites run one after the other, the scatter is exposed. In bands, most of the scatter
    is hidden."""
    scatter, gather = Work(12.7, 34.0), Work(69.0, 34.0)
    turn, bands = in_turn(scatter, gather, 2, 4), in_bands(scatter, gather, 2, 4)
    assert turn.compute - 81.7 > 20
    assert bands.compute - 81.7 < 8


def test_one_band_takes_as_long_as_two_rings_of_one_part() -> None:
    scatter, gather = Work(5.0, 7.0), Work(9.0, 4.0)
    assert in_bands(scatter, gather, 2, 1).compute == pytest.approx(in_turn(scatter, gather, 2, 1).compute)


@pytest.mark.parametrize("bands", [2, 4])
def test_time_is_matmuls_and_waits(bands: int) -> None:
    clocks = in_bands(Work(3.0, 8.0), Work(2.0, 8.0), 4, bands)
    assert clocks.compute == pytest.approx(5.0 + sum(clocks.waited))
