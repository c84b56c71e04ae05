# SPDX-License-Identifier: Apache-2.0
"""Two kernels of ``bench.transfers`` that push a shard to every peer. One uses ordinary stores, the other bulk copies
through shared memory."""

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
    """Store ``src`` to word ``offset`` of every peer's memory, in ``PARTS`` parts with a flag for each part.

    A part is divided into runs of ``BLOCK`` words, and each thread block stores every ``BLOCKS``-th run. Neighbouring
    thread blocks start with different peers, so that all peers receive at the same time. Grid: ``[BLOCKS]``.

    Args:
        src: int32 ``[elements]``.
        peer_data, peer_flags: int64 ``[WORLD]``, the addresses of every rank's data and flags (int32 words).
        offset: in words. The address at ``offset`` in each rank's data is a multiple of 16 bytes.
        elements: the number of words, a multiple of 4.
        rank: the sender's rank. A call adds ``BLOCKS`` to word ``(rank * PARTS + p) * 32`` of a peer's flags, the flag
            of part ``p``.
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
    """Do what ``push_striped`` does with ``PARTS=1``. The bulk copy unit copies the words through ``[R, C]`` tiles in
    shared memory. ``elements`` is a multiple of ``C``."""
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
