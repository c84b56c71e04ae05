"""Signals between GPUs: release, bounded wait, fault record.

A flag is one int32 in symmetric memory, alone in its 128 bytes. It only grows (modulo 2**32): a wait is for *at least*
a value, so that a signal that runs ahead is not lost. A peer is at most a call ahead; a flag counts as come while it is
less than ``WINDOW`` ahead (``reached``), so that one which was last touched 2**31 calls ago is not taken for one that
has come.

Memory ordering (PTX memory model, section 8). A signal is ``bar.sync`` and then one thread's ``st.release.sys`` or
``red.release.sys``: the barrier orders the block's stores before that thread's release, and release is cumulative, so
whoever acquires the value sees them all. A wait is one thread's ``ld.acquire.sys`` until the value is there and then
``bar.sync``: the block's later loads come after it. Both barriers are written out, because Triton 3.6 puts none around
atomics. This covers ordinary loads and stores. Loads and stores by the bulk copy unit belong to another proxy:
``store_fence`` goes between bulk stores and their signal, ``load_fence`` between a wait and bulk loads.

What Triton makes of a descriptor's store, compiled for this GPU: the tile to shared memory,
``fence.proxy.async.shared::cta``, a barrier, one thread's bulk store, ``commit_group`` and, in 3.6 and 3.7,
``wait_group.read 0``: that shared memory has been read, not that anything is written. (3.8 and 3.9 wait for that, too.)
No version puts a fence of the proxies behind it, so that a release that follows orders none of it: ``store_fence``
waits for the group and has that fence. 3.9 makes a ``red`` of an atomic whose result nobody reads, and puts a barrier
of its own before every atomic.

Forward progress. A wait ends: with the value; with the rank's abort word set; or when its patience is over. Then it
sets the abort word itself, by compare-and-swap: of all threads whose patience ends, one finds zero there. That one
writes the rank's record on the group's board, says on the board that there is one, and sets the abort words of all
other ranks, in this order (releases): so whoever was stopped by a peer finds the record. After that every wait of every
rank returns at once and kernels run to their ends, with data that the host rejects because of the board. Nothing
branches on the outcome, so no thread of a block is missing at a later barrier.

After an abort a rank signals nothing to its peers, and stores nothing there without leave from before. Kernels look at
the abort word (``look``) beside the call, where they store to peers without a wait before, and behind each wait whose
outcome they store or signal; a wait that was given up has set the word before the barrier behind it, so that every
thread of its block sees it. What a rank signals was so made of what it had waited for with success. A thread that looks
may see the word set while another of its block did not: whoever signals for both must look later than both
(``count_and_signal``), or ask all (``group_signals.signal_ranks``).

The abort word lies in symmetric memory of the GPU that looks at it; only the board is the host's memory (``STOP_WORDS``
says where addresses lie). A waiting block must not look at the host's memory: on an H100, 108 blocks that did so at
every 64th turn made a matmul on the other 24 take 3700 us instead of 75, and those that looked only at the GPU's
memory, however often, cost it nothing. So the look costs a wait that does not spin nothing, and a kernel one load of
its own memory beside others.

CUDA graphs. Nothing here holds a value of the host: flags, targets and patience are arguments or memory that the kernel
reads.

``TRITON_INTERPRET=1`` has no inline assembly and runs the blocks of a kernel one after the other: the twins at the end
do the same with atomics, and count turns for want of a clock: one for 1000 ns of patience.
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
    """What a thread does whose patience is over, in the registers ``abort``, ``seen``, ``turns`` (32 bits), ``start``,
    ``now`` (64) and predicates ``stopped`` and ``early``; ``LEAVE`` is where it goes on. The arguments name
    operands."""
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
    """Whether a flag or counter that is ``seen`` has come to ``target``: it is there, or ahead by less than
    ``WINDOW``."""
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
    """Where ``peer`` says how many calls of the slot it has finished. ``flags``: the flags of whoever reads it."""
    return flags + peer * FLAG_WORDS


@triton.jit
def signal_flag(flags, source, index, signals, WORLD: tl.constexpr):
    """Where ``source`` says for which call its part ``index`` has come, of ``signals`` a source."""
    return flags + (WORLD + source * signals + index) * FLAG_WORDS


@triton.jit
def has_come(flag, target):
    """Whether a flag has reached ``target``, the same answer for all threads of the block: an atomic's result is handed
    round, while a load is each thread's own, and threads that read it at different moments would part before a barrier.
    No ordering: whoever uses the data waits for the flag."""
    return reached(tl.atomic_add(flag, 0, sem="relaxed", scope="sys"), target)


@triton.jit
def look(stop):
    """The abort word as this thread sees it: not 0 where a wait of the group has been given up. Behind a wait's
    barrier each thread looks for itself: no
    branch may rest on it, but masks and ``signal``."""
    return tl.load(stop, cache_modifier=".cg")


@triton.jit
def unless_aborted(number, stop):
    """``number``, or NaN where a wait of the group has been given up: what a result is multiplied with that rests on a
    wait before. A CUDA graph's replays have nobody to raise an error to."""
    return tl.where(look(stop) == 0, number, float("nan"))


@triton.jit
def may_store(stop):
    """Whether no wait of the group has been given up, for the masks of what is stored to peers: a rank that gave up
    waiting for leave has none."""
    return look(stop) == 0


if triton.knobs.runtime.interpret:
    wait_at_least, set_flag, signal, add_flag = _wait_twin, _set_twin, _signal_twin, _add_twin
    store_fence, load_fence = _no_fence, _no_fence
else:
    wait_at_least, set_flag, signal, add_flag = _wait_at_least, _set_flag, _signal, _add_flag
    store_fence, load_fence = _store_fence, _load_fence
"""``wait_at_least(flag, target, stop, patience_ns, code, peer)``: until the flag has ``reached`` its target, or the
group has been aborted. ``set_flag(flag, value)``: the
block's stores before this are there when the flag is ``value``. ``signal(flag, value, looked)``: likewise, of a
peer's flag, unless the one thread that sets it has
``looked`` at an abort (``look``)."""


@triton.jit
def count_and_signal(counter, target, flag, value, stop):
    """One of ``target`` pieces is stored: the last one to be counted sets the peer's ``flag`` and clears ``counter``
    (this GPU's own memory). Nothing is signalled once the group's abort word is set: what was to be stored may not have
    been.

    Ordering: the block's stores, a barrier, one thread's acquire-release add at GPU scope; whoever adds last has
    acquired all adds before, and its release at system scope is cumulative over them. It looks at the abort word behind
    its add, later than any block that has stored nothing because of it.
    """
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == target - 1:
        tl.store(counter, 0)
        signal(flag, value, look(stop))


@triton.jit
def count_and_signal_all(counter, target, peer_flags, rank, index, signals, value, stop, WORLD: tl.constexpr):
    """As ``count_and_signal``, of flag ``index`` of this rank at every peer (``signal_flag``); ``peer_flags``: int64
    ``[WORLD]``, the addresses of their flags."""
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == target - 1:
        tl.store(counter, 0)
        looked = look(stop)
        for step in range(1, WORLD):
            flag = tl.load(peer_flags + (rank + step) % WORLD).to(tl.pointer_type(tl.int32))
            signal(signal_flag(flag, rank, index, signals, WORLD), value, looked)


@triton.jit
def finish_call(calls, peer_flags, call, rank, stop, WORLD: tl.constexpr):
    """Count the call, and let every peer write into this rank's workspace again, unless the group has been aborted. Run
    by one block, when nothing reads the workspace any more."""
    looked = look(stop)
    tl.store(calls, call + 1)
    for step in range(1, WORLD):
        flag = tl.load(peer_flags + (rank + step) % WORLD).to(tl.pointer_type(tl.int32))
        signal(credit_flag(flag, rank), call + 1, looked)


@triton.jit(do_not_specialize=["rank"])
def end_call(calls, peer_flags, rank, stop, WORLD: tl.constexpr):
    """``finish_call`` as a launch of its own, on the stream behind everything that reads the workspace of a call. Grid:
    one block."""
    finish_call(calls, peer_flags, tl.load(calls), rank, stop, WORLD)
