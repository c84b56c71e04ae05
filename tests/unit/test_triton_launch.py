# SPDX-License-Identifier: Apache-2.0
"""``PreparedKernel`` binds arguments by name. ``_Direct`` calls Triton's C launcher, and passes the arguments in the
order of the kernel's parameters."""

from __future__ import annotations

import sys
from types import ModuleType
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.torch_compat import triton_launch
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.torch_compat.triton_launch import bound


@triton.jit
def scaled_sum(x, factor, y, out, offset, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, (tl.load(x + at) + tl.load(y + at)) * factor + offset)


@triton.jit
def with_default(x, factor=2):
    tl.store(x, factor)


FIXED = {"factor": 3, "offset": 10, "BLOCK": 16}
VARYING = dict.fromkeys(("x", "y", "out"))


def test_arguments_are_put_in_the_kernels_order() -> None:
    fixed = {name: FIXED[name] for name in ("BLOCK", "offset", "factor")}
    varying = dict.fromkeys(("out", "y", "x"))
    assert list(bound(scaled_sum, varying, fixed)) == ["x", "factor", "y", "out", "offset", "BLOCK"]
    assert bound(scaled_sum, VARYING, FIXED) == bound(scaled_sum, varying, fixed)


def test_an_argument_that_is_not_given_gets_its_default() -> None:
    assert bound(with_default, {"x": 1}, {}) == {"x": 1, "factor": 2}
    assert bound(with_default, {"x": 1}, {"factor": 5}) == {"x": 1, "factor": 5}


@pytest.mark.parametrize(
    ("varying", "fixed", "problem"),
    [
        (("x", "y"), FIXED, "out is missing"),
        (("x", "y", "out"), {"factor": 3}, "offset is missing; BLOCK is missing"),
        (("x", "y", "out", "z"), FIXED, "z is not a parameter"),
        (("x", "y", "out"), {**FIXED, "blocks": 1}, "blocks is not a parameter"),
        (("x", "y", "out", "factor"), FIXED, "factor is both varying and fixed"),
    ],
)
def test_a_wrong_name_is_an_error_at_preparation(varying: tuple[str, ...], fixed: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError, match=f"arguments of kernel scaled_sum: {problem}"):
        PreparedKernel(scaled_sum, 1, dict.fromkeys(varying), fixed)


class _OnGpu(torch.Tensor):
    """A CPU tensor that reports a GPU as its device."""

    is_cuda = True  # type: ignore[assignment]
    device = SimpleNamespace(index=0)  # type: ignore[assignment]


def test_the_direct_launch_replaces_only_the_varying_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed and varying arguments are mixed, and the varying ones come in another order than the kernel's. A descriptor
    becomes several arguments of the C launcher: map, shape and strides."""
    given: list[tuple[Any, ...]] = []
    driver = ModuleType("triton.backends.nvidia.driver")
    driver.TMA_DTYPE_DEVICE_TO_HOST = {0: 0}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", driver)
    import triton.backends.nvidia as nvidia

    monkeypatch.setattr(nvidia, "driver", driver, raising=False)
    utilities = SimpleNamespace(fill_tma_descriptor=lambda address, *meta: ("map", address))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utilities)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    run = SimpleNamespace(
        launch=lambda *values: given.append(values),
        global_scratch_size=0,
        num_ctas=1,
        launch_cooperative_grid=False,
        launch_pdl=False,
    )
    # ``_Direct`` would inspect the closure of a Python function. A launcher in C has no closure, and neither has this
    # object.
    run.launch = _callable(run.launch)
    meta = {"swizzle": 0, "elem_size": 2, "elem_type": 0, "block_size": [16, 16]}
    metadata = SimpleNamespace(tensordesc_meta=[meta, meta])
    compiled = SimpleNamespace(run=run, function=1, packed_metadata=None, metadata=metadata)
    fixed = torch.Tensor._make_subclass(_OnGpu, torch.zeros(8))
    moving, first, second = torch.zeros(32, 64), torch.zeros(4), torch.zeros(4)
    whole = torch.zeros(16, 16)
    arguments = [
        fixed,
        first,
        TensorDescriptor.from_tensor(moving, [16, 16]),
        5,
        TensorDescriptor.from_tensor(whole, [16, 16]),
        None,
    ]
    launch = triton_launch._Direct(compiled, 4, arguments, [5, 2, 1], [], None, lambda *a: pytest.fail("not direct"))
    for a, b, c in ((second, moving, first), (None, torch.zeros(32, 64), second), (3, moving, first)):
        launch(a, b, c)
        grid, arguments_given = given[-1][:4], given[-1][-14:]
        assert grid == (4, 1, 1, 77)
        assert arguments_given[0] is fixed and arguments_given[1] == c.data_ptr()
        assert arguments_given[2:7] == (("map", b.data_ptr()), 32, 64, 64, 1)
        assert arguments_given[7:13] == (5, ("map", whole.data_ptr()), 16, 16, 16, 1)
        assert arguments_given[13] == (a.data_ptr() if isinstance(a, torch.Tensor) else a)


def test_a_descriptor_may_have_any_rows() -> None:
    """The tensor map and the shape that a launch passes are those of its own tensor."""
    meta = {"swizzle": 0, "elem_size": 2, "elem_type": 0, "block_size": [16, 16]}
    encoded: list[Any] = []

    def encode(*facts: Any) -> Any:
        encoded.append(facts)
        return "map", facts[0], tuple(facts[5])

    x = torch.zeros(64, 32)
    maps = triton_launch._Maps(TensorDescriptor.from_tensor(x, [16, 16]), meta, encode, {0: 0}, True)
    for rows in (64, 10, 64):
        address = x.data_ptr()
        assert maps.flat(x[:rows]) == [("map", address, (rows, 32)), rows, 32, 32, 1]
    assert len(encoded) == 2


def _callable(function: Any) -> Any:
    class Launcher:
        def __call__(self, *values: Any) -> None:
            function(*values)

    return Launcher()
