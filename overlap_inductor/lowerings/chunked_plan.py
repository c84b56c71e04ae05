"""What is planned of schedule ``chunked`` before any GPU is touched: its parameters, which rows are multiplied together, what workspace it needs. No Triton here."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import torch

from overlap_inductor.transports.transfer import TRANSPORTS

UNEVEN_ROWS = False
COPY_ENGINE_BYTES = 4 << 20
"""Bytes of a piece from which on copy engines are as fast as SMs that push (measured on 8 H200s), and leave the SMs to the matmul."""


@dataclass(frozen=True, eq=False)
class ChunkedParameters:
    """What may be tuned. (Compared by identity, as ``FusedParameters``.)

    Attributes:
        sms: of the device.
        transport: ``copy_engine`` | ``sm_push``.
        chunks: matmuls of other ranks' rows, beside one of the own rows. 0 in an all-reduce: own and others' rows of a band are one matmul.
        bands: of rows of an all-reduce; a band is reduced and handed round under the matmuls of the next.
        grain: a chunk or band begins at a multiple of so many rows of its shard: a tile of the vendor's matmul.
        pushers: blocks that push (``sm_push``).
        min_rows: rows of the whole matmul below which the plain collective runs (dynamic sizes).
    """

    sms: int
    transport: str = "copy_engine"
    chunks: int = 1
    bands: int = 1
    grain: int = 128
    pushers: int = 16
    min_rows: int = 0

    def __post_init__(self) -> None:
        least = {"chunks": 0, "bands": 1, "grain": 1, "pushers": 1}
        small = [f"{name}={getattr(self, name)} (at least {limit})" for name, limit in least.items() if getattr(self, name) < limit]
        if small or self.transport not in TRANSPORTS:
            raise ValueError(f"parameters of schedule chunked: {', '.join(small) or f'transport={self.transport!r} (one of {TRANSPORTS})'}")


def settings_for(pattern: str, world_size: int, shard_bytes: int, transport: str = "auto") -> dict[str, Any]:
    """The parameters of a site for the plan; ``shard_bytes``: of what goes to one peer. ``transport`` as in ``OVERLAP_INDUCTOR_TRANSPORT``."""
    # (On 2 GPUs one further matmul is the best: the own one hides the whole transfer.)
    chunks = min(3, world_size - 1)
    bands = 4 if pattern == "matmul_all_reduce" else 1
    if bands > 1:
        chunks = 0
    pieces = bands * max(1, chunks // (world_size - 1))
    if transport == "auto":
        transport = "copy_engine" if shard_bytes >= pieces * COPY_ENGINE_BYTES else "sm_push"
    return {"transport": transport, "chunks": chunks, "bands": bands}


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


def part_rows_of(rows: int, world_size: int, parameters: ChunkedParameters) -> int:
    """Rows of a part of a shard: all of them, or fewer where there are more chunks than peers."""
    return _cut(rows, max(1, -(-parameters.chunks // (world_size - 1))), parameters.grain)


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


def signals_of(pattern: str, world_size: int, rows: int, parameters: ChunkedParameters) -> int:
    """Flags a source: one a part, and for an all-reduce one more a band, behind those of all bands."""
    if pattern != "matmul_all_reduce":
        return -(-rows // part_rows_of(rows, world_size, parameters))
    bands = bands_of(rows, parameters)
    return sum(-(-size // part_rows_of(size, world_size, parameters)) for _, size in bands) + len(bands)


def needed(pattern: str, world_size: int, rows: int, inner: int, columns: int, itemsize: int, parameters: ChunkedParameters) -> tuple[int, int]:
    """``(bytes, signals)`` that a call needs of its slot: ``rows`` of a shard, ``inner`` its K, ``columns`` its N, ``itemsize`` of what is sent."""
    width = inner if pattern == "all_gather_matmul" else columns
    legs = 2 if pattern == "matmul_all_reduce" else 1
    return legs * world_size * rows * width * itemsize, signals_of(pattern, world_size, rows, parameters)


def why_not(dtype: torch.dtype, inner: int, columns: int, scaled: bool = False) -> str | None:
    """What schedule ``chunked`` is not made for: ``a [rows, inner] @ b [inner, columns]``, in any layout that the vendor's matmul takes; ``scaled``: of fp8."""
    right = (torch.float8_e4m3fn, torch.float8_e5m2) if scaled else (torch.float16, torch.bfloat16)
    if dtype not in right:
        return f"schedule chunked multiplies {'fp8 with scales' if scaled else 'fp16 or bf16'} here, not {dtype}"
    least = 16 // dtype.itemsize
    if inner % least or columns % least or inner == 0 or columns == 0:
        return f"rows of {inner} and of {columns} elements are no whole, positive number of 16-byte words"
    return None
