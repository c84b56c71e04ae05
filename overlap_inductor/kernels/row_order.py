# SPDX-License-Identifier: Apache-2.0
"""Kernels that bring the rows of each piece of an exchange into the order of the experts.

In the experts' order, row ``j`` is the arrived row ``index[j]`` (counted from the end if negative), and the rows of
expert ``e`` end at ``ends[e]``. Piece ``p`` consists of the arrived rows ``bounds[p] .. bounds[p + 1] - 1``. A piece is
a selection from ``index`` in the same order, so no sort is needed::

    count_rows:   counts[p, b]  = number of rows of piece p in block b of index
    place_rows:   for the k-th row j of piece p, with r = index[j] - bounds[p]:
                      ordered[bounds[p] + k] = j     # its place among all rows
                      places[bounds[p] + k]  = r     # where it is in the piece, as it arrived
                      back[bounds[p] + r]    = k     # where its result is among the piece's results
    count_by_expert:
                  found[p, e]   = number of rows of piece p between ends[e - 1] and ends[e]
                  ends_of[p, e] = sum of found[p, :e + 1]    # by the last block of the piece

``counts``, ``found`` and ``ends_of`` are int32, ``ends`` is int32 or int64, and all other tensors are int64. Numbers
that change from call to call are read from device memory: ``bounds[pieces]`` is the number of rows. The kernels do not
communicate with other ranks, and a CUDA graph may hold them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _chunk(rows, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of ``index`` for each block of the grid, a multiple of ``BLOCK``."""
    return tl.cdiv(tl.cdiv(rows, BLOCKS), BLOCK) * BLOCK


@triton.jit
def _rows_of(index, at, end, rows):
    row = tl.load(index + at, mask=at < end, other=0)
    return tl.where(row < 0, row + rows, row)


@triton.jit(do_not_specialize=["pieces"])
def count_rows(index, bounds, counts, pieces, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """See the module. Grid: ``pieces * BLOCKS`` blocks."""
    piece, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    rows, first, last = tl.load(bounds + pieces), tl.load(bounds + piece), tl.load(bounds + piece + 1)
    chunk = _chunk(rows, BLOCKS, BLOCK)
    end = tl.minimum((block + 1) * chunk, rows)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(block * chunk, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = _rows_of(index, at, end, rows)
        found += ((at < end) & (row >= first) & (row < last)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(found, 0))


@triton.jit(do_not_specialize=["pieces"])
def place_rows(index, bounds, counts, ordered, places, back, pieces, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """See the module. Grid: ``pieces * BLOCKS`` blocks. ``BLOCKS`` is a power of two."""
    piece, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    rows, first, last = tl.load(bounds + pieces), tl.load(bounds + piece), tl.load(bounds + piece + 1)
    chunk = _chunk(rows, BLOCKS, BLOCK)
    end = tl.minimum((block + 1) * chunk, rows)
    blocks = tl.arange(0, BLOCKS)
    done = tl.sum(tl.load(counts + piece * BLOCKS + blocks, mask=blocks < block, other=0), 0).to(tl.int64)
    for start in range(block * chunk, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = _rows_of(index, at, end, rows)
        inside = (at < end) & (row >= first) & (row < last)
        number = done + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(ordered + first + number, at.to(tl.int64), mask=inside)
        tl.store(places + first + number, row - first, mask=inside)
        tl.store(back + row, number, mask=inside)
        done += tl.sum(inside.to(tl.int32), 0)


@triton.jit(do_not_specialize=["experts", "pieces"])
def count_by_expert(
    index, bounds, ends, found, ends_of, finished, experts, pieces, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """See the module. Grid: ``pieces * experts`` blocks. ``finished``: int32 ``[pieces]``, 0 before and after the
    kernel, counts a piece's finished blocks. ``ends_of``: ``[pieces, EXPERTS]``. ``EXPERTS``: a power of two, at least
    ``experts``."""
    piece, expert = tl.program_id(0) // experts, tl.program_id(0) % experts
    rows, first, last = tl.load(bounds + pieces), tl.load(bounds + piece), tl.load(bounds + piece + 1)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    end = tl.minimum(tl.load(ends + expert).to(tl.int64), rows)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = _rows_of(index, at, end, rows)
        count += ((at < end) & (row >= first) & (row < last)).to(tl.int32)
    tl.store(found + tl.program_id(0), tl.sum(count, 0))
    # The store must precede the count of every thread's block.
    tl.debug_barrier()
    if tl.atomic_add(finished + piece, 1, sem="acq_rel") == experts - 1:
        each = tl.arange(0, EXPERTS)
        # Other blocks have written these words, so they must not come from this SM's cache.
        counts = tl.load(found + piece * experts + each, mask=each < experts, other=0, cache_modifier=".cg")
        tl.store(ends_of + piece * EXPERTS + each, tl.cumsum(counts, 0))
        tl.store(finished + piece, 0)
