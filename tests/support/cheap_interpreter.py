# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter faster: leaves out repeated work that takes most of its time."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def interpret_cheaply() -> None:
    """Changes the interpreter in this process and its forks. At each launch, it lists all members of
    ``triton.language`` to find the builtins. They are always the same, so they are listed once. The first launch of a
    process imports Gluon. The import here spares each rank that."""
    import triton.experimental.gluon  # noqa: F401
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def builtins(pkg: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(pkg) if is_builtin(member)]

    def patch(pkg: Any, builder: Any, scope: Any) -> None:
        for name in builtins(pkg):
            # (While a kernel runs, the members are patched already.)
            if is_builtin(member := getattr(pkg, name)):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    interpreter._patch_builtin = patch
    # The members are listed while none of them is patched.
    import triton.language as tl

    for pkg in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins(pkg)
