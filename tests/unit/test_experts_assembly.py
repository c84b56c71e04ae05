# SPDX-License-Identifier: Apache-2.0
"""Assembles the kernels of experts in chunks for Hopper on a machine without a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overlap_inductor.kernels import gate
from overlap_inductor.kernels import grouped_matmul
from overlap_inductor.kernels import messages
from overlap_inductor.kernels import row_order

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no assembler")
TYPES = {"peer_flags": "*i64", "index": "*i64", "bounds": "*i64", "rows": "*i64", "patience": "i64"}
TYPES |= dict.fromkeys(("ordered", "places", "back"), "*i64")
TYPES |= dict.fromkeys(("flags", "queues", "stop", "counts", "found", "ends_of", "ends", "finished"), "*i32")
TYPES |= dict.fromkeys(("x", "y", "out", "result"), "*bf16")


def _assembly(kernel: Any, types: Mapping[str, str] | None = None, **constants: int | None) -> str:
    """The kernel's PTX. Sizes such as the number of pieces are arguments, not constants."""
    names, known = kernel.arg_names, TYPES | dict(types or {})
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in names}
    # A ``width`` of whole words lets the kernel's masks end between words.
    aligned = [i for i, n in enumerate(names) if (signature[n][0] == "*" and n != "rows") or n == "width"]
    divisible = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, divisible)
    options = {"num_warps": constants.get("THREADS", 128) // 32, "num_stages": 3}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(compiled.asm["ptx"])


@pytest.mark.parametrize("kernel", [messages.begin_round, messages.wait_for_message])
def test_a_wait_acquires_at_system_scope(kernel: Any) -> None:
    assert "ld.acquire.sys.global.s32" in _assembly(kernel, WORLD=8)


def test_taken_messages_are_released_at_system_scope_behind_a_barrier() -> None:
    """The barrier orders the block's reads before the release."""
    before, _, _ = _assembly(messages.end_round, WORLD=8).partition("st.release.sys.global.s32")
    assert "bar.sync" in before


def test_orders_of_rows_are_assembled() -> None:
    assert "st.global" in _assembly(row_order.count_rows, BLOCKS=64, BLOCK=1024)
    assert "st.global" in _assembly(row_order.place_rows, BLOCKS=64, BLOCK=1024)
    counting = _assembly(row_order.count_by_expert, EXPERTS=32, BLOCK=1024)
    assert "atom.global.gpu.acq_rel" in counting and "ld.global.cg" in counting
    assert "st.global" in _assembly(messages.spoil_rows, BLOCK=1024)


def test_grouped_matmuls_use_bulk_loads_and_tensor_cores() -> None:
    """A claim is one atomic of the block's first thread (``tile_order``)."""
    sizes = {"EXPERTS": 32, "BLOCK_M": 128, "BLOCK_K": 64, "GROUP_M": 8, "BATCH": 8, "THREADS": 256, "TRANSPOSED": True}
    types = {"x_desc": "tensordesc<bf16[128, 64]>", "queue": "*i32"}
    gated = (
        types
        | dict.fromkeys(("w_desc", "v_desc"), "tensordesc<bf16[128, 64]>")
        | {"out_desc": "tensordesc<bf16[128, 128]>"}
    )
    single = types | {"w_desc": "tensordesc<bf16[256, 64]>", "out_desc": "tensordesc<bf16[128, 256]>"}
    for assembly in (
        _assembly(grouped_matmul.multiply_experts, gated, BLOCK_N=128, GATED=True, **sizes),
        _assembly(grouped_matmul.multiply_experts, single, v_desc=None, BLOCK_N=256, GATED=False, **sizes),
    ):
        assert "cp.async.bulk.tensor" in assembly and "wgmma" in assembly
        assert "@!other atom.relaxed.gpu.global.add.s32" in assembly


def test_the_gate_loads_and_stores_whole_words() -> None:
    assembly = _assembly(gate.silu_times, BLOCK=4096)
    assert len(re.findall(r"ld\.global[.\w:]*v4", assembly)) >= 2 and re.search(r"st\.global[.\w:]*v4", assembly)
