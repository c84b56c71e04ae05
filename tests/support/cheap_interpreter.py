# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter faster: leaves out repeated work that takes most of its time."""

from __future__ import annotations

import functools
import inspect
import time
from typing import Any

from tests.support.cheap_tensors import compute_cheaply


def interpret_cheaply() -> None:
    """Change the interpreter in this process and its forks. The first launch of a process imports Gluon. So Gluon is
    imported here, and not by each rank."""
    import triton.experimental.gluon  # noqa: F401
    from triton.runtime import interpreter

    _list_builtins_once()
    _patch_language_once()
    # By default, the interpreter computes integer sums and products a second time, in 64 bits, to find overflows. It
    # reports an overflow only with its option ``debug``, so the second computation is switched off.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _look_up_dtypes_once()
    _sleep_in_waits()
    compute_cheaply()


def rewrite_kernels() -> None:
    """Parse and compile the kernels and device functions that exist now. Without this call, every rank would parse and
    compile each function at the function's first call."""
    import gc

    from triton.runtime.interpreter import InterpretedFunction

    for function in gc.get_objects():
        if isinstance(function, InterpretedFunction):
            function.rewrite()


def _list_builtins_once() -> None:
    """List the builtins of ``triton.language`` once, and not at each launch."""
    import triton.language as tl
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def builtins(pkg: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(pkg) if is_builtin(member)]

    def patch(pkg: Any, builder: Any, scope: Any) -> None:
        for name in builtins(pkg):
            # While a kernel runs, the members are patched already.
            if is_builtin(member := getattr(pkg, name)):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    interpreter._patch_builtin = patch
    for pkg in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins(pkg)


def _patch_language_once() -> None:
    """Patch ``triton.language`` only if it is not patched yet, and not at each launch and call of a device function."""
    import triton.language as tl
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        return [module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())]

    def patch_once(fn: Any) -> Any:
        if any(is_builtin(module.load) for module in (tl, *languages(fn))):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _look_up_dtypes_once() -> None:
    """Look up numpy's dtype of each Triton dtype once. The interpreter makes a dictionary of all dtypes at each
    look-up."""
    from triton.language import dtype
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def look_up_once(of: Any) -> Any:
        if type(of) is not dtype:
            return look_up(of)
        if of.name not in known:
            known[of.name] = look_up(of)
        return known[of.name]

    interpreter._get_np_dtype = look_up_once


def _sleep_in_waits() -> None:
    """A wait adds 0 to its flag until the flag has the expected value. A rank sleeps before it looks again, because the
    rank that sets the flag needs the processor."""
    from triton.runtime.interpreter import InterpreterBuilder

    atomic = InterpreterBuilder.create_atomic_rmw
    last: list[int | None] = [None]

    def atomic_or_sleep(self: Any, op: Any, ptr: Any, val: Any, *others: Any) -> Any:
        flag = int(ptr.data[0]) if ptr.data.size == 1 and not val.data.any() else None
        if flag is not None and flag == last[0]:
            time.sleep(0.001)
        last[0] = flag
        return atomic(self, op, ptr, val, *others)

    InterpreterBuilder.create_atomic_rmw = atomic_or_sleep
