# SPDX-License-Identifier: Apache-2.0
"""Transport ``sm_push`` inside the all-gather kernels of schedule ``fused``: blocks of the kernel itself store a shard
into every peer's workspace. For an all-to-all (``SCATTERED``), each peer gets a shard of its own.

A block stores to peers several times as fast as it loads from them. The shard is cut into parts and a part into pieces,
which blocks claim from a queue. A part (in ``push_slice``: a slice of a part) is signalled when its last piece is
stored.

Memory ordering: ordinary stores, then ``count_and_signal``. Forward progress: a piece waits only for the peer's credit,
which depends only on the previous call. CUDA graphs: as in ``kernels``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.signals import QUEUE_WORDS
from overlap_inductor.kernels.signals import WAIT_CREDIT
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import count_and_signal
from overlap_inductor.kernels.signals import credit_flag
from overlap_inductor.kernels.signals import has_come
from overlap_inductor.kernels.signals import may_store
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import wait_at_least


@triton.jit
def push_piece(
    words,
    peer_data,
    peer_flags,
    flags,
    queues,
    call,
    shard_words,
    part_words,
    rank,
    site,
    stop,
    patience,
    signals,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    SCATTERED: tl.constexpr,
):
    """Claim one piece of this rank's shard for one receiver, and store the piece in the receiver's workspace. Returns
    whether there was a piece to claim.

    Args: see ``kernels`` for those not listed.
        words: the shard as int32 ``[shard_words]``, aligned to 16 bytes. It goes to word ``rank * shard_words`` of the
            receiver's workspace. With ``SCATTERED``: a shard for each rank, in the order of ranks.
        queues: word 0 counts claims. Words ``QUEUE_WORDS + peer * PARTS + part`` count stored pieces.
        part_words, PIECES: words and pieces of a part.
        BLOCK: words that are stored at once.
        KEEP: this rank is a receiver, too.
    """
    i = tl.atomic_add(queues, 1, sem="relaxed")
    # With KEEP, this rank is the last receiver.
    RECEIVERS: tl.constexpr = WORLD if KEEP else WORLD - 1
    there = i < PARTS * PIECES * RECEIVERS
    if there:
        part = i // (PIECES * RECEIVERS)
        rest = i % (PIECES * RECEIVERS)
        # Peer ``rank - 1`` gets each part first, because this peer multiplies this rank's part before the same part of
        # its other peers (``tile_order.arriving``).
        peer = (rank + WORLD - 1 - rest // PIECES) % WORLD
        piece = rest % PIECES
        if peer != rank:
            wait_at_least(credit_flag(flags, peer), call, stop, patience, site * WAIT_KINDS + WAIT_CREDIT, peer)
        end = tl.minimum((part + 1) * part_words, shard_words)
        size = tl.cdiv(tl.cdiv(part_words, PIECES), BLOCK) * BLOCK
        first = part * part_words + piece * size
        last = tl.minimum(first + size, end)
        to = (
            tl.multiple_of(tl.load(peer_data + peer).to(tl.pointer_type(tl.int32)), 16)
            + tl.cast(rank, tl.int64) * shard_words
        )
        shard = words + (tl.cast(peer, tl.int64) * shard_words if SCATTERED else 0)
        # After an abort, nothing is stored, because the wait may have ended without the credit.
        limit = tl.where(may_store(stop), last, first)
        for start in range(first, last, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(to + at, tl.load(shard + at, mask=at < limit), mask=at < limit)
        flag = tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32))
        count_and_signal(
            queues + QUEUE_WORDS + peer * PARTS + part,
            PIECES,
            signal_flag(flag, rank, part, signals, WORLD),
            call + 1,
            stop,
        )
    return there


@triton.jit
def push_until(
    flag, target, words, peer_data, peer_flags, flags, queues, call, shard_words, part_words, rank, site, stop,
    patience, signals,
    WORLD: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
    SCATTERED: tl.constexpr,
):  # fmt: skip
    """Push pieces until ``flag`` has reached ``target`` or no piece is left. The caller must still wait for the flag.
    The other arguments are those of ``push_piece``."""
    sending = not has_come(flag, target)
    while sending:
        sent = push_piece(
            words, peer_data, peer_flags, flags, queues, call, shard_words, part_words, rank, site, stop, patience,
            signals, WORLD, PARTS, PIECES, BLOCK, KEEP, SCATTERED,
        )  # fmt: skip
        sending = sent and not has_come(flag, target)


@triton.jit
def push_slice(
    words,
    peer_data,
    peer_flags,
    flags,
    queues,
    call,
    rows,
    row_words,
    part_rows,
    slice_words,
    rank,
    site,
    stop,
    patience,
    signals,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEP: tl.constexpr,
    SCATTERED: tl.constexpr,
):
    """As ``push_piece``, but a part is sent in slices of its columns. Blocks claim a slice's pieces for all receivers,
    then those of the next slice. So a receiver's matmul can begin with the first columns.

    The shard is ``[rows, row_words]``. A slice of a part is ``part_rows`` rows of ``slice_words`` words, in ``PIECES``
    pieces of rows, stored ``[ROWS, COLUMNS]`` words at a time. Its flag at the receiver is ``signal_flag(flags, rank,
    part * SLICES + slice)``. Word ``QUEUE_WORDS + (peer * PARTS + part) * SLICES + slice`` of ``queues`` counts its
    stored pieces.
    """
    i = tl.atomic_add(queues, 1, sem="relaxed")
    RECEIVERS: tl.constexpr = WORLD if KEEP else WORLD - 1
    there = i < PARTS * SLICES * PIECES * RECEIVERS
    if there:
        index = i // (PIECES * RECEIVERS)
        rest = i % (PIECES * RECEIVERS)
        peer = (rank + WORLD - 1 - rest // PIECES) % WORLD
        if peer != rank:
            wait_at_least(credit_flag(flags, peer), call, stop, patience, site * WAIT_KINDS + WAIT_CREDIT, peer)
        begin = index // SLICES * part_rows
        size = tl.cdiv(tl.cdiv(part_rows, PIECES), ROWS) * ROWS
        first = begin + rest % PIECES * size
        last = tl.minimum(first + size, tl.minimum(begin + part_rows, rows))
        left = index % SLICES * slice_words
        right = tl.minimum(left + slice_words, row_words)
        to = (
            tl.multiple_of(tl.load(peer_data + peer).to(tl.pointer_type(tl.int32)), 16)
            + tl.cast(rank, tl.int64) * rows * row_words
        )
        shard = words + (tl.cast(peer, tl.int64) * rows * row_words if SCATTERED else 0)
        # After an abort, nothing is stored, because the wait may have ended without the credit.
        limit = tl.where(may_store(stop), last, first)
        for row in range(first, last, ROWS):
            at_row = row + tl.arange(0, ROWS)
            for column in range(left, right, COLUMNS):
                at_column = column + tl.arange(0, COLUMNS)
                at = at_row[:, None].to(tl.int64) * row_words + at_column[None, :]
                inside = (at_row < limit)[:, None] & (at_column < right)[None, :]
                tl.store(to + at, tl.load(shard + at, mask=inside), mask=inside)
        flag = tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32))
        counter = queues + QUEUE_WORDS + peer * PARTS * SLICES + index
        count_and_signal(counter, PIECES, signal_flag(flag, rank, index, signals, WORLD), call + 1, stop)
    return there
