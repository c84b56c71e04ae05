"""Kernels are assembled for the GPU they are written for, on a machine without one: a slip in inline assembly is found here."""

from __future__ import annotations

import os
import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overlap_inductor.kernels import signals


@triton.jit
def everything(flag, peer_flag, fault, mine, theirs, value, patience):
    # Twice each: the labels of one must not meet those of the other.
    for i in range(value):
        signals.wait_at_least(flag, i, fault, patience, 1, 0)
        signals.load_fence()
        theirs.store([0, 0], mine.load([0, 0]))
        signals.store_fence()
        signals.set_flag(peer_flag, i)
    signals.wait_at_least(flag + 32, value, fault, patience, 2, 0)
    signals.add_flag(peer_flag, 1)
    signals.add_flag(peer_flag + 32, 1)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no assembler")
def test_signals_assemble_for_hopper() -> None:
    pointers = dict.fromkeys(("flag", "peer_flag", "fault"), "*i32")
    descriptors = dict.fromkeys(("mine", "theirs"), "tensordesc<bf16[64, 64]>")
    source = ASTSource(everything, signature={**pointers, **descriptors, "value": "i32", "patience": "i64"})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    text = compiled.asm["ptx"]
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    # (The release inside a wait sets the abort word, to a constant.)
    events = re.findall(r"ld\.acquire\.sys|bar\.sync|(?:st|red)\.release\.sys(?=[^\n]*, %r)", text)
    assert events.count("ld.acquire.sys") == 2 and events.count("st.release.sys") == 1 and events.count("red.release.sys") == 2
    for before, after in zip(events, events[1:]):
        assert before != "ld.acquire.sys" or after == "bar.sync", "loads of other threads may run before the signal is seen"
        assert "release" not in after or before == "bar.sync", "stores of other threads may come after the signal"
