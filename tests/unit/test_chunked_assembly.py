# SPDX-License-Identifier: Apache-2.0
"""Assembles the kernels of schedule ``chunked`` for Hopper without a GPU. Rows must move in wide words, signals must
come after barriers, and waiting kernels must use no shared memory."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overlap_inductor.kernels.partial_sums import receive_rows
from overlap_inductor.kernels.partial_sums import sum_partials
from overlap_inductor.kernels.transfer import announce
from overlap_inductor.kernels.transfer import end_call_and_spoil
from overlap_inductor.kernels.transfer import push_parts
from overlap_inductor.kernels.transfer import spoil
from overlap_inductor.kernels.transfer import wait_for_credits
from overlap_inductor.kernels.transfer import wait_for_parts
from overlap_inductor.kernels.transfer import wait_for_turn

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no assembler")

PARTS_OF_8 = {"WORLD": 8, "PARTS": 3, "DIRECTION": -1}


def _compiled(kernel: Any, constants: dict[str, Any], warps: int) -> tuple[str, int]:
    """``(PTX, bytes of shared memory)`` of ``kernel`` for bf16. Only pointers to rows are declared as multiples of 16
    bytes."""
    rows = ("source", "own", "out", "staging", "finished")
    types = (
        dict.fromkeys(rows, "*bf16")
        | dict.fromkeys(("peer_data", "peer_flags"), "*i64")
        | {"patience": "i64", "scale": "fp32"}
    )
    types |= dict.fromkeys(("result", "one"), "*bf16")
    types |= dict.fromkeys(("flags", "queues", "calls", "announced", "stop"), "*i32")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in rows}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    return compiled.asm["ptx"], compiled.metadata.shared


@pytest.mark.parametrize(
    ("kernel", "constants", "moved", "signals"),
    [
        pytest.param(
            push_parts, {**PARTS_OF_8, "PIECES": 16, "SCATTERED": True, "BLOCK": 8192}, (8, 8), 1, id="push_parts"
        ),
        pytest.param(
            push_parts,
            {**PARTS_OF_8, "PIECES": 16, "SCATTERED": False, "BLOCK": 8192},
            (8, 8),
            1,
            id="push_parts, one shard",
        ),
        pytest.param(
            sum_partials, {"WORLD": 8, "VECTOR": 8, "BROADCAST": True, "BLOCK": 2048}, (8, 8), 7, id="sum_partials"
        ),
        pytest.param(
            sum_partials,
            {"WORLD": 8, "VECTOR": 8, "BROADCAST": False, "BLOCK": 2048},
            (8, 1),
            0,
            id="sum_partials, scatter",
        ),
        pytest.param(
            receive_rows, {"WORLD": 8, "STRIPES": 18, "VECTOR": 8, "BLOCK": 2048}, (1, 1), 0, id="receive_rows"
        ),
    ],
)
def test_rows_move_in_wide_words_and_signals_follow_them(
    kernel: Any, constants: dict[str, Any], moved: tuple[int, int], signals: int
) -> None:
    text, _ = _compiled(kernel, constants, 8)
    loads, stores = (re.findall(rf"{what}\.global\.(?:cg\.)?(v\d\.\w+|b16|b8)", text) for what in ("ld", "st"))
    assert (loads, stores) == (["v4.b32"] * moved[0], ["v4.b32"] * moved[1])
    events = re.findall(
        r"ld\.acquire\.sys|bar\.sync|atom\.\S*acq_rel|st\.release\.sys(?=[^\n]*, %r)|(?:ld|st)\.global\S*\.v4", text
    )
    assert sum("st.release" in e for e in events) == signals and "ld.volatile" not in text
    for before, after in zip(events, events[1:]):
        assert before != "ld.acquire.sys" or after == "bar.sync", (
            "loads of other threads may run before the signal is seen"
        )
        assert ("st.release" not in after and "atom" not in after) or before == "bar.sync", (
            "stores of other threads may come after the signal"
        )


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        pytest.param(wait_for_credits, {"WORLD": 8}, id="wait_for_credits"),
        pytest.param(wait_for_parts, {**PARTS_OF_8, "KIND": 2}, id="wait_for_parts"),
        pytest.param(wait_for_turn, {"WORLD": 8}, id="wait_for_turn"),
        pytest.param(announce, {}, id="announce"),
    ],
)
def test_waiting_kernels_use_no_shared_memory(kernel: Any, constants: dict[str, Any]) -> None:
    """A kernel that waits beside a matmul uses no shared memory, and reads flags at system scope. ``announce`` reads
    no flags."""
    text, shared = _compiled(kernel, constants, 1)
    assert shared == 0 and "ld.volatile" not in text
    assert ("ld.acquire.sys" in text) == (kernel is not announce)


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        pytest.param(spoil, {"BLOCK": 1024}, id="spoil"),
        pytest.param(
            end_call_and_spoil, {"WORLD": 8, "BLOCK": 1024, "two": None, "three": None}, id="end_call_and_spoil"
        ),
    ],
)
def test_spoiling_kernels_have_no_barrier_where_threads_may_diverge(kernel: Any, constants: dict[str, Any]) -> None:
    """A spoiling kernel sets results to NaN if the *abort word* says that the group has been aborted. Each thread reads
    the word by itself, so threads of a block may diverge."""
    text, shared = _compiled(kernel, constants, 4)
    loop = text[text.index("mov.b32", text.rindex("st.release") if "st.release" in text else 0) :]
    assert shared == 0 and "bar.sync" not in loop and "ld.global.cg" in text
