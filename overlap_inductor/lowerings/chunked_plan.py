"""What is planned of schedule ``chunked`` before any GPU is touched: its parameters, which rows are multiplied together, what workspace it needs. No Triton here."""

from __future__ import annotations

import functools
import json
from dataclasses import KW_ONLY
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from overlap_inductor.transports.transfer import TRANSPORTS

COPY_ENGINE_BYTES = 2 << 20
"""Bytes of a piece from which on copy engines are faster than SMs that push, which are missing from the matmul (2 H200s, also as one of 4 and of 8 ranks)."""
MANY_BYTES = 8 << 20
"""Bytes of a shard from which a reduce-scatter's matmul of one shard's rows fills an H200."""
BAND_BYTES, MOST_BANDS = 2 << 20, 4
"""Bytes a peer of the smallest band of an all-reduce, and how many there are at most, where its size decides."""


@dataclass(frozen=True, eq=False)
class ChunkedParameters:
    """What may be tuned. (Compared by identity, as ``FusedParameters``.)

    Attributes:
        sms: of the device.
        transport: ``copy_engine`` | ``sm_push`` | ``auto``: by the size of a piece, at each call.
        chunks: matmuls of other ranks' rows, beside one of the own rows. 0 in an all-reduce: own and others' rows of a band are one matmul.
        whole_shards: no more chunks than peers.
        many_from: bytes of a shard from which there are as many chunks as peers.
        bands: of rows of an all-reduce; a band is reduced and handed round under the matmuls of the next. 0: as many as stay large, then without chunks.
        grain: a chunk or band begins at a multiple of so many rows of its shard: a tile of the vendor's matmul.
        pushers: blocks that push (``sm_push``).
        min_rows: rows of the whole matmul below which the plain collective runs (dynamic sizes).
    """

    sms: int
    transport: str = "auto"
    chunks: int = 3
    _: KW_ONLY
    whole_shards: bool = False
    many_from: int = 2**62
    bands: int = 1
    grain: int = 128
    pushers: int = 16
    min_rows: int = 0

    def __post_init__(self) -> None:
        least = {"chunks": 0, "bands": 0, "grain": 1, "pushers": 1}
        small = [f"{name}={getattr(self, name)} (at least {limit})" for name, limit in least.items() if getattr(self, name) < limit]
        if small or self.transport not in ("auto", *TRANSPORTS):
            raise ValueError(f"parameters of schedule chunked: {', '.join(small) or f'transport={self.transport!r} (auto, or one of {TRANSPORTS})'}")


def transports_of(pattern: str) -> tuple[str, ...]:
    """What may move a pattern's bytes."""
    return TRANSPORTS


def settings_for(pattern: str, transport: str) -> dict[str, Any]:
    """The parameters of a pattern, for the plan; ``transport`` as in ``OVERLAP_INDUCTOR_TRANSPORT``.

    Three chunks are few launches, and what the last one leaves in sight is short; a reduction of 8 ranks' large shards gains from more. On 2 GPUs one is best: the own rows' matmul hides the whole transfer.
    """
    many = {"many_from": MANY_BYTES} if pattern == "matmul_reduce_scatter" else {}
    return {"transport": transport, "chunks": 3, "whole_shards": True, "bands": 0 if pattern == "matmul_all_reduce" else 1, **many}


def fitted(pattern: str, world_size: int, shard_bytes: int, p: ChunkedParameters) -> ChunkedParameters:
    """``p`` with what was left to the size of a call decided; ``shard_bytes``: of what goes to one peer."""
    chunks, bands, transport = min(p.chunks, world_size - 1) if p.whole_shards else p.chunks, p.bands, p.transport
    chunks = world_size - 1 if shard_bytes >= p.many_from else chunks
    if bands == 0:
        bands = max(1, min(MOST_BANDS, shard_bytes // BAND_BYTES)) if pattern == "matmul_all_reduce" else 1
        chunks = chunks if bands == 1 else 0
    if transport == "auto":
        pieces = bands * _most_parts(world_size, chunks)
        transport = "copy_engine" if shard_bytes >= pieces * COPY_ENGINE_BYTES else "sm_push"
    return replace(p, chunks=chunks, bands=bands, transport=transport)


@functools.cache
def parameters_of(settings: str, sms: int) -> ChunkedParameters:
    """The parameters that a plan's ``settings`` (JSON text) and the device's number of SMs make."""
    return ChunkedParameters(sms, **json.loads(settings))


def _cut(rows: int, count: int, grain: int) -> int:
    """Rows of a piece, a multiple of ``grain`` unless there is one piece only, so that there are at most ``count`` pieces."""
    return rows if count == 1 else min(rows, -(-rows // (count * grain)) * grain)


def bands_of(rows: int, parameters: ChunkedParameters) -> list[tuple[int, int]]:
    """``(first row, rows)`` of the bands of a shard of ``rows`` rows."""
    size = _cut(rows, parameters.bands, parameters.grain)
    return [(start, min(size, rows - start)) for start in range(0, rows, size)]


def _most_parts(world_size: int, chunks: int) -> int:
    return max(1, -(-chunks // (world_size - 1)))


def part_rows_of(rows: int, world_size: int, parameters: ChunkedParameters) -> int:
    """Rows of a part of a shard: all of them, or fewer where there are more chunks than peers."""
    return _cut(rows, _most_parts(world_size, parameters.chunks), parameters.grain)


def chunk_bounds(parts: int, world_size: int, parameters: ChunkedParameters) -> list[int]:
    """Numbers of parts (``transports.transfer``) at which chunks begin, and the number of all; a first chunk is never larger than a later one by a part."""
    count = parts * (world_size - 1)
    chunks = max(1, min(parameters.chunks, count))
    return [i * count // chunks for i in range(chunks + 1)]


def chunk_rows(first: int, last: int, rank: int, world_size: int, rows: int, part_rows: int) -> list[tuple[int, int]]:
    """``(first row, end)`` of parts ``first .. last - 1`` among the rows of all ranks: the rows behind ``rank``'s own, going round; one range, or two at the end."""
    parts = -(-rows // part_rows)

    def behind(number: int) -> int:
        return number // parts * rows + number % parts * part_rows

    total = world_size * rows
    start = ((rank + 1) * rows + behind(first)) % total
    end = start + behind(last) - behind(first)
    return [(start, end)] if end <= total else [(start, total), (0, end - total)]


def result_signals(world_size: int, parameters: ChunkedParameters) -> int:
    """The first of an all-reduce's flags for finished bands, one each, behind those for the parts of all bands."""
    return (parameters.bands or MOST_BANDS) * _most_parts(world_size, parameters.chunks)


def needed(pattern: str, world_size: int, rows: int, inner: int, columns: int, itemsize: int, parameters: ChunkedParameters) -> tuple[int, int]:
    """``(bytes, signals)`` that a call needs of its slot: ``rows`` of a shard, ``inner`` its K, ``columns`` its N, ``itemsize`` of what is sent."""
    # (Flags do not rest on the rows: what is planned for the most rows serves any fewer.)
    if pattern == "matmul_all_reduce":
        signals = result_signals(world_size, parameters) + (parameters.bands or MOST_BANDS)
        return 2 * world_size * rows * columns * itemsize, signals
    return world_size * rows * (inner if pattern == "all_gather_matmul" else columns) * itemsize, _most_parts(world_size, parameters.chunks)


def why_not(dtype: torch.dtype, inner: int, columns: int, scaled: bool = False) -> str | None:
    """What schedule ``chunked`` is not made for: ``a [rows, inner] @ b [inner, columns]``, in any layout that the vendor's matmul takes; ``scaled``: of fp8."""
    right = (torch.float8_e4m3fn, torch.float8_e5m2) if scaled else (torch.float16, torch.bfloat16)
    if dtype not in right:
        return f"schedule chunked multiplies {'fp8 with scales' if scaled else 'fp16 or bf16'} here, not {dtype}"
    least = 16 // dtype.itemsize
    if inner % least or columns % least or inner == 0 or columns == 0:
        return f"rows of {inner} and of {columns} elements are no whole, positive number of 16-byte words"
    return None
