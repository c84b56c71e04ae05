"""Signals between GPUs: release, bounded wait, fault record.

A flag is one int32 in symmetric memory, alone in its 128 bytes. It only grows (modulo 2**32): a wait is for *at least* a value, so that a
signal that runs ahead is not lost.

Memory ordering (PTX memory model, section 8). A signal is ``bar.sync`` and then one thread's ``st.release.sys`` or ``red.release.sys``:
the barrier orders the block's stores before that thread's release, and release is cumulative, so whoever acquires the value sees them all.
A wait is one thread's ``ld.acquire.sys`` until the value is there and then ``bar.sync``: the block's later loads come after it. Both barriers
are written out, because Triton 3.6 puts none around atomics. This covers ordinary loads and stores. Loads and stores by the bulk copy unit
belong to another proxy: ``store_fence`` goes between bulk stores and their signal, ``load_fence`` between a wait and bulk loads.

What Triton makes of a descriptor's store, compiled for this GPU: the tile to shared memory, ``fence.proxy.async.shared::cta``, a barrier, one thread's bulk store,
``commit_group`` and, in 3.6 and 3.7, ``wait_group.read 0``: that shared memory has been read, not that anything is written. (3.8 and 3.9 wait for that, too.) No version puts
a fence of the proxies behind it, so that a release that follows orders none of it: ``store_fence`` waits for the group and has that fence. 3.9 makes a ``red`` of an atomic whose
result nobody reads, and puts a barrier of its own before every atomic.

Forward progress. A wait ends: with the value; with the group's abort word set; or when its patience is over, which it records and then sets
the abort word itself. After that every wait of the kernel returns at once and the kernel runs to its end, with data that the host rejects
because of the record. Nothing branches on the outcome, so no thread of a block is missing at a later barrier.

The abort word lies in the GPU's own memory, and only the record of a fault is written to the host's (``stop[2:4]`` holds its address). A waiting
block must not look at the host's memory: on an H100, 108 blocks that did so at every 64th turn made a matmul on the other 24 take 3700 us
instead of 75, and those that looked only at the GPU's memory, however often, cost it nothing.

CUDA graphs. Nothing here holds a value of the host: flags, targets and patience are arguments or memory that the kernel reads.

``TRITON_INTERPRET=1`` has no inline assembly and runs the blocks of a kernel one after the other: the twins at the end do the same with
atomics, and count turns for want of a clock: one for 1000 ns of patience.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels import layout

FLAG_WORDS = tl.constexpr(layout.FLAG_WORDS)
QUEUE_WORDS = tl.constexpr(layout.QUEUE_WORDS)
WAIT_KINDS = tl.constexpr(layout.WAIT_KINDS)
WAIT_CREDIT = tl.constexpr(layout.WAIT_CREDIT)
WAIT_PART = tl.constexpr(layout.WAIT_PART)
WAIT_PARTIALS = tl.constexpr(layout.WAIT_PARTIALS)
WAIT_RESULT = tl.constexpr(layout.WAIT_RESULT)
WAIT_TURN = tl.constexpr(layout.WAIT_TURN)
WAIT_TILES = tl.constexpr(layout.WAIT_TILES)

_WAIT = tl.constexpr("""
{
.reg .pred at_work, done, stopped, early, look;
.reg .s32 seen, ahead, abort;
.reg .u32 thread, turns;
.reg .u64 start, now, record;
mov.u32 thread, %tid.x;
setp.ne.u32 at_work, thread, 0;
@at_work bra LEAVE;
mov.u64 start, %globaltimer;
mov.u32 turns, 0;
AGAIN:
ld.acquire.sys.global.s32 seen, [$1];
sub.s32 ahead, seen, $2;
setp.ge.s32 done, ahead, 0;
@done bra LEAVE;
add.u32 turns, turns, 1;
and.b32 thread, turns, 63;
setp.ne.u32 look, thread, 0;
@look bra AGAIN;
ld.relaxed.sys.global.s32 abort, [$3];
setp.ne.s32 stopped, abort, 0;
@stopped bra LEAVE;
mov.u64 now, %globaltimer;
sub.u64 now, now, start;
setp.lt.u64 early, now, $4;
@early bra AGAIN;
ld.global.u64 record, [$3+8];
st.relaxed.sys.global.s32 [record+4], $5;
st.relaxed.sys.global.s32 [record+8], $6;
st.relaxed.sys.global.s32 [record+12], $2;
st.relaxed.sys.global.s32 [record+16], seen;
st.release.sys.global.s32 [record], 1;
st.relaxed.sys.global.s32 [$3], 1;
LEAVE:
mov.u32 $0, 0;
}
""")

_BY_ONE_THREAD = """
{
.reg .pred other;
.reg .u32 thread;
mov.u32 thread, %%tid.x;
setp.ne.u32 other, thread, 0;
@other bra LEAVE;
%s [$1], $2;
LEAVE:
mov.u32 $0, 0;
}
"""
_SET = tl.constexpr(_BY_ONE_THREAD % "st.release.sys.global.s32")
_ADD = tl.constexpr(_BY_ONE_THREAD % "red.release.sys.global.add.s32")


@triton.jit
def _wait_at_least(flag, target, stop, patience_ns, code, peer):
    tl.inline_asm_elementwise(_WAIT, "=r,l,r,l,l,r,r", [flag, target, stop, patience_ns, code, peer], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def _set_flag(flag, value):
    tl.debug_barrier()
    tl.inline_asm_elementwise(_SET, "=r,l,r", [flag, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _add_flag(flag, value):
    tl.debug_barrier()
    tl.inline_asm_elementwise(_ADD, "=r,l,r", [flag, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _store_fence():
    tl.inline_asm_elementwise(
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_fence():
    tl.inline_asm_elementwise("fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wait_twin(flag, target, stop, patience_ns, code, peer):
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    turns = 0
    while (seen - target < 0) & (tl.load(stop) == 0) & (turns < patience_ns // 1000):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        turns += 1
    if (seen - target < 0) & (tl.load(stop) == 0):
        record = tl.load((stop + 2).to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.int32))
        tl.store(record + 1, code)
        tl.store(record + 2, peer)
        tl.store(record + 3, target)
        tl.store(record + 4, seen)
        tl.store(record, 1)
        tl.store(stop, 1)


@triton.jit
def _set_twin(flag, value):
    tl.atomic_xchg(flag, value, sem="release", scope="sys")


@triton.jit
def _add_twin(flag, value):
    tl.atomic_add(flag, value, sem="release", scope="sys")


@triton.jit
def _no_fence():
    pass


@triton.jit
def credit_flag(flags, peer):
    """Where ``peer`` says how many calls of the slot it has finished. ``flags``: the flags of whoever reads it."""
    return flags + peer * FLAG_WORDS


@triton.jit
def signal_flag(flags, source, index, signals, WORLD: tl.constexpr):
    """Where ``source`` says for which call its part ``index`` has come, of ``signals`` a source."""
    return flags + (WORLD + source * signals + index) * FLAG_WORDS


@triton.jit
def has_come(flag, target):
    """Whether a flag has reached ``target``, the same answer for all threads of the block: an atomic's result is handed round, while a load is each
    thread's own, and threads that read it at different moments would part before a barrier. No ordering: whoever uses the data waits for the flag."""
    return tl.atomic_add(flag, 0, sem="relaxed", scope="sys") - target >= 0


@triton.jit
def may_store(stop):
    """Whether no wait of the group has been given up, for the masks of what is stored to peers: a rank that gave up waiting for leave has none. Each
    thread looks for itself, behind the wait's barrier: no branch may rest on it."""
    return tl.load(stop, cache_modifier=".cg") == 0


@triton.jit
def count_and_signal(counter, target, flag, value, stop):
    """One of ``target`` pieces is stored: the last one to be counted sets the peer's ``flag`` and clears ``counter`` (this GPU's own memory). Nothing is signalled
    once the group's abort word is set: what was to be stored may not have been.

    Ordering: the block's stores, a barrier, one thread's acquire-release add at GPU scope; whoever adds last has acquired all adds before,
    and its release at system scope is cumulative over them.
    """
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == target - 1:
        tl.store(counter, 0)
        if tl.atomic_add(stop, 0, sem="relaxed", scope="gpu") == 0:
            set_flag(flag, value)


if triton.knobs.runtime.interpret:
    wait_at_least, set_flag, add_flag, store_fence, load_fence = _wait_twin, _set_twin, _add_twin, _no_fence, _no_fence
else:
    wait_at_least, set_flag, add_flag, store_fence, load_fence = _wait_at_least, _set_flag, _add_flag, _store_fence, _load_fence


@triton.jit
def count_and_signal_all(counter, target, peer_flags, rank, index, signals, value, stop, WORLD: tl.constexpr):
    """As ``count_and_signal``, of flag ``index`` of this rank at every peer (``signal_flag``); ``peer_flags``: int64 ``[WORLD]``, the addresses of their flags."""
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == target - 1:
        tl.store(counter, 0)
        if tl.atomic_add(stop, 0, sem="relaxed", scope="gpu") == 0:
            for step in range(1, WORLD):
                flag = tl.load(peer_flags + (rank + step) % WORLD).to(tl.pointer_type(tl.int32))
                set_flag(signal_flag(flag, rank, index, signals, WORLD), value)


@triton.jit
def finish_call(calls, peer_flags, call, rank, WORLD: tl.constexpr):
    """Count the call, and let every peer write into this rank's workspace again. Run by one block, when nothing reads the workspace any more."""
    tl.store(calls, call + 1)
    for step in range(1, WORLD):
        flag = tl.load(peer_flags + (rank + step) % WORLD).to(tl.pointer_type(tl.int32))
        set_flag(credit_flag(flag, rank), call + 1)


@triton.jit(do_not_specialize=["rank"])
def end_call(calls, peer_flags, rank, WORLD: tl.constexpr):
    """``finish_call`` as a launch of its own, on the stream behind everything that reads the workspace of a call. Grid: one block."""
    finish_call(calls, peer_flags, tl.load(calls), rank, WORLD)
