# SPDX-License-Identifier: Apache-2.0
"""Parameters (``one_op.schedule.OpPlan``), limits, chunks and workspace of schedule ``chunked``. This module does not
import Triton."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import KW_ONLY
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.lowerings.chunked import output_sizes
from overlap_inductor.lowerings.chunked.sizes import even_sizes
from overlap_inductor.lowerings.chunked.sizes import gather_sizes
from overlap_inductor.lowerings.chunked.sizes import scatter_sizes
from overlap_inductor.lowerings.chunked.sizes import transfer_ratio
from overlap_inductor.runtime.arena import READS
from overlap_inductor.runtime.arena import Need
from overlap_inductor.transports.registry import names_of
from overlap_inductor.transports.registry import of_kind
from overlap_inductor.transports.transport import PeerCopies
from overlap_inductor.transports.transport import PeerReads
from overlap_inductor.transports.transport import Share

TURNS_FROM, TURNS_FROM_GATHERED = 6 << 20, 12 << 20
"""Copies of pieces of at least this many bytes take turns. ``TURNS_FROM_GATHERED`` is for the patterns
``GATHERS``, but not if the matmul contracts the exchanged dim. ``TURNS_FROM`` is for other sites. On 8 H200s,
turns raise the rate of 21 pieces of 8 MiB by 12 %, but not the rate of 21 pieces of 4 MiB. In a gather, a rank sends
its shard only 7 times. With shards of 8 MiB, the gather takes 7 % longer with turns. From 16 MiB on, turns shorten a
gather by 10 % with the host in the loop, and change nothing with the host hidden."""
TILE = 128, 256
"""Rows and columns of the vendor's tile."""
Range = tuple[int, int]
"""``(first row, end)``."""
GATHERS = ("all_gather_matmul", "all_to_all_matmul")
"""The patterns in which rows are multiplied after they have arrived."""
BANDED = ("matmul_all_reduce", "all_to_all_matmul", "matmul_all_gather")
"""The patterns in which rows may be cut into bands."""
BAND_BYTES, MOST_BANDS = 8 << 20, 4
"""At most ``MOST_BANDS`` bands are chosen. In an all-reduce, each of several bands has at least ``BAND_BYTES`` bytes
for each peer. With W > 4 ranks, this limit is W / 4 times as large. On 8 H200s, bands of 16 MiB were the fastest."""
CONTRACTED = 8
"""A slice of a contracted dim must be a multiple of this many elements, so that rows are whole 16-byte words."""


@dataclass(frozen=True, eq=False)
class ChunkedParameters:
    """The tunable parameters, compared by identity like ``FusedParameters``.

    Attributes:
        sms: SMs of the device.
        transport: name of a ``PeerCopies`` transport, or ``auto``: the fastest for a call's pieces.
        chunks: number of chunks of other ranks' rows. The chunks have about the same size. 0: a site of the patterns
            ``GATHERS`` has one chunk; in other patterns, one matmul computes all rows of a band. ``None``:
            ``chunked.sizes`` chooses the number and the sizes of the chunks.
        sizes: sizes of the chunks in shards, instead of ``chunks``.
        bands: number of bands in an all-reduce, in an all-to-all before matmuls that contract the exchanged dim, or in
            a gather of the matmul's result. 0: ``fitted``, ``fitted_bands`` or ``fitted_output`` chooses the number.
            Other sites have one band.
        grain: a chunk or band begins at a multiple of this many rows of its shard. The default is the height of
            ``TILE``.
        pushers: SMs that a transport may use.
        turns_from: pieces of at least this many bytes take turns (``transports.transport.Share``). ``None``: the
            default for the pattern (``TURNS_FROM``).
        reads: in a gather of the matmul's result: ranks read their peers' rows (``PeerReads``). By default, they write
            rows to their peers' workspaces, from which each rank copies them to its result.
        min_rows: rows of the whole matmul below which the plain collective runs (dynamic sizes).
        replays: a repeated call is replayed as one CUDA graph (``runtime.replay``).

    Raises:
        ValueError: a parameter is too small, both ``chunks`` and ``sizes`` are given, or the transport is not
            registered.
    """

    sms: int
    transport: str = "auto"
    chunks: int | None = None
    _: KW_ONLY
    sizes: Sequence[int] = ()
    bands: int = 1
    grain: int = 128
    pushers: int = 16
    turns_from: int | None = None
    reads: bool = False
    min_rows: int = 0
    replays: bool = True

    def __post_init__(self) -> None:
        least = {"chunks": 0, "bands": 0, "grain": 1, "pushers": 1, "turns_from": 0}
        wrong = [
            f"{name}={getattr(self, name)} (at least {limit})"
            for name, limit in least.items()
            if (getattr(self, name) or 0) < limit
        ]
        if self.chunks is not None and self.sizes:
            wrong.append(f"chunks={self.chunks} and sizes={list(self.sizes)} (only one of them)")
        if self.transport not in ("auto", *names_of(PeerCopies)):
            wrong.append(f"transport={self.transport!r} (one of auto, {', '.join(names_of(PeerCopies))})")
        if wrong:
            raise ValueError(f"parameters of schedule chunked: {', '.join(wrong)}")

    @property
    def share(self) -> Share:
        return Share(self.pushers, self.turns_from)


def transports_of(pattern: str) -> tuple[str, ...]:
    return names_of(PeerCopies)


def automatic(pattern: str) -> tuple[str, ...]:
    if pattern == "matmul_all_gather":
        return names_of(PeerReads)[:1]
    return tuple(t.name for t in of_kind(PeerCopies) if t.fastest_from is not None)


def settings_for(pattern: str, transport: str) -> dict[str, Any]:
    if pattern == "matmul_all_gather":
        return {"transport": transport, "bands": 0, "reads": transport in ("auto", *names_of(PeerReads))}
    return {"transport": transport, "bands": 0 if pattern in BANDED else 1}


def fitted(
    pattern: str,
    world_size: int,
    rows: int,
    inner: int,
    columns: int,
    sent_itemsize: int,
    itemsize: int,
    p: ChunkedParameters,
) -> ChunkedParameters:
    """``p`` with all values filled in that depend on the size of a call.

    Args:
        rows: rows of a shard.
        inner, columns: K and N of its matmul.
        sent_itemsize, itemsize: bytes of an element that is sent, and of an element of the operands.

    Raises:
        UnsupportedError: the given ``sizes`` do not add up to the shards of all peers.
    """
    sizes, bands, transport, gathers = tuple(p.sizes), p.bands, p.transport, pattern in GATHERS
    sent, other = (inner, columns) if gathers else (columns, inner)
    shard_bytes = rows * sent * sent_itemsize
    if bands == 0:
        # A band is one piece for each peer, and each piece has a fixed cost. So a small shard gets few bands.
        bands = (
            max(1, min(MOST_BANDS, 4 * shard_bytes // (max(world_size, 4) * BAND_BYTES)))
            if pattern == "matmul_all_reduce"
            else 1
        )
    if p.chunks is None and not sizes:
        ratio = transfer_ratio(sent_itemsize, itemsize, other)
        tiles = -(-rows // TILE[0]) * -(-columns // TILE[1])
        sizes = gather_sizes(world_size - 1, ratio, tiles / p.sms) if gathers else scatter_sizes(world_size - 1, ratio)
        if pattern == "matmul_all_reduce":
            # One band: the second leg waits for the last transfer of the first leg. The last chunk is the smallest, so
            # that this transfer is short.
            sizes = tuple(sorted(sizes, reverse=True)) if len(sizes) > 1 else even_sizes(world_size - 1, 2)
            # Several bands: a band is summed after the matmul of the next band's first chunk. This chunk is the
            # smallest, so that the band is summed early.
            sizes = sizes if bands == 1 else sizes[::-1]
    if sizes and sum(sizes) != world_size - 1:
        raise UnsupportedError(f"chunks of {list(sizes)} shards do not add up to the shards of {world_size - 1} peers")
    if transport == "auto":
        transport = _fastest(shard_bytes, bands * _most_parts(world_size, p))
    turns_from = (TURNS_FROM_GATHERED if gathers else TURNS_FROM) if p.turns_from is None else p.turns_from
    return replace(p, sizes=sizes, bands=bands, transport=transport, turns_from=turns_from)


def fitted_bands(world_size: int, rows: int, columns: int, row_bytes: int, p: ChunkedParameters) -> ChunkedParameters:
    """``fitted`` for an all-to-all before matmuls that contract the exchanged dim. If ``p.bands`` is 0, this
    function chooses 1 to ``MOST_BANDS`` bands: the most for which a band has, on average, a tile for each SM of an
    H200.

    Args:
        rows: rows of a slice. The operand and the result have the same number of rows.
        columns: N, of all matmuls together.
        row_bytes: bytes of a slice's row.
    """
    tiles = -(-rows // TILE[0]) * -(-columns // TILE[1])
    # All ranks must choose the same bands, so the SMs of the rank's own device do not count.
    bands = p.bands or max(1, min(MOST_BANDS, tiles // output_sizes.SMS))
    transport = _fastest(rows * row_bytes, bands) if p.transport == "auto" else p.transport
    return replace(p, bands=bands, transport=transport, turns_from=TURNS_FROM if p.turns_from is None else p.turns_from)


def fitted_output(
    world_size: int, rows: int, columns: int, itemsize: int, p: ChunkedParameters
) -> tuple[ChunkedParameters, tuple[int, ...]]:
    """``(p with all values filled in, rows of each band)`` for a gather of a matmul's result. The bands depend only on
    values that all ranks share.

    Args:
        rows, columns: M and N of a rank's matmul.
        itemsize: bytes of an element of the result.
    """
    if p.bands:
        sizes = tuple(size for _, size in bands_of(rows, p))
    else:
        sizes = output_sizes.band_rows(rows, columns, world_size - 1, itemsize, p.grain)
    automatic_transport = names_of(PeerReads)[0] if p.reads else _fastest(rows * columns * itemsize, len(sizes))
    transport = automatic_transport if p.transport == "auto" else p.transport
    turns_from = TURNS_FROM if p.turns_from is None else p.turns_from
    return replace(p, bands=len(sizes), transport=transport, turns_from=turns_from), sizes


def _fastest(nbytes: int, pieces: int) -> str:
    limits = {t.name: t.fastest_from for t in of_kind(PeerCopies) if t.fastest_from is not None}
    return max((name for name, least in limits.items() if nbytes >= pieces * least), key=limits.__getitem__)


@functools.cache
def parameters_of(settings: str, sms: int) -> ChunkedParameters:
    return ChunkedParameters(sms, **json.loads(settings))


def _cut(rows: int, count: int, grain: int) -> int:
    """Rows of a piece, so that there are at most ``count`` pieces: all rows, or a multiple of ``grain``."""
    return rows if count == 1 else min(rows, -(-rows // (count * grain)) * grain)


def bands_of(rows: int, parameters: ChunkedParameters) -> list[tuple[int, int]]:
    """``(first row, rows)`` of the bands of a shard of ``rows`` rows."""
    size = _cut(rows, parameters.bands, parameters.grain)
    return [(start, min(size, rows - start)) for start in range(0, rows, size)]


def _most_parts(world_size: int, p: ChunkedParameters) -> int:
    return 1 if p.chunks is None or p.sizes else max(1, -(-p.chunks // (world_size - 1)))


def part_rows_of(rows: int, world_size: int, parameters: ChunkedParameters) -> int:
    """Rows of a part of a shard. A shard has several parts if there are more chunks than peers."""
    return _cut(rows, _most_parts(world_size, parameters), parameters.grain)


def chunk_bounds(parts: int, world_size: int, parameters: ChunkedParameters) -> list[int]:
    """Indices of the parts (``transports.transfer``) at which chunks begin, then the number of all parts.
    ``parameters``: from ``fitted``."""
    count = parts * (world_size - 1)
    if parameters.sizes:
        return [0, *(parts * size for size in itertools.accumulate(parameters.sizes))]
    chunks = max(1, min(parameters.chunks or 0, count))
    return [i * count // chunks for i in range(chunks + 1)]


def chunk_rows(first: int, last: int, rank: int, world_size: int, rows: int, part_rows: int) -> list[Range]:
    """The rows of parts ``first .. last - 1`` among the rows of all ranks. Part 0 begins at the end of ``rank``'s own
    rows. There are two ranges if the parts wrap around the end of the tensor."""
    parts = -(-rows // part_rows)

    def behind(number: int) -> int:
        return number // parts * rows + number % parts * part_rows

    total = world_size * rows
    start = ((rank + 1) * rows + behind(first)) % total
    end = start + behind(last) - behind(first)
    return [(start, end)] if end <= total else [(start, total), (0, end - total)]


def result_signals(world_size: int, parameters: ChunkedParameters) -> int:
    """Index of the first flag for the finished bands of an all-reduce, behind the flags for all parts."""
    return (parameters.bands or MOST_BANDS) * _most_parts(world_size, parameters)


def needed(
    pattern: str, world_size: int, rows: int, inner: int, columns: int, itemsize: int, parameters: ChunkedParameters
) -> Need:
    """``(bytes, signals)`` of a call's slot (``runtime.arena``). ``rows``: rows of a shard; ``inner``, ``columns``: K
    and N; ``itemsize``: bytes of a sent element."""
    # A call with fewer rows never needs more.
    if pattern == "matmul_all_reduce":
        signals = result_signals(world_size, parameters) + (parameters.bands or MOST_BANDS)
        return 2 * world_size * rows * columns * itemsize, signals
    if pattern == "matmul_all_gather":
        # Each rank's slice has the rows of all shards together.
        own, signals = world_size * rows * columns * itemsize, parameters.bands or output_sizes.MOST_BANDS
        return (own, signals, READS) if parameters.reads else (world_size * own, signals)
    # One flag for each band if the exchanged dim is contracted, otherwise one for each part.
    bands = parameters.bands or MOST_BANDS if pattern == "all_to_all_matmul" else 1
    nbytes = world_size * rows * (inner if pattern in GATHERS else columns) * itemsize
    return nbytes, max(_most_parts(world_size, parameters), bands)


def why_not(dtype: torch.dtype, inner: int, columns: int, scaled: bool = False) -> str | None:
    """Why schedule ``chunked`` cannot compute ``a [rows, inner] @ b [inner, columns]``; ``None`` if it can. ``scaled``:
    the operands are fp8."""
    right = (torch.float8_e4m3fn, torch.float8_e5m2) if scaled else (torch.float16, torch.bfloat16)
    if dtype not in right:
        return f"schedule chunked multiplies {'fp8 with scales' if scaled else 'fp16 or bf16'} here, not {dtype}"
    least = 16 // dtype.itemsize
    if inner % least or columns % least or inner == 0 or columns == 0:
        rows = f"rows of {inner} and of {columns} elements cannot be read"
        return f"{rows}; expected positive multiples of {least} (16 bytes)"
    return None
