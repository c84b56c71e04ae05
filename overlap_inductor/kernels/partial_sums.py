# SPDX-License-Identifier: Apache-2.0
"""Schedule ``chunked``: add up the partial sums that have arrived, and exchange the finished rows with all peers.

Memory ordering, forward progress, CUDA graphs: as in ``transfer``. ``sum_partials`` runs after the waits for what it
reads. With ``BROADCAST``, its last block signals what all blocks have stored (``count_and_signal_all``).
``receive_rows`` fills the GPU. If ``receive_rows`` waited, a kernel that a peer needs might find no room. So an earlier
kernel waits for the rows that ``receive_rows`` copies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.signals import count_and_signal_all
from overlap_inductor.kernels.signals import may_store


@triton.jit(do_not_specialize=["rank", "index", "signals", "vectors", "gathered"])
def sum_partials(
    own, out, staging, peer_data, peer_flags, queues, calls, stop, rank, index, signals, vectors, gathered, scale,
    WORLD: tl.constexpr, VECTOR: tl.constexpr, BROADCAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out = scale * (own + sum of staging[source] over all other sources)``, in fp32, rounded once. Sources are added
    in the order ``rank + 1, rank + 2, ...`` Grid: any number of blocks.

    Args:
        own, out: ``[vectors * VECTOR]`` elements of one dtype; a vector is 16 bytes.
        staging: ``[WORLD, vectors * VECTOR]`` of that dtype. All three are aligned to 16 bytes.
        BROADCAST: ``out`` is also stored at vector ``gathered + rank * vectors`` of every peer's workspace, and this
            rank's flag ``index`` is set there.
        queues: word 0 counts the blocks that are done; zero before and after.
    """
    elements = vectors * VECTOR
    for start in range(tl.program_id(0) * BLOCK, elements, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < elements
        total = tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
        for step in tl.static_range(1, WORLD):
            skipped = tl.cast((rank + step) % WORLD, tl.int64) * vectors * VECTOR
            total += tl.load(staging + skipped + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        result = (total * scale).to(out.dtype.element_ty)
        tl.store(out + at, result, mask=inside)
        if BROADCAST:
            # After an abort, nothing is stored to peers: the wait for credits may have ended without them.
            allowed = inside & may_store(stop)
            for step in tl.static_range(1, WORLD):
                to = (
                    tl.multiple_of(tl.load(peer_data + (rank + step) % WORLD).to(out.dtype), 16)
                    + (tl.cast(rank, tl.int64) * vectors + gathered) * VECTOR
                )
                tl.store(to + at, result, mask=allowed)
    if BROADCAST:
        count_and_signal_all(
            queues, tl.num_programs(0), peer_flags, rank, index, signals, tl.load(calls) + 1, stop, WORLD
        )


@triton.jit(do_not_specialize=["rank", "vectors"])
def receive_rows(
    out, finished, rank, vectors,
    WORLD: tl.constexpr, STRIPES: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy every peer's finished shard from the workspace to ``out``. ``finished`` and ``out`` are ``[WORLD, vectors *
    VECTOR]``. Neighbouring blocks copy different shards. ``STRIPES`` blocks copy a shard, each one of its interleaved
    stripes. Grid: ``(WORLD - 1) * STRIPES`` blocks."""
    source = (rank + 1 + tl.program_id(0) % (WORLD - 1)) % WORLD
    elements = vectors * VECTOR
    skipped = tl.cast(source, tl.int64) * vectors * VECTOR
    for start in range(tl.program_id(0) // (WORLD - 1) * BLOCK, elements, STRIPES * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(
            out + skipped + at,
            tl.load(finished + skipped + at, mask=at < elements, cache_modifier=".cg"),
            mask=at < elements,
        )
