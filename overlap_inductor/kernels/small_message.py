# SPDX-License-Identifier: Apache-2.0
"""Schedule ``small_message``, transport ``sm_push``: the all-reduce of a small matmul's result, in one kernel. With
``NORM``, the kernel also computes the residual add and the RMSNorm that follow.

* One-shot: every rank stores its rows into every peer's workspace, and sums the rows of all ranks.
* Two-shot: rank ``m % WORLD`` owns row ``m``. The owner gets all partial rows, sums them, and stores the sum into every
  peer's workspace.

Sums are in fp32, in the order of the ranks, rounded once. So all ranks get the same bits.

A block has one *unit*, a segment of columns. In one-shot, a unit is a segment of one row. In two-shot, a unit is a
segment of a group of ``WORLD`` rows, one row of each owner. A norm needs whole rows. In one-shot, the block of a row's
last segment computes the norm of the row. In two-shot, the blocks of a group compute the norms of the previous
group. One more group of blocks computes the norms of the last group.

Forward progress. One resident block on each rank is enough, if blocks start in the order of their numbers:

* A block stores its partial rows before it waits.
* A block waits only for blocks with its own number or a lower one. Before it stores a sum, it waits only for partial
  rows of blocks with its own number.
* Take the lowest number whose block has still to end on at least one rank. All blocks with lower numbers have ended.
  So the block with this number runs, or has ended, on each rank.
* So all blocks with this number store their partial rows, get their sums, and end.

CUDA does not promise this order of starts. GPUs keep it, and scans depend on it (Merrill and Garland, decoupled
look-back, 2016). If all blocks are resident at once, as in decode, the order does not matter.

Workspace. A *slot* is the part of the workspace that a call holds. Here it has two halves, so no credits are needed
(``runtime.arena.HALVES``). Call ``n`` writes into half ``n % 2``. When rank ``r`` begins call ``n``, no peer reads
this half any more:

* Call ``n - 1`` of ``r`` has ended, because the calls of a slot run one after the other.
* In call ``n - 1``, ``r`` has waited for a signal of each peer. So each peer had begun its call ``n - 1``.
* So each peer had ended its call ``n - 2``, the last call before ``n`` that reads half ``n % 2``.

Aborts (``signals``). A block looks at the abort word before it stores to peers, and after each wait. If the word is
set, the block stores and signals nothing more to peers, because they may still read the old data. Its sums become NaN.

Memory ordering: ordinary stores, ``signal_ranks`` (release), ``wait_for_all`` (acquire), ordinary loads that bypass L1.
CUDA graphs: as in ``kernels``. ``count_call`` increments ``calls``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.group_signals import signal_ranks
from overlap_inductor.kernels.group_signals import wait_for_all
from overlap_inductor.kernels.signals import FLAG_WORDS
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_PARTIALS
from overlap_inductor.kernels.signals import WAIT_RESULT
from overlap_inductor.kernels.signals import look
from overlap_inductor.kernels.signals import signal_flag


@triton.jit
def workspaces(peer_data, rank, like, WORLD: tl.constexpr):
    """The workspaces of ranks ``rank``, ``rank + 1``, ..., in this order. So neighbouring ranks send to different peers
    first."""
    found = ()
    for step in tl.static_range(WORLD):
        found = found + (tl.multiple_of(tl.load(peer_data + (rank + step) % WORLD).to(like.dtype), 16),)
    return found


@triton.jit
def flag_word(source, index, signals, WORLD: tl.constexpr):
    # Offset of ``signal_flag(flags, source, index, ...)`` from ``flags``, in int32 words.
    return (WORLD + source * signals + index) * FLAG_WORDS


@triton.jit
def count_call(calls, queues, call, SEM: tl.constexpr):
    """Count this block as done with ``calls``. The last block of the grid increments ``calls``. Called after a barrier
    that follows the block's reads of ``calls``.

    ``SEM``: ``acq_rel`` orders the read of ``calls`` before the add. ``relaxed`` is enough if the block has sent data
    to addresses that depend on the call's number, because the read of ``calls`` has then ended. Unlike ``acq_rel``, a
    relaxed add does not wait until the data have arrived.
    """
    if tl.atomic_add(queues, 1, sem=SEM, scope="gpu") == tl.num_programs(0) - 1:
        tl.store(queues, 0)
        tl.store(calls, call + 1)


@triton.jit
def _sum_of(own, came, stride, at, inside, rank, scale, looked, WORLD: tl.constexpr):
    """The sum of the ranks' elements ``at``, times ``scale``, in the collective's dtype. NaN if ``looked`` (what
    ``look`` returned) is not 0. This rank's elements are read from ``own``, those of source ``s`` from ``came + s *
    stride``."""
    parts = ()
    for s in tl.static_range(WORLD):
        base = tl.where(s == rank, own.to(tl.int64), (came + s * stride).to(tl.int64)).to(own.dtype)
        parts = parts + (tl.load(tl.multiple_of(base, 16) + at, mask=inside, other=0.0, cache_modifier=".cg"),)
    # All loads come first, so that their latencies overlap.
    total = parts[0].to(tl.float32)
    for s in tl.static_range(1, WORLD):
        total += parts[s].to(tl.float32)
    return (total * tl.where(looked == 0, scale, float("nan"))).to(own.dtype.element_ty)


@triton.jit
def finished_sum(sums, at, inside, looked):
    """An owner's sum, after the wait for it. NaN if ``looked`` (what ``look`` returned) is not 0."""
    found = tl.load(sums + at, mask=inside, other=0.0, cache_modifier=".cg")
    # A product takes fewer registers than a select.
    return (found.to(tl.float32) * tl.where(looked == 0, 1.0, float("nan"))).to(found.dtype)


@triton.jit
def _add_and_normalise(summed, kept, gain, normed, residual_out, offset, at, inside, columns, eps):
    """Compute one row: ``residual_out = summed + kept``, and its RMSNorm times ``gain`` into ``normed``. Values are
    rounded where a model that runs op by op rounds them."""
    added = (summed.to(tl.float32) + kept.to(tl.float32)).to(summed.dtype)
    tl.store(residual_out + offset + at, added, mask=inside)
    x = added.to(tl.float32)
    scaled = (x * tl.rsqrt(tl.sum(x * x) / columns + eps)).to(summed.dtype)
    tl.store(normed + offset + at, (scaled.to(tl.float32) * gain.to(tl.float32)).to(summed.dtype), mask=inside)


@triton.jit(do_not_specialize=["rank", "site", "rows", "eights", "signals"])
def one_shot(
    product, out, residual, residual_out, weight, staging, peer_data, peer_flags, flags, queues, calls, stop, patience,
    site, rank, rows, eights, half, signals, scale, eps,
    WORLD: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, ROW: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The one-shot all-reduce of ``product``. Grid: ``rows * SEGMENTS`` blocks of at least ``WORLD * SEGMENTS``
    threads.

    Args: see ``kernels`` for those not listed.
        product: this rank's partial result ``[rows, columns]``, fp16 or bf16. All tensors here are row-major and
            aligned to 16 bytes.
        eights: ``columns / 8``, so that the compiler sees that rows are whole 16-byte words.
        out: the sum over ranks ``[rows, columns]``; with ``NORM`` the normed rows.
        residual, residual_out: ``[rows, columns]``, the residual before and after the add; with ``NORM`` only.
        weight: ``[columns]``, the weight of the norm; with ``NORM`` only.
        staging: this rank's workspace, in two halves. A half holds the rows from each source, ``[WORLD, rows,
            columns]``.
        half: number of elements from the beginning of the first half to the beginning of the second.
        flags: ``signal_flag(s, u)`` is the flag of unit ``u`` from source ``s``.
        queues: one word: number of blocks that have read ``calls``.
        ROW: a power of two, at least ``columns``.
    """
    columns = eights * 8
    call = tl.load(calls)
    unit = tl.program_id(0)
    row = unit // SEGMENTS
    segment = unit % SEGMENTS
    at = segment * SEGMENT + tl.arange(0, SEGMENT)
    inside = at < columns
    offset = row.to(tl.int64) * columns
    mine = (call & 1).to(tl.int64) * half
    looked = look(stop)
    piece = tl.load(product + offset + at, mask=inside)
    to = workspaces(peer_data, rank, product, WORLD)
    for step in tl.static_range(1, WORLD):
        tl.store(to[step] + mine + rank.to(tl.int64) * rows * columns + offset + at, piece, mask=inside & (looked == 0))
    signal_ranks(peer_flags, flag_word(rank, unit, signals, WORLD), call + 1, rank, looked, WORLD)
    count_call(calls, queues, call, "relaxed")

    came = staging + mine + offset
    stride = rows.to(tl.int64) * columns
    code = site * WAIT_KINDS + WAIT_PARTIALS
    if NORM:
        if segment == SEGMENTS - 1:
            all_at = tl.arange(0, ROW)
            all_inside = all_at < columns
            kept = tl.load(residual + offset + all_at, mask=all_inside, other=0.0)
            gain = tl.load(weight + all_at, mask=all_inside, other=0.0)
            wait_for_all(
                signal_flag(flags, 0, row * SEGMENTS, signals, WORLD),
                call + 1,
                WORLD,
                SEGMENTS,
                signals * FLAG_WORDS,
                rank,
                stop,
                patience,
                code,
                0,
            )
            summed = _sum_of(product + offset, came, stride, all_at, all_inside, rank, scale, look(stop), WORLD)
            _add_and_normalise(summed, kept, gain, out, residual_out, offset, all_at, all_inside, columns, eps)
    else:
        wait_for_all(
            signal_flag(flags, 0, unit, signals, WORLD),
            call + 1,
            WORLD,
            1,
            signals * FLAG_WORDS,
            rank,
            stop,
            patience,
            code,
            0,
        )
        summed = _sum_of(product + offset, came, stride, at, inside, rank, scale, look(stop), WORLD)
        tl.store(out + offset + at, summed, mask=inside)


@triton.jit(do_not_specialize=["rank", "site", "rows", "eights", "signals"])
def two_shot(
    product, out, residual, residual_out, weight, staging, peer_data, peer_flags, flags, queues, calls, stop, patience,
    site, rank, rows, eights, half, signals, scale, eps,
    WORLD: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, ROW: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The two-shot all-reduce of ``product``. Grid: ``cdiv(rows, WORLD) * SEGMENTS`` blocks of at least ``max(WORLD,
    SEGMENTS)`` threads. With ``NORM`` there are ``SEGMENTS`` more blocks.

    Args: as ``one_shot``, except for these.
        staging: a half holds partial sums of the rank's own rows ``[WORLD, groups, columns]``, then the sums ``[rows,
            columns]``. ``groups`` is ``cdiv(rows, WORLD)``.
        flags: ``signal_flag(s, u)``: partial sums of unit ``u`` from source ``s``. ``signal_flag(s, units + u)``: sums
            of unit ``u`` from owner ``s``. ``units`` is the number of units.
    """
    columns = eights * 8
    call = tl.load(calls)
    unit = tl.program_id(0)
    group = unit // SEGMENTS
    segment = unit % SEGMENTS
    groups = tl.cdiv(rows, WORLD)
    units = groups * SEGMENTS
    at = segment * SEGMENT + tl.arange(0, SEGMENT)
    inside = at < columns
    own_row = group * WORLD + rank
    own_inside = inside & (own_row < rows)
    offset = own_row.to(tl.int64) * columns
    mine = (call & 1).to(tl.int64) * half
    stride = groups.to(tl.int64) * columns
    sums = mine + WORLD * stride
    if group < groups:
        looked = look(stop)
        to = workspaces(peer_data, rank, product, WORLD)
        pieces = ()
        for step in tl.static_range(1, WORLD):
            row = group * WORLD + (rank + step) % WORLD
            pieces = pieces + (tl.load(product + row.to(tl.int64) * columns + at, mask=inside & (row < rows)),)
        for step in tl.static_range(1, WORLD):
            there = inside & (group * WORLD + (rank + step) % WORLD < rows) & (looked == 0)
            tl.store(
                to[step] + mine + rank.to(tl.int64) * stride + group.to(tl.int64) * columns + at,
                pieces[step - 1],
                mask=there,
            )
        signal_ranks(peer_flags, flag_word(rank, unit, signals, WORLD), call + 1, rank, looked, WORLD)
        wait_for_all(
            signal_flag(flags, 0, unit, signals, WORLD),
            call + 1,
            WORLD,
            1,
            signals * FLAG_WORDS,
            rank,
            stop,
            patience,
            site * WAIT_KINDS + WAIT_PARTIALS,
            0,
        )
        came = staging + mine + group.to(tl.int64) * columns
        looked = look(stop)
        summed = _sum_of(product + offset, came, stride, at, own_inside, rank, scale, looked, WORLD)
        # With a norm, another block of this rank reads this rank's own sum from the workspace.
        for step in tl.static_range(0 if NORM else 1, WORLD):
            tl.store(to[step] + sums + offset + at, summed, mask=own_inside & (looked == 0))
        word = flag_word(rank, units + unit, signals, WORLD)
        signal_ranks(peer_flags, word, call + 1, -1 if NORM else rank, looked, WORLD)
        if not NORM:
            tl.store(out + offset + at, summed, mask=own_inside)
        count_call(calls, queues, call, "relaxed")
    else:
        tl.debug_barrier()
        count_call(calls, queues, call, "acq_rel")

    code = site * WAIT_KINDS + WAIT_RESULT
    if NORM:
        if group > 0:
            all_at = tl.arange(0, ROW)
            all_inside = all_at < columns
            gain = tl.load(weight + all_at, mask=all_inside, other=0.0)
            for owner in range(segment, WORLD, SEGMENTS):
                row = (group - 1) * WORLD + owner
                if row < rows:
                    offset = row.to(tl.int64) * columns
                    kept = tl.load(residual + offset + all_at, mask=all_inside, other=0.0)
                    wait_for_all(
                        signal_flag(flags, owner, units + (group - 1) * SEGMENTS, signals, WORLD),
                        call + 1,
                        1,
                        SEGMENTS,
                        0,
                        -1,
                        stop,
                        patience,
                        code,
                        owner,
                    )
                    summed = finished_sum(staging + sums + offset, all_at, all_inside, look(stop))
                    _add_and_normalise(summed, kept, gain, out, residual_out, offset, all_at, all_inside, columns, eps)
    else:
        wait_for_all(
            signal_flag(flags, 0, units + unit, signals, WORLD),
            call + 1,
            WORLD,
            1,
            signals * FLAG_WORDS,
            rank,
            stop,
            patience,
            code,
            0,
        )
        looked = look(stop)
        for step in tl.static_range(1, WORLD):
            row = group * WORLD + (rank + step) % WORLD
            offset = row.to(tl.int64) * columns
            there = inside & (row < rows)
            tl.store(out + offset + at, finished_sum(staging + sums + offset, at, there, looked), mask=there)
