# SPDX-License-Identifier: Apache-2.0
"""Assembles the kernels of ``tests.gpu.check_litmus`` (the *litmus kernels*) for Hopper, without a GPU. Fails if a
litmus kernel calls a function of the package with arguments that the function no longer has."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip(
    "triton", reason="Triton comes with the package's test extra; an environment without this extra has none"
)
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tests.gpu import check_litmus as litmus  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no assembler")

WRITERS = sorted(
    {
        writer
        for writer, _, _ in litmus.WAYS
        if not writer.startswith("copy engine") and not writer.startswith("two blocks")
    }
)
READERS = sorted({reader for _, reader, _ in litmus.WAYS})
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    *((litmus.write_rounds, {"way": way}) for way in WRITERS),
    *((litmus.read_rounds, {"way": way}) for way in READERS),
    *((litmus.write_halves_each, {"added": added}) for added in (True, False)),
    *(
        (kernel, {"fence": fence})
        for kernel in (litmus.send_inside, litmus.write_halves_in_bulk)
        for fence in (True, False)
    ),
    *((kernel, {}) for kernel in (litmus.write_halves, litmus.wait_for, litmus.give)),
]


@pytest.mark.parametrize(
    ("kernel", "chosen"), KERNELS, ids=lambda value: getattr(value, "__name__", None) or str(value.get("way", ""))
)
def test_a_litmus_kernel_can_be_assembled(kernel: Any, chosen: dict[str, Any]) -> None:
    names = kernel.arg_names
    constants = {
        name: value for name, value in {**chosen, "R": litmus.ROWS, "C": litmus.COLUMNS}.items() if name in names
    }
    pointers = ("peer", "mine", "acknowledged", "flags", "peer_flags", "counters", "stop", "wrong", "flag")
    types = (
        dict.fromkeys(pointers, "*i32")
        | dict.fromkeys(("desc", "peer_desc"), f"tensordesc<i32[{litmus.ROWS}, {litmus.COLUMNS}]>")
        | {"patience": "i64", "table": "*i64"}
    )
    types["half_desc"] = f"tensordesc<i32[{litmus.ROWS // 2}, {litmus.COLUMNS}]>"
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["cubin"]
