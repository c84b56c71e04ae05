# SPDX-License-Identifier: Apache-2.0
"""Signals to all ranks of a group at once, and waits for many flags at once: one thread for each flag. A single thread
would need a microsecond for each flag, too much for a small all-reduce.

Memory ordering: as in ``signals``. A signal is ``bar.red``, after which each of several threads runs its own
``st.release.sys``. The barrier orders the block's stores before these releases. In a wait, each of several threads
repeats ``ld.acquire.sys`` until its own flag has the value, and ``bar.sync`` follows. So all that these threads have
acquired is visible to the later loads of the whole block. Forward progress, aborts and CUDA graphs: as in ``signals``.

An abort sets the rank's abort word. A thread that has seen this word set may have left out stores. ``bar.red`` tells
every thread whether any thread of the block has seen the word set. If one has, no thread signals.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.signals import FLAG_WORDS
from overlap_inductor.kernels.signals import WINDOW
from overlap_inductor.kernels.signals import give_up
from overlap_inductor.kernels.signals import signal
from overlap_inductor.kernels.signals import wait_at_least

_SIGNAL = tl.constexpr("""
{
.reg .pred other, aborted;
.reg .u32 thread;
.reg .u64 address;
setp.ne.s32 aborted, $6, 0;
bar.red.or.pred aborted, 0, aborted;
@aborted bra LEAVE;
mov.u32 thread, %tid.x;
setp.ge.u32 other, thread, $5;
@other bra LEAVE;
setp.eq.s32 other, thread, $4;
@other bra LEAVE;
mad.wide.u32 address, thread, 8, $1;
ld.global.u64 address, [address];
mad.wide.u32 address, $2, 4, address;
st.release.sys.global.s32 [address], $3;
LEAVE:
mov.u32 $0, 0;
}
""")

# As ``signals._WAIT``, but thread ``t`` waits for its own flag, ``(t / $4) * $5 + (t % $4) * FLAG_WORDS`` words after
# the first flag. The clock is first read at the first look at the abort word.
_WAIT = tl.constexpr(f"""
{{
.reg .pred other, done, stopped, early, looks, first;
.reg .s32 seen, abort;
.reg .u32 ahead, thread, turns, source, word, masked;
.reg .u64 flag, start, now;
mov.u32 thread, %tid.x;
setp.ge.u32 other, thread, $3;
@other bra LEAVE;
div.u32 source, thread, $4;
setp.eq.s32 other, source, $6;
@other bra LEAVE;
rem.u32 word, thread, $4;
mul.lo.u32 word, word, {FLAG_WORDS.value};
mad.lo.u32 word, source, $5, word;
mad.wide.u32 flag, word, 4, $1;
mov.u32 turns, 0;
AGAIN:
ld.acquire.sys.global.s32 seen, [flag];
sub.s32 ahead, seen, $2;
setp.lt.u32 done, ahead, {WINDOW.value};
@done bra LEAVE;
add.u32 turns, turns, 1;
and.b32 masked, turns, 63;
setp.ne.u32 looks, masked, 0;
@looks bra AGAIN;
ld.relaxed.sys.global.s32 abort, [$7];
setp.ne.s32 stopped, abort, 0;
@stopped bra LEAVE;
mov.u64 now, %globaltimer;
setp.eq.u32 first, turns, 64;
@first mov.u64 start, now;
sub.u64 now, now, start;
setp.lt.u64 early, now, $8;
@early bra AGAIN;
add.s32 source, source, $10;
{give_up("$7", "$9", "source", "$2")}
LEAVE:
mov.u32 $0, 0;
}}
""")


@triton.jit
def _signal_ranks(peer_flags, word, value, left_out, looked, WORLD: tl.constexpr):
    operands = [peer_flags, word, value, left_out, WORLD, looked]
    tl.inline_asm_elementwise(_SIGNAL, "=r,l,r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wait_for_all(first, target, sources, each, stride, left_out, stop, patience_ns, code, peer):
    count = sources * each
    tl.inline_asm_elementwise(
        _WAIT,
        "=r,l,r,r,r,r,r,l,l,r,r",
        [first, target, count, each, stride, left_out, stop, patience_ns, code, peer],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def _signal_twin(peer_flags, word, value, left_out, looked, WORLD: tl.constexpr):
    for peer in range(WORLD):
        if peer != left_out:
            signal(tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32)) + word, value, looked)


@triton.jit
def _wait_twin(first, target, sources, each, stride, left_out, stop, patience_ns, code, peer):
    for source in range(sources):
        if source != left_out:
            for i in range(each):
                wait_at_least(first + source * stride + i * FLAG_WORDS, target, stop, patience_ns, code, peer + source)


if triton.knobs.runtime.interpret:
    signal_ranks, wait_for_all = _signal_twin, _wait_twin
else:
    signal_ranks, wait_for_all = _signal_ranks, _wait_for_all
"""``signal_ranks(peer_flags, word, value, left_out, looked, WORLD)``: sets int32 word number ``word`` in the flags of
every rank but ``left_out`` (``-1``: of all ranks) to ``value``. A thread that acquires the value also sees the block's
earlier stores. ``looked``: what each thread got from ``signals.look``. If it is not 0 in some thread of the block,
nothing is signalled. The block has at least ``WORLD`` threads.

``wait_for_all(first, target, sources, each, stride, left_out, stop, patience_ns, code, peer)``: waits until the flags
of the sources 0 to ``sources - 1``, except source ``left_out``, have reached ``target``. A source has ``each`` flags,
``FLAG_WORDS`` words apart. ``first``: the first flag of source 0. ``stride``: int32 words from source to source. A
fault record names source ``s`` as ``peer + s``. The block has at least ``sources * each`` threads.
"""
