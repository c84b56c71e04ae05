# SPDX-License-Identifier: Apache-2.0
"""Assembles the fused and signalling kernels for Hopper without a GPU. This finds errors in inline assembly."""

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

from overlap_inductor.kernels import signals
from overlap_inductor.kernels.all_gather_matmul import all_gather_matmul
from overlap_inductor.kernels.all_gather_matmul_slices import all_gather_matmul_slices
from overlap_inductor.kernels.all_to_all_contraction import all_to_all_contraction
from overlap_inductor.kernels.epilogue import function_of
from overlap_inductor.kernels.matmul_all_reduce import matmul_all_reduce
from overlap_inductor.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from overlap_inductor.kernels.wave_groups import matmul_in_groups
from overlap_inductor.kernels.wave_groups import wait_for_group


@triton.jit
def everything(flag, peer_flag, stop, mine, theirs, value, patience):
    # Waits are called twice, because the labels in two waits must not clash.
    for i in range(value):
        signals.wait_at_least(flag, i, stop, patience, 1, 0)
        signals.load_fence()
        theirs.store([0, 0], mine.load([0, 0]))
        signals.store_fence()
        signals.set_flag(peer_flag, i)
        signals.signal(peer_flag, i, signals.look(stop))
    signals.wait_at_least(flag + 32, value, stop, patience, 2, 0)
    signals.add_flag(peer_flag, 1)
    signals.add_flag(peer_flag + 32, 1)


pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no assembler")


def test_signals_assemble_for_hopper() -> None:
    pointers = dict.fromkeys(("flag", "peer_flag", "stop"), "*i32")
    descriptors = dict.fromkeys(("mine", "theirs"), "tensordesc<bf16[64, 64]>")
    source = ASTSource(everything, signature={**pointers, **descriptors, "value": "i32", "patience": "i64"})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    text = compiled.asm["ptx"]
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    # A wait that times out stores constants with a release. The regular expression leaves these stores out.
    events = re.findall(r"ld\.acquire\.sys|bar\.sync|(?:st|red)\.release\.sys(?=[^\n]*, %r)", text)
    assert (
        events.count("ld.acquire.sys") == 2
        and events.count("st.release.sys") == 2
        and events.count("red.release.sys") == 2
    )
    # Each thread that times out makes a compare-and-swap on the abort word. Only the thread that finds the value 0
    # writes the fault record. This thread then marks in the hosts' memory (the board) that there is a record, and sets
    # the ranks' abort words.
    given_up = re.findall(
        r"atom\.relaxed\.sys\.global\.cas|st\.relaxed\.sys\.global|st\.release\.sys\.global\.s32(?=[^\n]*, 1;)", text
    )
    assert (
        given_up
        == [
            "atom.relaxed.sys.global.cas",
            *["st.relaxed.sys.global"] * 5,
            *["st.release.sys.global.s32"] * 3,
        ]
        * 2
    )
    assert text.count(f"setp.lt.u32 done, ahead, {signals.WINDOW.value};") == 2
    for before, after in zip(events, events[1:]):
        assert before != "ld.acquire.sys" or after == "bar.sync", (
            "loads of other threads may run before the signal is seen"
        )
        assert "release" not in after or before == "bar.sync", "stores of other threads may come after the signal"


def _unspecialised(kernel: Any) -> set[int]:
    return {p.num for p in kernel.params if p.do_not_specialize}


def _weights(count: int, block_n: int, halves: bool = False) -> tuple[dict[str, str], dict[str, Any]]:
    """The types of the arguments for ``count`` transposed weights of a gather, and the kernel's constants. Arguments
    for absent weights are constants."""
    types, constants = {}, {"COUNT": count}
    for i in range(4):
        names = (f"b{i}_desc", f"c{i}_desc", f"c{i}", f"bias{i}")
        if i < count:
            types |= dict(
                zip(
                    names,
                    (
                        f"tensordesc<bf16[{block_n}, 64]>",
                        f"tensordesc<bf16[128, {block_n // 2 if halves else block_n}]>",
                        "*bf16",
                        "*bf16",
                    ),
                )
            )
        else:
            constants |= dict.fromkeys((*names, f"columns{i}"))
    return types, constants


def _assembled(
    kernel: Any,
    constants: dict[str, Any],
    tile: tuple[int, int, int],
    folder: Path,
    stages: int = 3,
    given: dict[str, str] | None = None,
) -> tuple[str, str, int]:
    """``(PTX, machine code, bytes of shared memory)`` of a kernel on bf16, for Hopper."""
    block_m, block_n, block_k = tile
    halves = constants.get("HALVES", False)
    constants = {**constants, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8}
    left, right = f"tensordesc<bf16[{block_m}, {block_k}]>", f"tensordesc<bf16[{block_n}, {block_k}]>"
    types = {
        "own_desc": left,
        "gathered_desc": left,
        "a_desc": left,
        "b_desc": right,
        "product_desc": f"tensordesc<bf16[{block_m}, {block_n // 2 if halves else block_n}]>",
        "c_desc": f"tensordesc<bf16[{block_m}, {block_n // 2 if halves else block_n}]>",
        "patience": "i64",
        "scale": "fp32",
    }
    types |= dict.fromkeys(("a", "c", "out", "bias", "staging", "product"), "*bf16") | dict.fromkeys(
        ("peer_data", "peer_flags"), "*i64"
    )
    types |= dict.fromkeys(("flags", "queues", "calls", "stop", "partition", "counters", "queue", "ready"), "*i32")
    types |= given or {}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if i not in _unspecialised(kernel) and signature[name][0] in "*i"
    }
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": stages})
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.nvdisasm.path
    machine = subprocess.run([tool, "-c", str(binary)], capture_output=True, text=True, check=True).stdout
    return compiled.asm["ptx"], machine, compiled.metadata.shared


NO_EPILOGUE = {"EPILOGUE": None, "extra0": None, "extra1": None}
GATHER = {
    "WORLD": 8,
    "PARTS": 2,
    "SENDS": True,
    "PIECES": 16,
    "PUSHERS": 8,
    "BLOCK": 8192,
    "BATCH": 8,
    "THREADS": 256,
    "TRANSPOSED": True,
    "SCATTERED": False,
    **NO_EPILOGUE,
}
SLICES = {
    "WORLD": 8,
    "PARTS": 1,
    "SLICES": 4,
    "PIECES": 16,
    "PUSHERS": 16,
    "ROWS": 8,
    "COLUMNS": 1024,
    "THREADS": 256,
    "TRANSPOSED": True,
    "SCATTERED": False,
    **NO_EPILOGUE,
}


def _multiplying(machine: str) -> list[list[str]]:
    """The machine code between each multiplication and the next one, inside the loops over K."""
    lines = machine.splitlines()
    multiplies = [i for i, line in enumerate(lines) if "HGMMA" in line]
    return [lines[a:b] for a, b in zip(multiplies, multiplies[1:]) if b - a < 100]


REDUCE = {
    "WORLD": 8,
    "PUSHERS": 12,
    "UNIT": 4,
    "SLAB": 32,
    "THREADS": 256,
    "HALVES": True,
    "TRANSPOSED": True,
    **NO_EPILOGUE,
}
SCATTER = {
    "WORLD": 8,
    "STAGGER": 150,
    "BATCH": 8,
    "THREADS": 256,
    "TRANSPOSED": True,
    "BIAS": False,
    "EXCHANGES": False,
    "BY_COLUMNS": False,
    "EARLY": 0,
    "COPY": 0,
    **NO_EPILOGUE,
}
EXCHANGE = {**SCATTER, "EXCHANGES": True, "EARLY": 7, "COPY": 8192}


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        pytest.param(
            all_gather_matmul,
            {**GATHER, "KEEP": True, "HALVES": False, "BIASES": 1},
            id="all_gather_matmul",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            all_gather_matmul,
            {**GATHER, "SENDS": False, "KEEP": False, "HALVES": False, "BIASES": 1},
            id="all_gather_matmul by copies",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            all_gather_matmul_slices,
            {**SLICES, "KEEP": False, "HALVES": False, "BIASES": 1},
            id="all_gather_matmul_slices",
        ),
        pytest.param(matmul_reduce_scatter, {**SCATTER, "HALVES": False, "BIAS": True}, id="matmul_reduce_scatter"),
        pytest.param(
            matmul_reduce_scatter,
            {**EXCHANGE, "HALVES": False, "BIAS": True},
            id="matmul_all_to_all",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            matmul_reduce_scatter,
            {**EXCHANGE, "HALVES": False, "BY_COLUMNS": True},
            id="matmul_all_to_all by columns",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            all_gather_matmul,
            {**GATHER, "SCATTERED": True, "KEEP": False, "HALVES": False, "BIASES": 1},
            id="all_to_all_matmul",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            all_gather_matmul_slices,
            {**SLICES, "SCATTERED": True, "KEEP": False, "HALVES": False, "BIASES": 1},
            id="all_to_all_matmul in slices",
            marks=pytest.mark.thorough,
        ),
        pytest.param(matmul_all_reduce, {**REDUCE, "BIAS": True}, id="matmul_all_reduce"),
    ],
)
def test_sums_stay_in_registers(kernel: Any, constants: dict[str, Any], tmp_path: Path) -> None:
    """Accumulators stay in registers. Data for peers is stored in bulk or 16 bytes at a time. The loops over K share
    one region of shared memory, so the kernel fits into 227 KiB."""
    types, others = _weights(1, 256) if kernel in (all_gather_matmul, all_gather_matmul_slices) else ({}, {})
    text, machine, shared = _assembled(
        kernel, constants | others, (128, 256, 64), tmp_path, 4 if kernel is matmul_all_reduce else 3, types
    )
    assert "wgmma.mma_async" in text and "st.global.v4" in text and shared <= 227 * 1024
    loops = _multiplying(machine)
    assert len(loops) >= (2 if kernel is matmul_all_reduce else 3)
    assert not [line for loop in loops for line in loop if "LDL" in line or "STL" in line], (
        "a loop over K keeps something on the stack"
    )
    # If each thread read a flag by itself, only some threads might see the signal. They would diverge and not meet at a
    # barrier.
    assert "ld.volatile" not in text


def test_all_slices_of_a_contraction_share_a_loop(tmp_path: Path) -> None:
    """There is one loop over K. It reads this rank's own rows or the workspace, each through a tensor map. The kernel
    selects the map before the loop, and does not copy it to the stack."""
    left_out = ("SCATTERED", *NO_EPILOGUE)
    constants = {name: value for name, value in GATHER.items() if name not in left_out}
    constants |= {"PARTS": 4, "PUSHERS": 12, "KEEP": False, "HALVES": True, "BIAS": True}
    text, machine, shared = _assembled(all_to_all_contraction, constants, (128, 256, 64), tmp_path, 4)
    assert text.count("wgmma.mma_async") == 4 and shared <= 227 * 1024
    assert ".local" not in text and "ld.volatile" not in text
    assert not [line for loop in _multiplying(machine) for line in loop if "LDL" in line or "STL" in line]


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.thorough), 4])
def test_weights_of_one_launch_share_a_loop(count: int, tmp_path: Path) -> None:
    """There is one loop over K for own tiles and one for the peers' tiles, whatever the number of weights. A weight's
    tensor map is selected before the loop. It must not be copied to the stack, where the bulk copy unit could not read
    it."""
    types, others = _weights(count, 256, halves=True)
    constants = (
        GATHER
        | others
        | {
            "PARTS": 4,
            "PUSHERS": 12,
            "KEEP": False,
            "HALVES": True,
            "BIASES": 0b0101 & (1 << count) - 1,
        }
    )
    text, machine, shared = _assembled(all_gather_matmul, constants, (128, 256, 64), tmp_path, 4, types)
    # Each of the two loops has four loads of each operand: three fill the stages before the loop, and one is inside.
    assert (
        text.count("wgmma.mma_async") == 2 * 4
        and text.count("cp.async.bulk.tensor.2d.shared") == 2 * 2 * 4
        and shared <= 227 * 1024
    )
    assert ".local" not in text and "ld.volatile" not in text and "st.global.v4" in text
    loops = _multiplying(machine)
    assert len(loops) == 2 * 3 and not [line for loop in loops for line in loop if "LDL" in line or "STL" in line], (
        "the loop over K keeps something on the stack"
    )


SILU = ((), (("neg", "x"), ("exp", "t0"), ("add", "t1", 1.0), ("div", "x", "t2")))
SIGMOID_AND_RESIDUAL = (("full", "row"), (("sigmoid", "x"), ("mul", "t0", "e1"), ("add", "e0", "t1")))


@pytest.mark.parametrize(
    ("kernel", "programs", "words"),
    [
        pytest.param(
            *(all_gather_matmul, (SILU, None, SILU), 0),
            id="all_gather_matmul, activations of two of three weights",
            marks=pytest.mark.thorough,
        ),
        pytest.param(all_gather_matmul, (SIGMOID_AND_RESIDUAL,), 40, id="all_gather_matmul, extra tensors"),
        pytest.param(
            *(matmul_reduce_scatter, (SIGMOID_AND_RESIDUAL,), 100),
            id="matmul_reduce_scatter, extra tensors",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            *(matmul_all_reduce, (SIGMOID_AND_RESIDUAL,), 100),
            id="matmul_all_reduce, extra tensors",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_epilogues_keep_the_loops_over_k_off_the_stack(
    kernel: Any, programs: tuple[Any, ...], words: int, tmp_path: Path
) -> None:
    """An op on a whole accumulator needs registers for a second one. At most ``words`` instructions may access the
    stack, all outside the loops over K. Their number is checked with Triton 3.6 only."""
    constants = (
        {**GATHER, "PARTS": 4, "KEEP": False, "BIASES": 0}
        if kernel is all_gather_matmul
        else SCATTER
        if kernel is matmul_reduce_scatter
        else {**REDUCE, "BIAS": False}
    )
    types, others = _weights(len(programs), 256, halves=True) if kernel is all_gather_matmul else ({}, {})
    constants = constants | others | {"HALVES": True, "EPILOGUE": function_of(programs)}
    if SIGMOID_AND_RESIDUAL in programs:
        types |= {"extra0": "*bf16", "extra1": "*bf16"}
        constants = {name: value for name, value in constants.items() if not name.startswith("extra")}
    text, machine, shared = _assembled(kernel, constants, (128, 256, 64), tmp_path, 4, types)
    assert shared <= 227 * 1024 and "ld.volatile" not in text
    if SIGMOID_AND_RESIDUAL in programs:
        assert re.search(r"ld\.global\.v4", text), "no residual is read 16 bytes at a time"
    assert not [line for loop in _multiplying(machine) for line in loop if "LDL" in line or "STL" in line], (
        "a loop over K keeps something on the stack"
    )
    assert not triton.__version__.startswith("3.6") or len(re.findall("LDL|STL", machine)) <= words


@pytest.mark.parametrize(
    ("transposed", "shards"),
    [
        pytest.param(True, {"shards": 1}, id="all-reduce", marks=pytest.mark.thorough),
        pytest.param(False, {}, id="reduce-scatter"),
    ],
)
def test_a_matmul_in_groups_stores_in_bulk_and_counts_after_a_fence(
    transposed: bool, shards: dict[str, int], tmp_path: Path
) -> None:
    """A block counts a tile after the tile's bulk stores are done. After a barrier, one thread adds to the count with a
    release."""
    right = f"tensordesc<bf16[{'256, 64' if transposed else '64, 256'}]>"
    constants = {"BATCH": 8, "THREADS": 256, "HALVES": True, "TRANSPOSED": transposed, "BIAS": True, **shards}
    text, machine, shared = _assembled(matmul_in_groups, constants, (128, 256, 64), tmp_path, 4, {"b_desc": right})
    assert (
        "wgmma.mma_async" in text
        and "cp.async.bulk.tensor.2d.global.shared" in text
        and shared <= 227 * 1024
        and "ld.volatile" not in text
    )
    (count,) = re.finditer(r"red\.release\.sys\.global\.add\.s32(?=[^\n]*, %r)", text)
    before = re.findall(
        r"bar\.sync|fence\.proxy\.async\.global|cp\.async\.bulk\.wait_group"
        r" 0|cp\.async\.bulk\.tensor\.2d\.global\.shared",
        text[: count.start()],
    )
    assert before[-3:] == ["cp.async.bulk.wait_group 0", "fence.proxy.async.global", "bar.sync"]
    lines = machine.splitlines()
    multiplies = [i for i, line in enumerate(lines) if "HGMMA" in line]
    loop = lines[multiplies[0] : multiplies[-1]]
    assert len(loop) < 200 and not [line for line in loop if "LDL" in line or "STL" in line], (
        "the loop over K keeps something on the stack"
    )


@pytest.mark.parametrize(
    ("kernel", "constants", "counts"),
    [
        pytest.param(
            matmul_all_reduce, {**REDUCE, "BIAS": True}, r"(?:atom|red)\.global\.gpu\.release\.add", id="all-reduce"
        ),
        pytest.param(
            matmul_reduce_scatter,
            {**SCATTER, "HALVES": True},
            r"atom\.global\.gpu\.acq_rel\.add",
            id="reduce-scatter",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            matmul_reduce_scatter,
            {**EXCHANGE, "HALVES": True},
            r"atom\.global\.gpu\.acq_rel\.add",
            id="all-to-all",
        ),
    ],
)
def test_a_tile_is_counted_when_its_bulk_stores_are_done(
    kernel: Any, constants: dict[str, Any], counts: str, tmp_path: Path
) -> None:
    """One thread counts a tile with a release. Before that, the block waits for its bulk stores, puts a proxy fence
    after them so that the release covers them (``store_fence``), and meets at a barrier."""
    text, _, _ = _assembled(kernel, constants, (128, 256, 64), tmp_path, 4, {})
    # Triton 3.9 adds a barrier before an atomic, and turns an atomic whose result is not used into a ``red``.
    found = re.findall(rf"bar\.sync|fence\.proxy\.async\.global|cp\.async\.bulk\.wait_group 0|{counts}", text)
    events = [event for event, before in zip(found, ["", *found]) if event != "bar.sync" or before != event]
    counted = [i for i, event in enumerate(events) if event.startswith(("atom", "red"))]
    fenced = [
        i
        for i in counted
        if events[max(0, i - 3) : i] == ["cp.async.bulk.wait_group 0", "fence.proxy.async.global", "bar.sync"]
    ]
    # In ``matmul_reduce_scatter``, the last add counts blocks that have ended.
    assert fenced and fenced == (counted if kernel is matmul_all_reduce else counted[:-1]), events


def test_a_waiting_kernel_fits_beside_a_matmul() -> None:
    """The kernel has one warp and no shared memory. After its wait and a barrier, it resets the counter and reads the
    abort word."""
    types = dict.fromkeys(("counters", "stop"), "*i32") | {"c": "*bf16", "patience": "i64", "BLOCK": "constexpr"}
    signature = {name: types.get(name, "i32") for name in wait_for_group.arg_names}
    source = ASTSource(wait_for_group, signature, {(wait_for_group.arg_names.index("BLOCK"),): 256})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    text = compiled.asm["ptx"]
    assert compiled.metadata.shared == 0
    events = re.findall(r"ld\.acquire\.sys|bar\.(?:sync|warp\.sync)|[ls][dt]\.global\.(?:cg\.)?b32", text)
    assert (
        events[0] == "ld.acquire.sys" and "bar" in events[1] and events[2:] == ["st.global.b32", "ld.global.cg.b32"]
    ), events
