# SPDX-License-Identifier: Apache-2.0
"""Signals between GPUs: how a kernel signals a peer, waits for a signal for a bounded time, and records a fault.

A flag is one int32 in symmetric memory, with 128 bytes to itself. Until an abort, a flag only grows (modulo 2**32). A
kernel waits until a flag has ``reached`` a target. The value may be beyond the target, if the peer is one call ahead.

Memory ordering (PTX memory model, section 8).

* A signal is ``bar.sync``, then one thread's ``st.release.sys`` or ``red.release.sys``. The barrier orders the block's
  stores before the release. Release is cumulative, so a thread that acquires the value sees all of these stores.
* A wait is one thread's ``ld.acquire.sys``, repeated until the value is there, then ``bar.sync``. The block's later
  loads come after the barrier. (Triton 3.6 puts no barriers around atomics, so the barriers are explicit here.)
* Bulk loads and stores belong to another proxy, which barriers and releases do not order. So ``store_fence`` goes
  between bulk stores and their signal, and ``load_fence`` goes between a wait and bulk loads.
* After a descriptor's bulk store, Triton puts no proxy fence, and some versions do not wait until the tile is written.
  ``store_fence`` waits, and puts the fence.

Forward progress. A wait ends when the value is there, when the rank's abort word is set, or when its patience is over.
A thread whose patience is over gives up:

1. It sets its rank's abort word by compare-and-swap. Only the first thread of the rank finds zero there and goes on.
2. It writes the rank's record on the group's board (memory of the host, ``runtime.board``). It marks on the board that
   there is a record.
3. It sets the abort words of the other ranks, unless each rank has a board of its own.

The thread takes the steps in this order, steps 2 and 3 by releases. So a rank that is stopped by a peer finds the
peer's record. After the abort, waits of the stopped ranks return at once, and kernels run to their ends. The host finds
the record and rejects the results of these kernels. No barrier is inside a branch on the outcome of a wait.

Aborts. After an abort, a rank's kernels do not store to peers and do not signal them. The exception is a kernel that
looked at the abort word before the abort, and not since. (For copy engines, see ``transports.copy_engine``.)

* A kernel looks at the abort word (``look``) after each wait on which its results or signals depend. If it stores to
  peers without a wait of its own, it looks before it stores.
* A wait that is given up sets the word before its barrier. So all threads of the block see the word set.
* A thread that signals for its block looks at the abort word later than the other threads (``count_and_signal``), or
  learns whether any thread saw the word set (``group_signals.signal_ranks``). So if another thread of the block left
  out its stores, this thread does not signal.

The abort word is in the GPU's own memory, because a waiting block must not read the host's memory. On an H100, 108
blocks that did so slowed a matmul on other SMs from 75 us to 3700 us.

CUDA graphs. Values of flags depend on the number of the call. Kernels read this number from device memory, because a
replay runs a kernel with the arguments of the capture.

Triton's interpreter (``TRITON_INTERPRET=1``) has no inline assembly. For it, this module has twins (``_wait_twin`` ...)
that use atomics. In their waits, one iteration counts as 1000 ns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels import layout

FLAG_WORDS = tl.constexpr(layout.FLAG_WORDS)
WINDOW = tl.constexpr(layout.WINDOW)
FAULT_WORDS = tl.constexpr(layout.FAULT_WORDS)
QUEUE_WORDS = tl.constexpr(layout.QUEUE_WORDS)
WAIT_KINDS = tl.constexpr(layout.WAIT_KINDS)
WAIT_CREDIT = tl.constexpr(layout.WAIT_CREDIT)
WAIT_PART = tl.constexpr(layout.WAIT_PART)
WAIT_PARTIALS = tl.constexpr(layout.WAIT_PARTIALS)
WAIT_RESULT = tl.constexpr(layout.WAIT_RESULT)
WAIT_TURN = tl.constexpr(layout.WAIT_TURN)
WAIT_TILES = tl.constexpr(layout.WAIT_TILES)


def give_up(stop: str, code: str, peer: str, target: str) -> str:
    """Assembly that a thread runs when its patience is over. The arguments name operands. The caller puts the label
    ``LEAVE`` after this assembly, and declares the registers and predicates."""
    return f"""
atom.relaxed.sys.global.cas.b32 abort, [{stop}], 0, 1;
setp.ne.s32 stopped, abort, 0;
@stopped bra LEAVE;
ld.global.u64 start, [{stop}+8];
mov.u64 now, %globaltimer;
st.relaxed.sys.global.s32 [start+4], {code};
st.relaxed.sys.global.s32 [start+8], {peer};
st.relaxed.sys.global.s32 [start+12], {target};
st.relaxed.sys.global.s32 [start+16], seen;
st.relaxed.sys.global.u64 [start+24], now;
st.release.sys.global.s32 [start], 1;
ld.global.u64 start, [{stop}+16];
st.release.sys.global.s32 [start], 1;
ld.global.u64 start, [{stop}+24];
ld.global.u32 turns, [{stop}+4];
TELL:
ld.global.u64 now, [start];
st.release.sys.global.s32 [now], 1;
add.u64 start, start, 8;
sub.u32 turns, turns, 1;
setp.ne.u32 early, turns, 0;
@early bra TELL;
"""


_WAIT = tl.constexpr(f"""
{{
.reg .pred at_work, done, stopped, early, looks;
.reg .s32 seen, abort;
.reg .u32 ahead, thread, turns;
.reg .u64 start, now;
mov.u32 thread, %tid.x;
setp.ne.u32 at_work, thread, 0;
@at_work bra LEAVE;
mov.u64 start, %globaltimer;
mov.u32 turns, 0;
AGAIN:
ld.acquire.sys.global.s32 seen, [$1];
sub.s32 ahead, seen, $2;
setp.lt.u32 done, ahead, {layout.WINDOW};
@done bra LEAVE;
add.u32 turns, turns, 1;
and.b32 thread, turns, 63;
setp.ne.u32 looks, thread, 0;
@looks bra AGAIN;
ld.relaxed.sys.global.s32 abort, [$3];
setp.ne.s32 stopped, abort, 0;
@stopped bra LEAVE;
mov.u64 now, %globaltimer;
sub.u64 now, now, start;
setp.lt.u64 early, now, $4;
@early bra AGAIN;
{give_up("$3", "$5", "$6", "$2")}
LEAVE:
mov.u32 $0, 0;
}}
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
_SIGNAL = tl.constexpr(_BY_ONE_THREAD % "setp.ne.s32 other, $3, 0;\n@other bra LEAVE;\nst.release.sys.global.s32")
_ADD = tl.constexpr(_BY_ONE_THREAD % "red.release.sys.global.add.s32")


@triton.jit
def _wait_at_least(flag, target, stop, patience_ns, code, peer):
    tl.inline_asm_elementwise(
        _WAIT, "=r,l,r,l,l,r,r", [flag, target, stop, patience_ns, code, peer], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@triton.jit
def _set_flag(flag, value):
    tl.debug_barrier()
    tl.inline_asm_elementwise(_SET, "=r,l,r", [flag, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _signal(flag, value, looked):
    tl.debug_barrier()
    tl.inline_asm_elementwise(_SIGNAL, "=r,l,r,r", [flag, value, looked], dtype=tl.int32, is_pure=False, pack=1)


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
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def reached(seen, target):
    """True if ``seen`` equals ``target``, or is ahead of it by less than ``WINDOW`` (modulo 2**32)."""
    return tl.cast(seen - target, tl.uint32, bitcast=True) < WINDOW


@triton.jit
def _wait_twin(flag, target, stop, patience_ns, code, peer):
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    turns = 0
    while (not reached(seen, target)) & (tl.load(stop) == 0) & (turns < patience_ns // 1000):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        turns += 1
    if not reached(seen, target):
        if tl.atomic_cas(stop, 0, 1, sem="relaxed", scope="sys") == 0:
            addresses = stop.to(tl.pointer_type(tl.int64))
            record = tl.load(addresses + 1).to(tl.pointer_type(tl.int32))
            tl.store(record + 1, code)
            tl.store(record + 2, peer)
            tl.store(record + 3, target)
            tl.store(record + 4, seen)
            tl.atomic_xchg(record, 1, sem="release", scope="sys")
            tl.atomic_xchg(tl.load(addresses + 2).to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")
            table = tl.load(addresses + 3).to(tl.pointer_type(tl.int64))
            for rank in range(tl.load(stop + 1)):
                tl.atomic_xchg(tl.load(table + rank).to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")


@triton.jit
def _set_twin(flag, value):
    tl.atomic_xchg(flag, value, sem="release", scope="sys")


@triton.jit
def _signal_twin(flag, value, looked):
    if looked == 0:
        tl.atomic_xchg(flag, value, sem="release", scope="sys")


@triton.jit
def _add_twin(flag, value):
    tl.atomic_add(flag, value, sem="release", scope="sys")


@triton.jit
def _no_fence():
    pass


@triton.jit
def credit_flag(flags, peer):
    """The flag that counts the calls that the rank ``peer`` has finished in one slot. A slot is the part of the
    workspace that a call holds (``runtime.arena``). ``flags``: the reading rank's flags of this slot."""
    return flags + peer * FLAG_WORDS


@triton.jit
def signal_flag(flags, source, index, signals, WORLD: tl.constexpr):
    """The flag of part ``index`` from ``source``. It holds 1 plus the number of the last call whose part has arrived.
    Each source has ``signals`` such flags."""
    return flags + (WORLD + source * signals + index) * FLAG_WORDS


@triton.jit
def has_come(flag, target):
    """Whether a flag has reached ``target``, with the same answer for all threads. This orders nothing: a block that
    uses the data must still wait for the flag."""
    return reached(tl.atomic_add(flag, 0, sem="relaxed", scope="sys"), target)


@triton.jit
def look(stop):
    """The abort word as this thread sees it: not 0 if the group has been aborted. If another block or rank sets the
    word, the threads of a block may see different values. So no branch that contains a barrier may depend on the value.
    Masks, and whether ``signal`` signals, may depend on it."""
    return tl.load(stop, cache_modifier=".cg")


@triton.jit
def unless_aborted(number, stop):
    """``number``, or NaN if the group has been aborted. Kernels multiply results that depend on a wait by
    this value, because a replay of a CUDA graph cannot raise an error."""
    return tl.where(look(stop) == 0, number, float("nan"))


@triton.jit
def may_store(stop):
    """True unless the group has been aborted. Kernels mask their stores to peers with this value."""
    return look(stop) == 0


if triton.knobs.runtime.interpret:
    wait_at_least, set_flag, signal, add_flag = _wait_twin, _set_twin, _signal_twin, _add_twin
    store_fence, load_fence = _no_fence, _no_fence
else:
    wait_at_least, set_flag, signal, add_flag = _wait_at_least, _set_flag, _signal, _add_flag
    store_fence, load_fence = _store_fence, _load_fence
"""``wait_at_least(flag, target, stop, patience_ns, code, peer)``: waits until the flag has ``reached`` its target or
the group has been aborted. After ``patience_ns`` the wait is given up, and the fault record gets ``code`` and ``peer``.

``set_flag(flag, value)``: sets the flag. A thread that acquires the value also sees the block's earlier stores.

``signal(flag, value, looked)``: as ``set_flag``, for a peer's flag, if ``looked`` is 0. ``looked`` is what ``look``
returned to the thread that sets the flag.

``add_flag(flag, value)``: adds ``value`` to the flag, by a release as in ``set_flag``.

``store_fence()``: between bulk stores and their signal. ``load_fence()``: between a wait and bulk loads.
"""


@triton.jit
def count_and_signal(counter, target, flag, value, stop):
    """Count one of ``target`` pieces as stored. The block that counts the last piece sets the peer's ``flag`` to
    ``value``, unless the group has been aborted. It also clears ``counter``, which is in this GPU's own memory.

    Ordering: the block's stores, a barrier, one thread's acquire-release add at GPU scope. The thread that adds last
    has acquired all adds before it. Its release at system scope is cumulative over them. It looks at the abort word
    after its add. So if a counted block left out stores because of an abort, this thread sees the abort.
    """
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == target - 1:
        tl.store(counter, 0)
        signal(flag, value, look(stop))


@triton.jit
def count_and_signal_all(counter, target, peer_flags, rank, index, signals, value, stop, WORLD: tl.constexpr):
    """As ``count_and_signal``, for flag ``index`` of this rank at every peer (``signal_flag``)."""
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == target - 1:
        tl.store(counter, 0)
        looked = look(stop)
        for step in range(1, WORLD):
            flag = tl.load(peer_flags + (rank + step) % WORLD).to(tl.pointer_type(tl.int32))
            signal(signal_flag(flag, rank, index, signals, WORLD), value, looked)


@triton.jit
def finish_call(calls, peer_flags, call, rank, stop, WORLD: tl.constexpr):
    """Count the call and, unless the group has been aborted, give every peer its credit. One block runs this when
    nothing reads the workspace any more."""
    looked = look(stop)
    tl.store(calls, call + 1)
    for step in range(1, WORLD):
        flag = tl.load(peer_flags + (rank + step) % WORLD).to(tl.pointer_type(tl.int32))
        signal(credit_flag(flag, rank), call + 1, looked)


@triton.jit(do_not_specialize=["rank"])
def end_call(calls, peer_flags, rank, stop, WORLD: tl.constexpr):
    """``finish_call`` as a kernel of its own, on the stream after everything that reads the call's workspace. Grid: one
    block."""
    finish_call(calls, peer_flags, tl.load(calls), rank, stop, WORLD)
