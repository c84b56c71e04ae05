# SPDX-License-Identifier: Apache-2.0
"""Makes arithmetic in Triton's interpreter faster. Most values of a kernel are single integers, and the interpreter
spends most of its time on their types and shapes."""

from __future__ import annotations

import math
from typing import Any


def compute_cheaply() -> None:
    """Change the interpreter in this process and its forks. Each changed function returns what Triton's own function
    returns. In rare cases, it calls Triton's own function."""
    _unwrap_quickly()
    _compare_dtypes_by_identity_first()
    _make_shapes_once()
    _check_arrays_once()
    _make_constants_once()
    _check_like_operands_quickly()
    _call_builtins_directly()


def _unwrap_quickly() -> None:
    """``_unwrap_if_constexpr`` asks first for the most frequent types of a value."""
    from triton.language import core

    unwrap = core._unwrap_if_constexpr
    as_they_are = {int, bool, float, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrap_quickly(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in as_they_are else unwrap(value)

    core._unwrap_if_constexpr = unwrap_quickly


def _compare_dtypes_by_identity_first() -> None:
    from triton.language import core

    equal = core.dtype.__eq__

    def equal_quickly(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    core.dtype.__eq__ = equal_quickly


def _make_shapes_once() -> None:
    """All tensors of one shape share the objects that hold it. So do all block types of one shape and element type. No
    kernel changes these objects."""
    from triton.language import core

    make_block = core.block_type.__init__
    blocks: dict[Any, tuple[Any, Any, str]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape.values if type(shape) is core.tuple else shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def make(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in shapes:
            sizes = core.tuple([core.constexpr(size) for size in shape])
            shapes[shape] = sizes, core.constexpr(math.prod(shape))
        self.shape, self.numel = shapes[shape]

    core.block_type.__init__ = make_block_once
    core.tensor.__init__ = make


def _check_arrays_once() -> None:
    """A tensor checks that an element of its array has no more bytes than its dtype. The check runs once for each dtype
    and size of an element."""
    from triton.runtime.interpreter import TensorHandle

    check = TensorHandle.__post_init__
    passed = set()

    def make(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        key = dtype.name, data.itemsize
        if key not in passed:
            check(self)
            passed.add(key)

    TensorHandle.__init__ = make


def _make_constants_once() -> None:
    """Tensors of one constant share its array, which is read-only."""
    from triton.language.semantic import TritonSemantic

    make = TritonSemantic.scalar_constant
    known: dict[Any, Any] = {}

    def make_once(self: Any, value: Any, dtype: Any) -> Any:
        if type(value) not in (int, float):
            return make(self, value, dtype)
        key = type(value), value, dtype.name
        if key not in known:
            known[key] = make(self, value, dtype)
            known[key].handle.data.setflags(write=False)
        return known[key]

    TritonSemantic.scalar_constant = make_once


def _check_like_operands_quickly() -> None:
    """Two operands of one type and shape need no conversion. An integer beside a tensor of integers gets the tensor's
    type. For a quotient, Triton's own function converts half-precision operands to fp32. So the quick check leaves
    all quotients of floating-point tensors to Triton's own function."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_type_checking_impl
    signed = (core.int32, core.int64)

    def check_quickly(self: Any, left: Any, right: Any, *flags: bool) -> tuple[Any, Any]:
        kinds = type(left), type(right)
        if kinds == (core.tensor, core.tensor):
            if left.dtype is right.dtype and left.shape is right.shape and type(left.dtype) is core.dtype:
                divides = flags[3:] == (True,)
                if not divides or left.dtype.is_int():
                    return left, right
        elif flags[2:3] != (False,):
            if kinds == (core.tensor, int) and left.dtype in signed and -(2**31) <= right < 2**31:
                return self.broadcast_impl_value(left, self.scalar_constant(right, left.dtype))
            if kinds == (int, core.tensor) and right.dtype in signed and -(2**31) <= left < 2**31:
                return self.broadcast_impl_value(self.scalar_constant(left, right.dtype), right)
        return check(self, left, right, *flags)

    TritonSemantic.binary_op_type_checking_impl = check_quickly


def _call_builtins_directly() -> None:
    """A builtin of ``triton.language`` is called without its wrapper. The wrapper checks that ``_semantic`` is passed,
    and the interpreter always passes ``_semantic``."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = TritonSemantic(builder)
        direct = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return direct(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch
