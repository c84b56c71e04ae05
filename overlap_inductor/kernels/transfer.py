# SPDX-License-Identifier: Apache-2.0
"""Kernels that run beside matmuls and copies, or after them. They wait, signal, push rows to peers, or set results to
NaN (*spoil* them) after an abort. Schedule ``chunked`` launches them on its streams. Schedule ``fused`` launches some
of them if copy engines send a shard, or if a separate kernel ends the call.

A *part* is a band of rows of one shard. Part number ``u`` is part ``u % PARTS`` of the shard that comes from, or goes
to, the rank ``u // PARTS + 1`` steps away. Its flag is ``signal_flag(flags, source, index + u % PARTS)``: ``index`` is
the number of the flag of a shard's first part. A kernel for parts handles the parts from number ``first`` on.

Memory ordering. A signal follows its data on the same stream, or in the pushing block. Work on a stream begins when all
earlier work on the stream is complete and visible. A release at system scope is cumulative over this work, so whoever
acquires the flag sees the data (``signals``). When a waiting kernel has acquired the flag and has ended, later work on
its stream sees the data. The boundary between kernels also orders PTX's generic and async proxies, so this later work
may be a vendor's matmul.

Forward progress. All waits are bounded (``signals``). The schedule itself cannot deadlock:

* All ranks launch the steps of a schedule in one order, and in each step the sends before the waits.
* A wait is for what peers send in this step or in an earlier one. Credits depend only on the previous call.
* So the earliest unfinished step never waits for a later one, even if all streams share one hardware queue
  (``CUDA_DEVICE_MAX_CONNECTIONS=1``).
* In a send, a part waits only for its turn: until the receiver has got a part with a lower number, which another rank
  sends in this step.
* Waiting blocks never fill the GPU: each has one warp and no shared memory, and there is one for each part.

CUDA graphs. In a graph, sends, waits for peers and waits for turns are three branches without an order between them. So
a captured graph needs three hardware queues, or two if copies take no turns (``runtime.replay``,
``transports.copy_engine``). A user who captures a graph must provide them.
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
"""``NOBODY`` plus the number of a call is a number that no rank waits for."""


@triton.jit
def announce(calls, announced, stop):
    """Set ``announced`` to the value to which this call sets its flags. Copy engines copy ``announced`` into the flags.
    After an abort, set ``announced`` to a number that no rank waits for, because queued copies still run. Grid: one
    block."""
    tl.store(announced, tl.load(calls) + tl.where(may_store(stop), 1, NOBODY))


@triton.jit
def set_abort_words(stop):
    """After an abort, set the abort words that a kernel sets when it gives up (``signals``)."""
    addresses = stop.to(tl.pointer_type(tl.int64), bitcast=True)
    table = tl.load(addresses + 3).to(tl.pointer_type(tl.int64))
    # Without an abort the loop has no iterations. It contains no barrier, so it may run in only some of the threads.
    for number in range(tl.where(look(stop) == 0, 0, tl.load(stop + 1))):
        tl.store(tl.load(table + number).to(tl.pointer_type(tl.int32)), 1)


@triton.jit(do_not_specialize=["rank", "site"])
def wait_for_credits(flags, calls, announced, stop, patience, site, rank, WORLD: tl.constexpr):
    """Wait until every peer has finished the calls before this one, then ``announce``. Grid: one block.

    This kernel is launched on the stream of the matmuls. If it were launched on another stream, a vendor's kernel that
    occupies the SMs could delay it.

    The wait may end without a credit: if this rank's patience is over, or if the group has been aborted. Then this
    kernel sets the abort words that a kernel sets when it gives up (``signals``). It does so before any later copy
    starts (``spoil``).
    """
    call = tl.load(calls)
    for step in range(1, WORLD):
        peer = _peer(rank, step, WORLD)
        wait_at_least(credit_flag(flags, peer), call, stop, patience, site * WAIT_KINDS + WAIT_CREDIT, peer)
    announce(calls, announced, stop)
    set_abort_words(stop)


@triton.jit
def _spoil(result, words, aborted, BLOCK: tl.constexpr):
    to = result.to(tl.pointer_type(tl.int32), bitcast=True)
    limit = tl.where(aborted == 0, 0, words)
    for start in range(tl.program_id(0) * BLOCK, limit, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.full((BLOCK,), -1, tl.int32), mask=at < words)


@triton.jit
def spoil(result, words, stop, BLOCK: tl.constexpr):
    """If the group has been aborted, set ``result`` to NaN, in every float format. ``words``: the size of ``result`` in
    words of 4 bytes. Grid: any number of blocks, on the stream after everything that reads the workspace.

    ``spoil`` is for vendors' matmuls and copies, which do not look at the abort word. ``spoil`` also covers rows that a
    peer overwrote too early. A peer without a credit copies only after its ``wait_for_credits`` has set this rank's
    abort word. So after a read of such a row, ``spoil`` finds the word set.
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
    """``signals.end_call``, and ``spoil`` of the call's results (``None``: no result). Grid: one block."""
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
    """Wait until parts ``first, first + 1, ...`` of this call have arrived. Part ``u`` comes from the rank ``DIRECTION
    * (u // PARTS + 1)`` steps away. ``KIND``: the kind of wait, for the fault record. Grid: one block per part."""
    part = first + tl.program_id(0)
    source = _peer(rank, DIRECTION * (part // PARTS + 1), WORLD)
    flag = signal_flag(flags, source, index + part % PARTS, signals, WORLD)
    wait_at_least(flag, tl.load(calls) + 1, stop, patience, site * WAIT_KINDS + KIND, source)


@triton.jit(do_not_specialize=["site", "receiver", "sender", "index", "signals"])
def wait_for_turn(peer_flags, calls, stop, patience, site, receiver, sender, index, signals, WORLD: tl.constexpr):
    """Wait until ``receiver`` has got part ``index`` of this call from ``sender``, so that two ranks do not send to one
    receiver at the same time (``transports.copy_engine``). The flag is read in the receiver's memory, and no data are
    read after the wait. Grid: one block."""
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
    """Store parts ``first .. first + count - 1`` into the peers' workspace, one after the other, and signal each part
    when it is stored. The blocks share the ``PIECES`` pieces of a part. Grid: any number of blocks.

    Args:
        source: any 16-byte aligned tensor, read as int32 words. From ``origin`` on it holds the shard that goes to
            every rank. With ``SCATTERED`` it holds a shard for each rank, in the order of ranks.
        shard_vectors, part_vectors, origin, base: in vectors of 16 bytes. The shard goes to ``base + rank *
            shard_vectors`` of the receiver's workspace.
        queues: word ``QUEUE_WORDS + peer * signals + index + part`` counts the stored pieces of a part. The word is
            zero before and after the kernel.
    """
    call = tl.load(calls)
    words = source.to(tl.pointer_type(tl.int32), bitcast=True)
    # Sizes are multiples of four words, so the compiler knows that masks end between vectors.
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
        # After an abort, nothing is stored: the wait for credits may have ended without them.
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
