"""Kernels are assembled for the GPU they are written for, on a machine without one: a slip in inline assembly is found here."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overlap_inductor.kernels import signals
from overlap_inductor.kernels.all_gather_matmul import all_gather_matmul


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


pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no assembler")


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


def test_all_gather_matmul_keeps_its_sums_in_registers(tmp_path: Path) -> None:
    """The tile shape that pays on this chip; two loops over K one after the other share their stages."""
    constants = {"WORLD": 8, "PARTS": 2, "PIECES": 16, "PUSHERS": 8, "BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8, "BLOCK": 4096}
    types = {"own_desc": "tensordesc<bf16[128, 64]>", "gathered_desc": "tensordesc<bf16[128, 64]>", "b_desc": "tensordesc<bf16[256, 64]>"}
    types |= {"c": "*bf16", "peer_data": "*i64", "peer_flags": "*i64", "patience": "i64"}
    types |= dict.fromkeys(("words", "flags", "queues", "calls", "fault"), "*i32")
    names = all_gather_matmul.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name != "rank" and signature[name][0] in "*i"}
    source = ASTSource(all_gather_matmul, signature, {(names.index(k),): v for k, v in constants.items()}, divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": 3})
    assert compiled.asm["ptx"].count("wgmma.mma_async") and compiled.metadata.shared <= 227 * 1024
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", str(binary)], capture_output=True, text=True, check=True).stdout
    assert re.search(r"LOCAL:0 ", usage) and re.search(r"STACK:0 ", usage), usage
