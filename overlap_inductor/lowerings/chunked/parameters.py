"""What is planned of schedule ``chunked`` before any GPU is touched: its parameters, which rows are multiplied
together, what workspace it needs. No Triton here."""

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
from overlap_inductor.lowerings.chunked.sizes import even_sizes
from overlap_inductor.lowerings.chunked.sizes import gather_sizes
from overlap_inductor.lowerings.chunked.sizes import scatter_sizes
from overlap_inductor.lowerings.chunked.sizes import transfer_ratio
from overlap_inductor.transports.transfer import TRANSPORTS

COPY_ENGINE_BYTES = 2 << 20
"""Bytes of a piece from which on copy engines are faster than SMs that push, which are missing from the matmul (2
H200s, also as one of 4 and of 8 ranks)."""
TURNS_FROM, TURNS_FROM_GATHERED = 6 << 20, 12 << 20
"""Bytes of a piece from which on waiting for a turn gains more than it costs: on 8 H200s nothing at 4 MiB, 12 % at 8,
20 % at 16; in a gather, whose copies all begin at once and which waits for the first, it loses 7 % at 8 MiB and gains
10 % (the host in the loop) from 16 on."""
TILE = 128, 256
"""Rows and columns that an SM multiplies at once."""
BAND_BYTES, MOST_BANDS = 8 << 20, 4
"""Bytes a peer of the smallest band of an all-reduce of up to 4 ranks, and how many there are at most, where its size
decides. (8 H200s: of pieces of 4 to 32 MiB, bands of 16 were the fastest.)"""


@dataclass(frozen=True, eq=False)
class ChunkedParameters:
    """What may be tuned. (Compared by identity, as ``FusedParameters``.)

    Attributes:
        sms: of the device.
        transport: ``copy_engine`` | ``sm_push`` | ``auto``: by the size of a piece, at each call.
        chunks: matmuls of other ranks' rows, beside one of the own rows, of one size. 0 in an all-reduce: own and
            others' rows of a band are one matmul. ``None``: as few as hide the transfers (``chunk_sizes``).
        sizes: of the chunks, in shards, in place of ``chunks``.
        bands: of rows of an all-reduce; a band is reduced and handed round under the matmuls of the next. 0: as many as
            stay large.
        grain: a chunk or band begins at a multiple of so many rows of its shard: a tile of the vendor's matmul.
        pushers: blocks that push (``sm_push``).
        turns_from: bytes of a piece from which on it waits until its receiver gets nothing else
            (``transports.copy_engine``). ``None``: by the pattern.
        min_rows: rows of the whole matmul below which the plain collective runs (dynamic sizes).
        replays: a call that comes again is one launch of a CUDA graph (``runtime.replay``).
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
            wrong.append(f"chunks={self.chunks} beside sizes={list(self.sizes)} (one of both)")
        if wrong or self.transport not in ("auto", *TRANSPORTS):
            raise ValueError(
                "parameters of schedule chunked:"
                f" {', '.join(wrong) or f'transport={self.transport!r} (auto, or one of {TRANSPORTS})'}"
            )


def transports_of(pattern: str) -> tuple[str, ...]:
    """What may move a pattern's bytes."""
    return TRANSPORTS


def settings_for(pattern: str, transport: str) -> dict[str, Any]:
    """The parameters of a pattern, for the plan; ``transport`` as in ``OVERLAP_INDUCTOR_TRANSPORT``."""
    return {"transport": transport, "bands": 0 if pattern == "matmul_all_reduce" else 1}


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
    """``p`` with what was left to the size of a call decided.

    Args:
        rows: of a shard; inner, columns: K and N of its matmul; itemsize: bytes of an element of its operands,
            sent_itemsize: of what is sent.

    Raises:
        UnsupportedError: given sizes that are not all peers' shards.
    """
    sizes, bands, transport, gathers = tuple(p.sizes), p.bands, p.transport, pattern == "all_gather_matmul"
    sent, other = (inner, columns) if gathers else (columns, inner)
    shard_bytes = rows * sent * sent_itemsize
    if bands == 0:
        # (A band is a piece for each peer, and a piece has its fixed costs.)
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
            # (Its second leg follows the first: whatever leaves early is handed round early.)
            sizes = tuple(sorted(sizes, reverse=True)) if len(sizes) > 1 else even_sizes(world_size - 1, 2)
            # The band before is summed behind a band's first matmul; and only the last band's last transfer shows.
            sizes = sizes if bands == 1 else sizes[::-1]
    if sizes and sum(sizes) != world_size - 1:
        raise UnsupportedError(f"chunks of {list(sizes)} shards are not the shards of {world_size - 1} peers")
    if transport == "auto":
        transport = (
            "copy_engine" if shard_bytes >= bands * _most_parts(world_size, p) * COPY_ENGINE_BYTES else "sm_push"
        )
    turns_from = (TURNS_FROM_GATHERED if gathers else TURNS_FROM) if p.turns_from is None else p.turns_from
    return replace(p, sizes=sizes, bands=bands, transport=transport, turns_from=turns_from)


@functools.cache
def parameters_of(settings: str, sms: int) -> ChunkedParameters:
    """The parameters that a plan's ``settings`` (JSON text) and the device's number of SMs make."""
    return ChunkedParameters(sms, **json.loads(settings))


def _cut(rows: int, count: int, grain: int) -> int:
    """Rows of a piece, a multiple of ``grain`` unless there is one piece only, so that there are at most ``count``
    pieces."""
    return rows if count == 1 else min(rows, -(-rows // (count * grain)) * grain)


def bands_of(rows: int, parameters: ChunkedParameters) -> list[tuple[int, int]]:
    """``(first row, rows)`` of the bands of a shard of ``rows`` rows."""
    size = _cut(rows, parameters.bands, parameters.grain)
    return [(start, min(size, rows - start)) for start in range(0, rows, size)]


def _most_parts(world_size: int, p: ChunkedParameters) -> int:
    return 1 if p.chunks is None or p.sizes else max(1, -(-p.chunks // (world_size - 1)))


def part_rows_of(rows: int, world_size: int, parameters: ChunkedParameters) -> int:
    """Rows of a part of a shard: all of them, or fewer where there are more chunks than peers."""
    return _cut(rows, _most_parts(world_size, parameters), parameters.grain)


def chunk_bounds(parts: int, world_size: int, parameters: ChunkedParameters) -> list[int]:
    """Numbers of parts (``transports.transfer``) at which chunks begin, and the number of all; of ``fitted``
    parameters."""
    count = parts * (world_size - 1)
    if parameters.sizes:
        return [0, *(parts * size for size in itertools.accumulate(parameters.sizes))]
    chunks = max(1, min(parameters.chunks or 0, count))
    return [i * count // chunks for i in range(chunks + 1)]


def chunk_rows(first: int, last: int, rank: int, world_size: int, rows: int, part_rows: int) -> list[tuple[int, int]]:
    """``(first row, end)`` of parts ``first .. last - 1`` among the rows of all ranks: the rows behind ``rank``'s own,
    going round; one range, or two at the end."""
    parts = -(-rows // part_rows)

    def behind(number: int) -> int:
        return number // parts * rows + number % parts * part_rows

    total = world_size * rows
    start = ((rank + 1) * rows + behind(first)) % total
    end = start + behind(last) - behind(first)
    return [(start, end)] if end <= total else [(start, total), (0, end - total)]


def result_signals(world_size: int, parameters: ChunkedParameters) -> int:
    """The first of an all-reduce's flags for finished bands, one each, behind those for the parts of all bands."""
    return (parameters.bands or MOST_BANDS) * _most_parts(world_size, parameters)


def needed(
    pattern: str, world_size: int, rows: int, inner: int, columns: int, itemsize: int, parameters: ChunkedParameters
) -> tuple[int, int]:
    """``(bytes, signals)`` that a call needs of its slot: ``rows`` of a shard, ``inner`` its K, ``columns`` its N,
    ``itemsize`` of what is sent."""
    # (Flags do not rest on the rows: what is planned for the most rows serves any fewer.)
    if pattern == "matmul_all_reduce":
        signals = result_signals(world_size, parameters) + (parameters.bands or MOST_BANDS)
        return 2 * world_size * rows * columns * itemsize, signals
    return world_size * rows * (inner if pattern == "all_gather_matmul" else columns) * itemsize, _most_parts(
        world_size, parameters
    )


def why_not(dtype: torch.dtype, inner: int, columns: int, scaled: bool = False) -> str | None:
    """What schedule ``chunked`` is not made for: ``a [rows, inner] @ b [inner, columns]``, in any layout that the
    vendor's matmul takes; ``scaled``: of fp8."""
    right = (torch.float8_e4m3fn, torch.float8_e5m2) if scaled else (torch.float16, torch.bfloat16)
    if dtype not in right:
        return f"schedule chunked multiplies {'fp8 with scales' if scaled else 'fp16 or bf16'} here, not {dtype}"
    least = 16 // dtype.itemsize
    if inner % least or columns % least or inner == 0 or columns == 0:
        return f"rows of {inner} and of {columns} elements are no whole, positive number of 16-byte words"
    return None
