# SPDX-License-Identifier: Apache-2.0
"""Assembles the candidate of ``bench.support.gemv`` for Hopper on a machine without a GPU.

With parameters that are measured, it must fit into an SM, its accesses must be wide, and a barrier must separate
signals from what they order.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.support import gemv
from bench.support.gemv import GemvParameters

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no assembler")

RANKS, COLUMNS = 8, 8192
SHARED_LIMIT = 227 << 10
"""Shared memory that one block may have on Hopper."""


def _source(p: GemvParameters, rows: int) -> ASTSource:
    """The kernel for a transposed bf16 weight, with the alignments that Triton would find at run time."""
    kernel, block_m = gemv.gemv_all_reduce, gemv.padded(rows)
    constants = {"WORLD": RANKS, "TWO_SHOT": p.two_shot, "SPLITS": p.splits, "TRANSPOSED": True}
    constants |= {"BLOCK_M": block_m, "BLOCK_N": p.block_n, "BLOCK_K": p.block_k}
    if p.splits == 1:
        constants["products"] = None
    types = dict.fromkeys(("flags", "queues", "calls", "stop"), "*i32") | dict.fromkeys(("out", "staging"), "*bf16")
    types |= {"peer_data": "*i64", "peer_flags": "*i64", "products": "*fp32", "patience": "i64"}
    types |= {name: f"tensordesc<bf16[{n}, {p.block_k}]>" for name, n in (("x_desc", block_m), ("w_desc", p.block_n))}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name][0] == "*" and name != "calls" or name in ("half", "inner")
    }
    return ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, divisible)


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (1, "gemv"),
        (1, "gemv one-shot n32 k/1"),
        (1, "gemv two-shot n64 k/2"),
        (64, "gemv"),
        (64, "gemv one-shot n64 k/1"),
        (64, "gemv one-shot n128 k/2"),
    ],
)
def test_the_measured_kernels_fit_and_order_their_signals(name: str, rows: int, tmp_path: Path) -> None:
    p = gemv.variants(RANKS, rows, COLUMNS, 2)[name]
    options = {"num_warps": gemv.warps(p, rows), "num_stages": p.stages}
    compiled = triton.compile(_source(p, rows), target=GPUTarget("cuda", 90, 32), options=options)
    blocks_of_an_sm = 1 if -(-COLUMNS // p.block_n) * p.splits <= 128 else 2
    assert compiled.metadata.shared * blocks_of_an_sm <= SHARED_LIMIT
    text = compiled.asm["ptx"]
    # Rows are accessed in words of 16 bytes (8 in narrow tiles of few rows), all else in words of 4 or 8.
    wide = "v2.b32" if p.block_n == 32 and rows == 1 else "v4.b32"
    assert set(re.findall(r"st\.global\.(\S+)", text)) == {wide, "b32"}
    assert set(re.findall(r"ld\.global\.(\S+)", text)) <= {"cg." + wide, "cg.b32", "b32", "b64", "u64", "u32"}
    pattern = rf"ld\.acquire\.sys|bar\.sync|bar\.red|(?:ld\.global\.cg|st\.global)\.{wide[:2]}"
    events = ["", *re.findall(pattern + r"|st\.release\.sys(?=[^\n]*, %r)|\w+\.global\.gpu\.acq_rel", text), ""]
    legs = 2 if p.two_shot else 1
    assert events.count("ld.acquire.sys") == events.count("st.release.sys") == legs
    # With several blocks for a tile, each counts its product. All but the last also count the call with acquire.
    assert events.count("atom.global.gpu.acq_rel") == (2 if p.splits > 1 else 0)
    for before, here, after in zip(events, events[1:], events[2:]):
        assert here != "ld.acquire.sys" or after == "bar.sync", "threads may load before the signal is seen"
        assert here != "st.release.sys" or before == "bar.red", "threads may store after the signal"
        assert "acq_rel" not in here or before == after == "bar.sync", "threads may be on the wrong side of the count"
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(binary)]
    machine = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # (As in ``test_small_assembly``, only with the Triton version of the measurements.)
    assert not triton.__version__.startswith("3.6") or "STL" not in machine and "LDL" not in machine
