"""Transport ``sm_push``: a few SMs store a shard into every peer's memory.

Stores, not loads: a thread block gets several times the bytes through NVLink by storing to a peer than by loading from it.

Order. Block ``b`` starts with peer ``rank + 1 + b`` and goes round, so that at any time the blocks of a rank store to different peers and a
peer receives from all ranks alike. Every block carries its stripe of each sub-chunk, sub-chunk by sub-chunk.

Memory ordering: ordinary stores, then ``add_flag`` on the peer's counter of (source, sub-chunk): see ``signals``. A counter is complete at
``epoch * blocks``, because every block adds one to each.

Forward progress: the kernel waits for nothing but, where ``credits`` is asked for, the peer's word that its memory may be written; the peer
gave it at the end of its last use of that memory. CUDA graphs: ``epoch`` is read from device memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.signals import add_flag


@triton.jit
def push_to_peers(src, peer_data, peer_flags, offset, elements, rank, WORLD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """``src`` (int32 ``[elements]``) to word ``offset`` of every peer's memory.

    ``peer_data``, ``peer_flags``: int64 ``[WORLD]`` addresses. Flag of part ``p``: word ``(rank * PARTS + p) * 32`` of the peer's flags.
    ``elements`` is a multiple of 4, and addresses of 16 bytes. Grid: ``[BLOCKS]``.
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
