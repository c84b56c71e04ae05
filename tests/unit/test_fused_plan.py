# SPDX-License-Identifier: Apache-2.0
"""The plan of a fused kernel: the number of bands, and the number of thread blocks that push rows to peers."""

from __future__ import annotations

import pytest

from overlap_inductor.lowerings.fused.parameters import TUNED
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.parameters import band_rows
from overlap_inductor.lowerings.fused.parameters import needed
from overlap_inductor.lowerings.fused.parameters import pushers_of

REDUCE = "matmul_all_reduce"


@pytest.mark.parametrize(
    ("inner", "blocks", "expected"),
    [(3584, 132, 22), (7168, 132, 11), (14336, 132, 6), (512, 132, 66), (200_000, 132, 1), (512, 1, 1)],
)
def test_pushing_blocks_keep_pace_with_the_blocks_that_multiply(inner: int, blocks: int, expected: int) -> None:
    assert pushers_of(inner, FusedParameters(blocks, **TUNED[REDUCE])) == expected
    assert pushers_of(inner, FusedParameters(blocks, pushers=3)) == 3


@pytest.mark.parametrize(("world_size", "tiles", "expected"), [(2, 8, 4), (4, 8, 2), (8, 8, 1), (8, 3, 1), (4, 9, 3)])
def test_an_all_reduce_has_at_most_as_many_bands_as_ranks(world_size: int, tiles: int, expected: int) -> None:
    p = FusedParameters(132, **TUNED[REDUCE])
    assert band_rows(128 * tiles, world_size, p) == 128 * expected
    bands = -(-tiles // expected)
    nbytes, signals = needed(REDUCE, world_size, 128 * tiles, 64, 32, 2, p)
    assert nbytes == 2 * world_size * 128 * tiles * 32 * 2 and signals == 2 * min(world_size, tiles) >= 2 * bands


@pytest.mark.parametrize(("name", "value"), [("parts", -1), ("pushers", -1), ("push_inner", 0), ("unit", 0)])
def test_a_bad_parameter_is_named(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"parameters of schedule fused: {name}={value} "):
        FusedParameters(1, **{name: value})
