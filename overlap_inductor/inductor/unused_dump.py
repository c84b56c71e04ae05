# SPDX-License-Identifier: Apache-2.0
"""Warns at the first compile that ``OVERLAP_INDUCTOR_DUMP`` alone does not switch overlap on."""

from __future__ import annotations

import functools
import logging
from typing import Any

from overlap_inductor.torch_compat import telemetry

log = logging.getLogger("overlap_inductor")

UNUSED = (
    "OVERLAP_INDUCTOR_DUMP is set, but overlap_inductor is not switched on, so no report is written. Set"
    " OVERLAP_INDUCTOR=1 (or OVERLAP_INDUCTOR=report, which leaves the graphs alone), or call"
    " overlap_inductor.enable() before the first call of a compiled function."
)


def say_at_first_compile() -> None:
    """At the first call of ``compile_fx``, log ``UNUSED`` on rank 0 if overlap is not switched on.

    The import of Inductor is too early for this warning. The program may still call ``enable()``, or compile with the
    backend ``overlap_inductor``.
    """
    from torch._inductor import compile_fx

    original = compile_fx.compile_fx
    called = False

    @functools.wraps(original)
    def first(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        if compile_fx.compile_fx is first:
            compile_fx.compile_fx = original
        if not called:
            called = True
            _say()
        return original(*args, **kwargs)

    compile_fx.compile_fx = first


def _say() -> None:
    from overlap_inductor.inductor import hooks

    if not hooks.installed() and telemetry.global_rank() == 0:
        log.warning(UNUSED)
