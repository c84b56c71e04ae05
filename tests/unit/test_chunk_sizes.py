# SPDX-License-Identifier: Apache-2.0
"""Sizes of the chunks of schedule ``chunked``. The chunks must be few, and must hide the transfers. If a shard's
transfer takes longer than its matmul, the chunks must keep the link busy instead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from overlap_inductor.lowerings.chunked import sizes as chunk_sizes

SHORT = [i / 50 for i in range(1, 51)]
"""Times of a shard's transfer, relative to the time of its matmul. All are at most 1."""


def _compositions(shards: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.product((False, True), repeat=shards - 1):
        sizes = [1]
        for cut in cuts:
            if cut:
                sizes.append(1)
            else:
                sizes[-1] += 1
        yield tuple(sizes)


@pytest.mark.parametrize("peers", [1, 3, 7, 8, 15, 63])
def test_all_transfers_of_scattered_chunks_end_within_the_matmuls(peers: int) -> None:
    for ratio in SHORT:
        sizes = chunk_sizes.scatter_sizes(peers, ratio)
        assert sum(sizes) == peers and min(sizes) > 0
        assert chunk_sizes.last_transfer(sizes, ratio) <= peers + 1 + 1e-9, (ratio, sizes)


@pytest.mark.parametrize("peers", [1, 2, 3, 5, 7])
def test_scattered_chunks_are_as_few_as_possible(peers: int) -> None:
    """The number of chunks is the smallest that hides all transfers. There is one exception: if a single chunk's
    transfer would end with almost no time to spare, there are two chunks. Then the second chunk has as many shards as
    the first, or one more."""
    for ratio in SHORT:
        fewest = min(
            len(sizes) for sizes in _compositions(peers) if chunk_sizes.last_transfer(sizes, ratio) <= peers + 1 + 1e-9
        )
        sizes = chunk_sizes.scatter_sizes(peers, ratio)
        late = fewest == 1 < peers and peers * ratio > 1 - chunk_sizes.LATE
        assert (len(sizes) == 2 and sizes[1] - sizes[0] in (0, 1)) if late else len(sizes) == fewest, ratio


@pytest.mark.parametrize("peers", [1, 3, 7, 15, 63])
def test_gathered_chunks_hold_the_shards_that_have_arrived(peers: int) -> None:
    for ratio in SHORT:
        sizes = chunk_sizes.gather_sizes(peers, ratio, 1.0)
        assert sum(sizes) == peers
        for number, size in enumerate(sizes):
            before = sum(sizes[:number])
            last = before + size == peers
            # A chunk of several shards holds all shards that have arrived when the chunk begins, except the shards of
            # earlier chunks. A chunk of one shard may have to wait for the shard.
            begins = 1 + before - chunk_sizes.LATE
            assert size == 1 or (before + size) * ratio <= begins + 1e-9
            assert last or size == 1 or (before + size + 1) * ratio > begins - 1e-9


def test_few_chunks_keep_a_slow_link_busy() -> None:
    assert chunk_sizes.scatter_sizes(7, 1.5) == chunk_sizes.gather_sizes(7, 1.5, 1.0) == (3, 2, 2)
    assert chunk_sizes.scatter_sizes(1, 9.0) == chunk_sizes.gather_sizes(1, 9.0, 1.0) == (1,)


def test_llama3_70b_on_8_and_4_gpus() -> None:
    eight, four = chunk_sizes.transfer_ratio(2, 2, 28672 // 8), chunk_sizes.transfer_ratio(2, 2, 28672 // 4)
    assert (chunk_sizes.scatter_sizes(7, eight), chunk_sizes.gather_sizes(7, eight, 0.42)) == (
        (2, 2, 2, 1),
        (1, 1, 2, 3),
    )
    assert (chunk_sizes.scatter_sizes(3, four), chunk_sizes.gather_sizes(3, four, 0.42)) == ((1, 2), (2, 1))
    assert (
        chunk_sizes.transfer_ratio(2, 1, 3584)
        == 2 * chunk_sizes.transfer_ratio(2, 2, 3584)
        == 2 * chunk_sizes.transfer_ratio(1, 1, 3584)
    ), "fp8 multiplies twice as fast as bf16, and an fp8 shard has half the bytes"
