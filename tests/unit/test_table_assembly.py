# SPDX-License-Identifier: Apache-2.0
"""Assembles the lookup kernel for Hopper on a machine without a GPU."""

from __future__ import annotations

import os
import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overlap_inductor.kernels.embedding_all_to_all import embedding_all_to_all

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no assembler")
UNROLL = 8


def _assembly(width: int) -> str:
    """The PTX of the kernel for 8 ranks. The kernel computes the mean of each bag's weighted fp32 rows, and stores what
    the backward reads."""
    constants = {"WORLD": 8, "WIDTH": width, "BAGS": 512 // width, "SPAN": width, "UNROLL": UNROLL, "BAGGED": True}
    constants |= {"MEAN": True, "WEIGHTED": True, "SAVES": True, "COPIES": 64, "BLOCK": 2048}
    types = {"out": "*fp32", "patience": "i64"} | dict.fromkeys(("facts", "index", "peer_data", "peer_flags"), "*i64")
    types |= dict.fromkeys(("staging", "flags", "queues", "calls", "stop"), "*i32")
    names = embedding_all_to_all.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name][0] == "*" and name != "calls" or name in ("row_stride", "table_stride")
    }
    source = ASTSource(embedding_all_to_all, signature, {(names.index(k),): v for k, v in constants.items()}, divisible)
    options = {"num_warps": 4, "debug": True, "sanitize_overflow": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def test_rows_are_loaded_together_in_wide_loads_without_a_barrier() -> None:
    """A barrier or a conversion through shared memory in the loop over a bag's rows would keep loads from overlapping.
    The kernel must have asserts, but none in this loop."""
    assembly = _assembly(64)
    blocks = re.split(r"\n\$L__BB\w+:", assembly)
    (loop,) = [b for b in blocks if len(re.findall(r"ld\.global[.\w:]*v4", b)) == UNROLL]
    assert "bar.sync" not in loop and ".shared" not in loop and "__assertfail" not in loop
    assert len(re.findall(r"call\.uni.*\n?.*__assertfail|__assertfail,", assembly)) >= 2
    assert len(re.findall(r"st\.global[.\w:]*v4", assembly)) >= 2
