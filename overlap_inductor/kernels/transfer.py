# SPDX-License-Identifier: Apache-2.0
"""Kernels that run beside matmuls and copies: waits, signals, and SMs that push. Schedule ``chunked`` launches them on
its streams, and so does ``fused`` if copy engines send a shard.

A *part* is a band of rows of one shard. Part number ``u`` belongs to the rank ``u // PARTS + 1`` steps away and is
number ``u % PARTS`` of that rank's shard. Each part has a flag of its own,
``signal_flag(flags, source, index + u % PARTS)``. A kernel for parts handles the parts from number ``first`` on.

Memory ordering. What a signal announces was written by earlier work on the same stream (a copy engine, or SMs), or by
the pushing block itself. Work on a stream begins when all earlier work on the stream is complete and visible. A block's
release at system scope is cumulative over this earlier work, so whoever acquires the flag sees the data (``signals``).
When a waiting kernel has acquired the flag and has ended, the next work on the stream sees the data. It sees them with
any unit, because the boundary between kernels orders the proxies. So a vendor's matmul may read what an earlier wait on
its stream waited for.

Forward progress. All ranks launch the steps of a schedule in the same order, and in each step the sends before the
waits. A wait is for what peers send in this step or in an earlier one. Credits depend only on the previous call. So the
earliest step that is unfinished anywhere never waits for a later one, even if all streams share one hardware queue
(``CUDA_DEVICE_MAX_CONNECTIONS=1``). Within a send, a part waits only for its turn: for a part of lower number in the
same send of another rank. A waiting block has one warp, and there is one waiting block per part, so waiting blocks
never fill the GPU. A waiting kernel takes no shared memory. An SM changes its split between L1 and shared memory only
when nothing runs there. So a kernel that needs shared memory may be unable to start on an SM where a waiting kernel
runs. It then starts on another SM. So the work on which a wait depends finds room. All waits are bounded (``signals``).

CUDA graphs. The number of the call is read from device memory (``calls``), which only the call's last kernel changes.
No argument changes from replay to replay. In a graph sends, waits for peers and waits for turns are three branches
without an order between them. So they need three hardware queues, or two if copies take no turns (``runtime.replay``,
``transports.copy_engine``). A user who captures a graph must make sure that there are enough queues. In tests, no such
graph has hung even with one queue (``tests.gpu.check_stress``, scenario ``graphs``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.signals import QUEUE_WORDS
from overlap_inductor.kernels.signals import WAIT_CREDIT
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_TURN
from overlap_inductor.kernels.signals import count_and_signal
from overlap_inductor.kernels.signals import credit_flag
from overlap_inductor.kernels.signals import finish_call
from overlap_inductor.kernels.signals import look
from overlap_inductor.kernels.signals import may_store
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import wait_at_least


@triton.jit
def _peer(rank, steps, WORLD: tl.constexpr):
    """The rank ``steps`` after ``rank``; ``-WORLD < steps < WORLD``."""
    return (rank + steps + WORLD) % WORLD


NOBODY = tl.constexpr(-(2**30))
"""``NOBODY`` plus the number of a call lies so far back that no rank waits for it."""


@triton.jit
def announce(calls, announced, stop):
    """Set ``announced`` to the number of the call, which copy engines copy into flags from then on. If a wait of the
    group was given up, set it to a number that no rank waits for in any call. This is needed because the copies of
    calls that are still queued run even then, and peers may wait for the numbers of these calls. Grid: one block."""
    tl.store(announced, tl.load(calls) + tl.where(may_store(stop), 1, NOBODY))


@triton.jit(do_not_specialize=["rank", "site"])
def wait_for_credits(flags, calls, announced, stop, patience, site, rank, WORLD: tl.constexpr):
    """Wait until every peer has finished the calls before this one. Grid: one block.

    This kernel is launched on the stream of the matmuls. On another stream it could run at the same time as a vendor's
    kernel that keeps an SM for all its tiles. Then this kernel would begin only when the vendor's kernel ends, or it
    would keep one of the vendor's blocks from beginning. (4 H200s, a gather of 8192 tokens, calls one after the other:
    in every second call this kernel began 240 us late, and so did the copies.)

    ``announced`` (one word): see ``announce``.

    The wait may end before a peer's credit has arrived: if this rank's patience is over, or if another rank has stopped
    this rank. Then this kernel sets the abort words of all ranks, because a rank that stopped this one may not have
    told the others yet. The words are set when the kernel ends, before any later copy starts (``spoil``).
    """
    call = tl.load(calls)
    for step in range(1, WORLD):
        peer = _peer(rank, step, WORLD)
        wait_at_least(credit_flag(flags, peer), call, stop, patience, site * WAIT_KINDS + WAIT_CREDIT, peer)
    announce(calls, announced, stop)
    addresses = stop.to(tl.pointer_type(tl.int64), bitcast=True)
    table = tl.load(addresses + 3).to(tl.pointer_type(tl.int64))
    # Without an abort the loop has no iterations. It contains no barrier, so it may run in only some of the threads.
    # The end of the kernel releases these stores.
    for number in range(tl.where(look(stop) == 0, 0, tl.load(stop + 1))):
        tl.store(tl.load(table + number).to(tl.pointer_type(tl.int32)), 1)


@triton.jit
def _spoil(result, words, aborted, BLOCK: tl.constexpr):
    to = result.to(tl.pointer_type(tl.int32), bitcast=True)
    limit = tl.where(aborted == 0, 0, words)
    for start in range(tl.program_id(0) * BLOCK, limit, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.full((BLOCK,), -1, tl.int32), mask=at < words)


@triton.jit
def spoil(result, words, stop, BLOCK: tl.constexpr):
    """Set ``result`` (``words`` of 4 bytes) to NaN, in every float format, if the group has been aborted. Grid: any
    number of blocks, on the stream after everything that reads the workspace.

    This kernel is for results of kernels and copies that look at no abort word themselves. Vendors' matmuls and copies
    run even after waits that were given up, and a replay of a CUDA graph cannot raise an error.

    The look at the abort word also protects the results from rows that were overwritten before they were read. A rank
    without a credit may overwrite rows of a call that is still running here, but only after it has set this rank's
    abort word. That rank's stores of the word are done when its ``wait_for_credits`` ends, and its copies start only
    then. So a call that has read such a row finds the word set when it looks later. Rows that were read before the word
    was set are right. If the word is set before the end of the call, the results of these rows become NaN, too: the
    group's results are not valid from then on.
    """
    _spoil(result, words, look(stop), BLOCK)


@triton.jit(do_not_specialize=["rank"])
def end_call_and_spoil(
    one,
    two,
    three,
    calls,
    peer_flags,
    rank,
    stop,
    words_of_one,
    words_of_two,
    words_of_three,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``signals.end_call`` and ``spoil`` of the call's results (``None``: no result). The look of ``spoil`` comes
    before the credits are given. Grid: one block."""
    aborted = look(stop)
    finish_call(calls, peer_flags, tl.load(calls), rank, stop, WORLD)
    if one is not None:
        _spoil(one, words_of_one, aborted, BLOCK)
    if two is not None:
        _spoil(two, words_of_two, aborted, BLOCK)
    if three is not None:
        _spoil(three, words_of_three, aborted, BLOCK)


@triton.jit(do_not_specialize=["rank", "site", "index", "first", "signals"])
def wait_for_parts(
    flags,
    calls,
    stop,
    patience,
    site,
    rank,
    index,
    first,
    signals,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    DIRECTION: tl.constexpr,
    KIND: tl.constexpr,
):
    """Wait until parts ``first, first + 1, ...`` of this call have arrived. Part ``u`` comes from the rank
    ``DIRECTION * (u // PARTS + 1)`` steps away. Grid: one block per part.

    ``flags``: this rank's. ``KIND``: the kind of wait, for the fault record.
    """
    part = first + tl.program_id(0)
    source = _peer(rank, DIRECTION * (part // PARTS + 1), WORLD)
    flag = signal_flag(flags, source, index + part % PARTS, signals, WORLD)
    wait_at_least(flag, tl.load(calls) + 1, stop, patience, site * WAIT_KINDS + KIND, source)


@triton.jit(do_not_specialize=["site", "receiver", "sender", "index", "signals"])
def wait_for_turn(peer_flags, calls, stop, patience, site, receiver, sender, index, signals, WORLD: tl.constexpr):
    """Wait until ``receiver`` has got part ``index`` of this call from ``sender``. The flag is in the receiver's
    memory, and is read there. Grid: one block.

    No data are read after this wait. The wait keeps two ranks from sending to the same rank at the same time
    (``transports.copy_engine``).
    """
    flag = tl.load(peer_flags + receiver).to(tl.pointer_type(tl.int32))
    wait_at_least(
        signal_flag(flag, sender, index, signals, WORLD),
        tl.load(calls) + 1,
        stop,
        patience,
        site * WAIT_KINDS + WAIT_TURN,
        sender,
    )


@triton.jit(
    do_not_specialize=["rank", "index", "first", "count", "signals", "shard_vectors", "part_vectors", "origin", "base"]
)
def push_parts(
    source, peer_data, peer_flags, queues, calls, stop,
    rank, index, first, count, signals, shard_vectors, part_vectors, origin, base,
    WORLD: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, DIRECTION: tl.constexpr, SCATTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store parts ``first .. first + count - 1`` into the peers' workspace, one after the other, and signal each when
    it has arrived. Grid: any number of blocks.

    Data are stored to peers, not loaded from them. By storing to a peer, a block moves several times as many bytes
    through NVLink as by loading from it. A part is cut into ``PIECES``, so that all blocks work on one part and it
    arrives soon. Pieces are assigned to blocks in turn, and no block waits for anything.

    Args:
        source: any 16-byte aligned tensor, read as int32 words. From ``origin`` on it holds the shard that goes to
            every rank, or with ``SCATTERED`` a shard for each rank, in the order of ranks.
        shard_vectors, part_vectors, origin, base: in vectors of 16 bytes. The shard goes to ``base + rank *
            shard_vectors`` of the receiver's workspace.
        queues: words ``QUEUE_WORDS + peer * signals + index + part`` count stored pieces; zero before and after.
    """
    call = tl.load(calls)
    words = source.to(tl.pointer_type(tl.int32), bitcast=True)
    # Sizes are written as multiples of four, so the compiler knows that masks end between vectors.
    shard_words = shard_vectors * 4
    part_words = part_vectors * 4
    size = tl.cdiv(tl.cdiv(part_words, PIECES), BLOCK) * BLOCK
    for turn in range(tl.program_id(0), count * PIECES, tl.num_programs(0)):
        number = first + turn // PIECES
        part = number % PARTS
        peer = _peer(rank, DIRECTION * (number // PARTS + 1), WORLD)
        begin = part * part_words + (turn % PIECES) * size
        end = tl.minimum(begin + size, tl.minimum((part + 1) * part_words, shard_words))
        start = words + (tl.cast(origin, tl.int64) + (tl.cast(peer, tl.int64) * shard_vectors if SCATTERED else 0)) * 4
        to = (
            tl.multiple_of(tl.load(peer_data + peer).to(tl.pointer_type(tl.int32)), 16)
            + (tl.cast(rank, tl.int64) * shard_vectors + base) * 4
        )
        # If the wait for credits, which ran before this kernel, was given up, nothing is stored.
        limit = tl.where(may_store(stop), end, begin)
        for chunk in range(begin, end, BLOCK):
            at = chunk + tl.arange(0, BLOCK)
            tl.store(to + at, tl.load(start + at, mask=at < limit), mask=at < limit)
        flag = tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32))
        count_and_signal(
            queues + QUEUE_WORDS + peer * signals + index + part,
            PIECES,
            signal_flag(flag, rank, index + part, signals, WORLD),
            call + 1,
            stop,
        )
