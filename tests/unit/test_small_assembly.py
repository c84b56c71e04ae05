# SPDX-License-Identifier: Apache-2.0
"""Assembles the small-message kernels for Hopper without a GPU. Accesses to rows must be wide. A barrier must stand
between each signal and the accesses that the signal orders."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overlap_inductor.kernels.small_message import one_shot
from overlap_inductor.kernels.small_message import two_shot

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no assembler")


def _compiled(kernel: Any, norm: bool, columns: int, segment: int, warps: int) -> Any:
    """``kernel`` for 8 ranks and bf16 rows of ``columns``, with the alignments that Triton would find at run time."""
    row = 1 << (columns - 1).bit_length()
    constants = {"WORLD": 8, "SEGMENTS": -(-columns // segment), "SEGMENT": segment, "ROW": row, "NORM": norm}
    types = dict.fromkeys(("product", "out", "residual", "residual_out", "weight", "staging"), "*bf16") | dict.fromkeys(
        ("peer_data", "peer_flags"), "*i64"
    )
    types |= dict.fromkeys(("flags", "queues", "calls", "stop"), "*i32") | {
        "patience": "i64",
        "scale": "fp32",
        "eps": "fp32",
    }
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name][0] == "*" and name != "calls" or name == "half"
    }
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, divisible)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


@pytest.mark.parametrize(("kernel", "legs"), [(one_shot, 1), (two_shot, 2)])
@pytest.mark.parametrize(
    ("columns", "segment", "warps", "norm"),
    [
        (8192, 2048, 8, True),
        pytest.param(16384, 16384, 8, True, marks=pytest.mark.thorough),
        pytest.param(8192, 1024, 4, True, marks=pytest.mark.thorough),
        pytest.param(5128, 2048, 8, True, marks=pytest.mark.thorough),
        pytest.param(16384, 16384, 8, False, marks=pytest.mark.thorough),
        (5128, 2048, 8, False),
    ],
)
def test_accesses_are_wide_and_signals_are_in_order(
    kernel: Any, legs: int, norm: bool, columns: int, segment: int, warps: int, tmp_path: Path
) -> None:
    compiled = _compiled(kernel, norm, columns, segment, warps)
    text = compiled.asm["ptx"]
    # Every access to rows is 16 bytes wide. Only accesses to flags, addresses and counters are narrower.
    stores = re.findall(r"st\.global\.(\S+)", text)
    assert set(stores) == {"v4.b32", "b32"} and stores.count("b32") == 2 * legs, stores
    loads = re.findall(r"ld\.global\.(\S+)", text)
    assert set(loads) <= {"v4.b32", "cg.v4.b32", "b64", "u64", "u32", "b32", "cg.b32"} and loads.count("b32") == 1, (
        loads
    )
    # The abort word is read at most once at the start of the call, and at most once after each wait.
    assert loads.count("cg.b32") <= 1 + legs, loads
    assert "ld.volatile" not in text
    events = [
        "",
        *re.findall(
            r"ld\.acquire\.sys|bar\.sync|bar\.red|(?:ld\.global\.cg|st\.global)\.v4|st\.release\.sys(?=[^\n]*, %r)",
            text,
        ),
        "",
    ]
    assert events.count("ld.acquire.sys") == legs and events.count("st.release.sys") == legs
    for before, after in zip(events, events[1:]):
        assert before != "ld.acquire.sys" or after == "bar.sync", (
            "loads of other threads may run before the signal is seen"
        )
        assert after != "st.release.sys" or before == "bar.red", (
            "other threads may store after the signal, or may have left out stores because the group is aborted"
        )
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.nvdisasm.path
    machine = subprocess.run([tool, "-c", str(binary)], capture_output=True, text=True, check=True).stdout
    # Only code of Triton 3.6 is checked for use of the stack, because the kernels were measured with Triton 3.6.
    # Triton 3.9 keeps some values on the stack.
    assert not triton.__version__.startswith("3.6") or "STL" not in machine and "LDL" not in machine, (
        "the kernel keeps something on the stack"
    )
