# SPDX-License-Identifier: Apache-2.0
"""Ways in which SMs may push a shard to every peer, for ``bench.transfers``: by ordinary stores in stripes, and by bulk
copies through shared memory."""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.signals import add_flag
from overlap_inductor.kernels.signals import store_fence


@triton.jit
def push_striped(
    src,
    peer_data,
    peer_flags,
    offset,
    elements,
    rank,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Block ``b`` carries its stripe of every sub-chunk, and starts with peer ``rank + 1 + b``, so that a peer receives
    from all ranks alike.

    ``src`` (int32 ``[elements]``) to word ``offset`` of every peer's memory.

    ``peer_data``, ``peer_flags``: int64 ``[WORLD]`` addresses. Flag of part ``p``: word ``(rank * PARTS + p) * 32`` of
    the peer's flags. ``elements`` is a multiple of 4, and addresses of 16 bytes. Grid: ``[BLOCKS]``. Every flag counts
    up by ``BLOCKS`` a call.
    """
    block = tl.program_id(0)
    part_size = tl.cdiv(tl.cdiv(elements, PARTS), BLOCK) * BLOCK
    for part in range(PARTS):
        first = part * part_size
        last = tl.minimum(first + part_size, elements)
        for turn in range(WORLD - 1):
            peer = (rank + 1 + (block + turn) % (WORLD - 1)) % WORLD
            to = tl.load(peer_data + peer).to(tl.pointer_type(tl.int32)) + offset
            to = tl.multiple_of(to, 16)
            for start in range(first + block * BLOCK, last, BLOCKS * BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(to + at, tl.load(src + at, mask=at < last), mask=at < last)
            flag = tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32))
            add_flag(flag + (rank * PARTS + part) * 32, 1)


@triton.jit
def push_bulk(
    src,
    peer_data,
    peer_flags,
    offset,
    elements,
    rank,
    WORLD: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """As ``push_striped``, through shared memory by the bulk copy unit."""
    from_desc = tl.make_tensor_descriptor(src, [elements // C, C], [C, 1], [R, C])
    block = tl.program_id(0)
    for turn in range(WORLD - 1):
        peer = (rank + 1 + (block + turn) % (WORLD - 1)) % WORLD
        to = tl.load(peer_data + peer).to(tl.pointer_type(tl.int32)) + offset
        to_desc = tl.make_tensor_descriptor(to, [elements // C, C], [C, 1], [R, C])
        for row in tl.range(block * R, elements // C, BLOCKS * R, num_stages=3):
            to_desc.store([row, 0], from_desc.load([row, 0]))
        store_fence()
        flag = tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32))
        add_flag(flag + rank * 32, 1)
