# SPDX-License-Identifier: Apache-2.0
"""The plan of schedule ``chunked``: the rows of each chunk, and the parts in which a shard is sent to each peer. Each
rank must read where its peers write."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.fused import parameters as fused_plan
from overlap_inductor.transports.transfer import Transfer

SIZES = [*itertools.product((2, 3, 8), (1, 24, 200), (1, 2, 7, 20))]


def transfer_of(
    world_size: int, rows: int, chunks: int, scattered: bool, read_in_order: bool = False
) -> tuple[Transfer, list[int]]:
    p = ChunkedParameters(132, chunks=chunks, grain=8)
    made = Transfer(rows, 16, chunked_plan.part_rows_of(rows, world_size, p), scattered, read_in_order=read_in_order)
    return made, chunked_plan.chunk_bounds(made.parts, world_size, p)


@pytest.mark.parametrize(("world_size", "rows", "chunks"), SIZES)
def test_chunks_cover_the_other_ranks_rows_once_in_ring_order(world_size: int, rows: int, chunks: int) -> None:
    made, bounds = transfer_of(world_size, rows, chunks, False)
    assert len(bounds) - 1 == min(chunks, made.parts * (world_size - 1)), (
        "there are as many chunks as requested, or one for each part if there are fewer parts"
    )
    for rank in range(world_size):
        ranges = [
            chunked_plan.chunk_rows(a, b, rank, world_size, rows, made.part_rows) for a, b in zip(bounds, bounds[1:])
        ]
        assert sum(len(r) == 2 for r in ranges) <= 1
        found = [row for chunk in ranges for start, stop in chunk for row in range(start, stop)]
        assert found == [row % (world_size * rows) for row in range((rank + 1) * rows, (rank + world_size) * rows)]


@pytest.mark.parametrize(("world_size", "rows", "chunks"), SIZES)
@pytest.mark.parametrize(("scattered", "read_in_order"), [(False, False), (True, False), (True, True)])
def test_a_chunk_waits_for_exactly_what_it_reads(
    world_size: int, rows: int, chunks: int, scattered: bool, read_in_order: bool
) -> None:
    """A chunk's parts hold exactly the rows that the chunk reads or sends. Each row is written to a receiver once. The
    distance between sender and receiver follows from the index of the part in which a row is sent."""
    made, bounds = transfer_of(world_size, rows, chunks, scattered, read_in_order)
    landed: dict[tuple[int, int], tuple[int, int, int]] = {}
    for rank in range(world_size):
        for number in range(bounds[-1]):
            piece = made.piece(number, rank, world_size)
            assert (
                piece.peer != rank
                and (rank - piece.peer) * made.direction % world_size == -(number // made.parts + 1) % world_size
            )
            for i in range(piece.rows):
                assert (piece.peer, piece.target + i) not in landed
                landed[piece.peer, piece.target + i] = rank, piece.source + i, number
    for rank in range(world_size):
        for first, last in zip(bounds, bounds[1:]):
            rows_of = chunked_plan.chunk_rows(first, last, rank, world_size, rows, made.part_rows)
            for row in (row for start, stop in rows_of for row in range(start, stop)):
                if read_in_order:
                    # The chunk reads exactly the rows that other ranks send to this rank in the chunk's parts.
                    sender, source, number = landed[rank, row]
                    assert (sender, source) == (row // rows, rank * rows + row % rows) and first <= number < last
                elif scattered:
                    # The chunk's parts send exactly the rows that this rank multiplies in the chunk.
                    owner = row // rows
                    sender, source, number = landed[owner, rank * rows + row % rows]
                    assert (sender, source) == (rank, row) and first <= number < last
                else:
                    sender, source, number = landed[rank, row]
                    assert (sender, source) == divmod(row, rows) and first <= number < last
    assert len(landed) == world_size * (world_size - 1) * rows


def test_bands_have_signals_of_their_own() -> None:
    p = ChunkedParameters(132, chunks=3, bands=3, grain=8)
    assert chunked_plan.bands_of(40, p) == [(0, 16), (16, 16), (32, 8)]
    assert chunked_plan.needed("matmul_all_reduce", 2, 40, 64, 32, 2, p) == (2 * 2 * 40 * 32 * 2, 3 * 3 + 3)
    assert chunked_plan.needed("matmul_reduce_scatter", 8, 40, 64, 32, 2, p) == (8 * 40 * 32 * 2, 1)
    assert chunked_plan.needed("all_gather_matmul", 2, 40, 64, 32, 2, p) == (2 * 40 * 64 * 2, 3)


@pytest.mark.parametrize(
    "pattern",
    ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all", "all_to_all_matmul"],
)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_workspace_for_the_most_rows_serves_fewer_rows(pattern: str, world_size: int) -> None:
    """Fewer rows may be cut into other numbers of parts and bands. The workspace must still suffice."""
    p = chunked_plan.parameters_of(json.dumps(chunked_plan.settings_for(pattern, "auto")), 132)
    nbytes, signals = chunked_plan.needed(pattern, world_size, 5000, 4096, 8192, 2, p)
    for rows in (1, 100, 129, 300, 1000, 2000, 5000):
        chosen = chunked_plan.fitted(pattern, world_size, rows, 4096, 8192, 2, 2, p)
        bands = chunked_plan.bands_of(rows, chosen)
        parts = sum(-(-size // chunked_plan.part_rows_of(size, world_size, chosen)) for _, size in bands)
        used = chunked_plan.result_signals(world_size, chosen) + len(bands) if pattern == "matmul_all_reduce" else parts
        assert used <= signals and parts <= chunked_plan.result_signals(world_size, chosen)
        assert chunked_plan.needed(pattern, world_size, rows, 4096, 8192, 2, p)[0] <= nbytes


def test_small_pieces_are_pushed_and_bands_stay_large() -> None:
    p = chunked_plan.parameters_of(json.dumps(chunked_plan.settings_for("matmul_all_reduce", "auto")), 132)
    chosen = [
        chunked_plan.fitted("all_gather_matmul", 8, 64 * mb, 8192, 3584, 2, 2, p).transport for mb in (1, 3, 4, 16)
    ]
    assert chosen == ["sm_push", "copy_engine", "copy_engine", "copy_engine"]
    bands = [chunked_plan.fitted("matmul_all_reduce", 8, 64 * mb, 3584, 8192, 2, 2, p) for mb in (1, 8, 16, 32, 64)]
    assert [(b.bands, b.sizes, b.transport) for b in bands] == [
        (1, (2, 2, 2, 1), "sm_push"),
        (1, (2, 2, 2, 1), "copy_engine"),
        (1, (2, 2, 2, 1), "copy_engine"),
        (2, (1, 2, 2, 2), "copy_engine"),
        (4, (1, 2, 2, 2), "copy_engine"),
    ]
    gathers = [chunked_plan.fitted("all_gather_matmul", 8, rows, 8192, 3584, 2, 2, p).sizes for rows in (256, 512)]
    assert gathers == [(2, 2, 3), (1, 1, 2, 3)], "a shard of few tiles is too small for a chunk"
    forced = chunked_plan.parameters_of(json.dumps(chunked_plan.settings_for("all_gather_matmul", "copy_engine")), 132)
    assert chunked_plan.fitted("all_gather_matmul", 8, 64, 8192, 3584, 2, 2, forced).transport == "copy_engine"


def test_large_pieces_take_turns() -> None:
    p = ChunkedParameters(132, "copy_engine")
    gather, reduce = (
        chunked_plan.fitted(pattern, 8, 512, 8192, 3584, 2, 2, p).turns_from
        for pattern in ("all_gather_matmul", "matmul_all_reduce")
    )
    assert gather is not None and reduce is not None and reduce < 8 << 20 < gather < 16 << 20
    assert chunked_plan.fitted("all_gather_matmul", 8, 512, 8192, 3584, 2, 2, replace(p, turns_from=1)).turns_from == 1


def test_chunks_of_an_all_reduce_end_small_in_one_band_and_begin_small_in_several() -> None:
    p = ChunkedParameters(132, bands=0)
    found = {rows: chunked_plan.fitted("matmul_all_reduce", 4, rows, 7168, 8192, 2, 2, p) for rows in (256, 1024)}
    assert (found[256].bands, found[256].sizes) == (1, (2, 1))
    assert (found[1024].bands, found[1024].sizes) == (2, (1, 2))
    assert chunked_plan.fitted("matmul_all_reduce", 2, 256, 7168, 8192, 2, 2, p).sizes == (1,)


def test_sizes_must_add_up_to_the_peers_shards() -> None:
    with pytest.raises(UnsupportedError, match=r"chunks of \[2, 2\] shards do not add up to the shards of 3 peers"):
        chunked_plan.fitted("all_gather_matmul", 4, 512, 4096, 4096, 2, 2, ChunkedParameters(132, sizes=(2, 2)))


def test_a_bad_parameter_is_named() -> None:
    with pytest.raises(ValueError, match=r"chunks=-1 \(at least 0\)"):
        ChunkedParameters(132, chunks=-1)
    with pytest.raises(ValueError, match=r"turns_from=-1 \(at least 0\)"):
        ChunkedParameters(132, turns_from=-1)
    with pytest.raises(ValueError, match=r"unit=0 \(at least 1\)"):
        fused_plan.FusedParameters(132, unit=0)
    with pytest.raises(ValueError, match=r"chunks=2 and sizes=\[1, 2\]"):
        ChunkedParameters(132, chunks=2, sizes=(1, 2))
    with pytest.raises(ValueError, match="transport='nccl'"):
        ChunkedParameters(132, "nccl")
