# SPDX-License-Identifier: Apache-2.0
"""Copy out of the workspace what the peers have sent. The callers are kernels of schedule ``fused`` that also send.

What one peer sends fills a *slot*. A slot is cut into parts, and a part into pieces, which blocks claim from a queue.

Memory ordering: the block waits for the part's flag by an acquire, a barrier follows, and the block's loads bypass L1.

Forward progress: a block claims a piece here only when running blocks have claimed everything that its rank sends. The
block has also counted the stores that it made at peers. (A peer is signalled when all stores of a part are counted.) So
no peer waits for this block while this block waits for a peer.

CUDA graphs: as in ``kernels``. After an abort, copied words become -1, which is NaN in every float format.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_RESULT
from overlap_inductor.kernels.signals import has_come
from overlap_inductor.kernels.signals import look
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import wait_at_least


@triton.jit
def _part_of(i, rank, copies, WORLD: tl.constexpr):
    """``(source, part)`` of piece ``i``. Part 0 of all peers comes first. Within a part, peers come in the order in
    which they store to this rank."""
    whole = (WORLD - 1) * copies
    return (rank + WORLD - 1 - i % whole // copies) % WORLD, i // whole


@triton.jit
def may_receive(queue, flags, call, rank, signals, parts, copies, WORLD: tl.constexpr):
    """Whether a piece is left and the next piece's part has arrived. Another block may claim that piece first."""
    i = tl.atomic_add(queue, 0, sem="relaxed")
    left = i < (WORLD - 1) * parts * copies
    source, part = _part_of(tl.where(left, i, 0), rank, copies, WORLD)
    return left & has_come(signal_flag(flags, source, part, signals, WORLD), call + 1)


@triton.jit
def receive_piece(
    result, staging, queue, flags, call, stop, patience, site, rank, signals,
    parts, copies, slot_words, staged_words, part_words,
    WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Claim one piece, wait for its part and copy it. Returns whether a piece was left.

    Args:
        result: int32 words of the result: slots of ``slot_words`` words, in the order of ranks.
        staging: int32 words of this rank's workspace: slots of ``staged_words`` words. ``staged_words`` is at
            least ``slot_words``.
        queue: the word that counts claimed pieces.
        parts, part_words: number of parts of a slot, and number of words of a part. The last part may be shorter.
        copies: number of pieces of a part.
        BLOCK: words that are copied at once.
    """
    i = tl.atomic_add(queue, 1, sem="relaxed")
    there = i < (WORLD - 1) * parts * copies
    if there:
        source, part = _part_of(i, rank, copies, WORLD)
        flag = signal_flag(flags, source, part, signals, WORLD)
        wait_at_least(flag, call + 1, stop, patience, site * WAIT_KINDS + WAIT_RESULT, source)
        aborted = look(stop)
        came = staging + tl.cast(source, tl.int64) * staged_words
        to = result + tl.cast(source, tl.int64) * slot_words
        size = tl.cdiv(tl.cdiv(part_words, copies), BLOCK) * BLOCK
        first = part * part_words + i % copies * size
        last = tl.minimum(first + size, tl.minimum((part + 1) * part_words, slot_words))
        for start in range(first, last, BLOCK):
            at = start + tl.arange(0, BLOCK)
            words = tl.load(came + at, mask=at < last, cache_modifier=".cg")
            tl.store(to + at, tl.where(aborted == 0, words, -1), mask=at < last)
    return there
