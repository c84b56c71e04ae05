"""Schedule ``chunked``: the own shard's matmul, last of a reduce-scatter, which adds what has come for it to each tile: no pass over all partial sums stands behind it.

Forward progress: a block waits for what peers send of this call, which stands before it on their streams and on this rank's, and needs no SM that it might hold: copies of
copy engines that wait for no turn (``transports.copy_engine``). Blocks are not resident for longer than a tile. Waits are bounded (``signals``).

Memory ordering: a wait acquires all sources' flags, ordinary loads past L1 follow. CUDA graphs: the number of the call is read from device memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.group_signals import wait_for_all
from overlap_inductor.kernels.signals import FLAG_WORDS
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_PARTIALS
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.tile_order import grouped
from overlap_inductor.kernels.tile_order import multiply_tile


@triton.jit(do_not_specialize=["rank", "site", "rows", "first_row", "index", "signals"])
def matmul_sum(
    a_desc, b_desc, out, bias, staging, flags, calls, stop, patience,
    site, rank, rows, first_row, columns, inner, index, signals, scale,
    WORLD: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """``out = scale * (a[first_row :] @ b + bias + sum of staging[source] over all other sources)``, in fp32, rounded once. Grid: one block a tile.

    Sources are added in the order ``rank + 1, rank + 2, ...``, so that a rank's result is the same in every run.

    Args:
        a_desc: ``[all rows, inner]``, blocks ``[BLOCK_M, BLOCK_K]``; b_desc, bias, TRANSPOSED, BIAS: see ``multiply_tile``.
        out: ``[rows, columns]``; staging: ``[WORLD, rows, columns]`` of one dtype.
        flags: ``signal_flag(s, index), ..., signal_flag(s, index + PARTS - 1)``: the call whose parts from source ``s`` have come. A block has at least ``WORLD * PARTS`` threads.
    """
    tile = tl.program_id(0)
    m, n = grouped(tile, tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP_M)
    total = multiply_tile(a_desc, b_desc, bias, first_row + m * BLOCK_M, n * BLOCK_N, inner, columns, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, BIAS)
    code = site * WAIT_KINDS + WAIT_PARTIALS
    wait_for_all(signal_flag(flags, 0, index, signals, WORLD), tl.load(calls) + 1, WORLD, PARTS, signals * FLAG_WORDS, rank, stop, patience, code, 0)
    at_m = m * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (at_m < rows)[:, None] & (at_n < columns)[None, :]
    at = at_m[:, None].to(tl.int64) * columns + at_n[None, :]
    for step in tl.static_range(1, WORLD):
        came = staging + ((rank + step) % WORLD).to(tl.int64) * rows * columns
        total += tl.load(came + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=inside)
