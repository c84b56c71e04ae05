# SPDX-License-Identifier: Apache-2.0
"""Switch the pass on for every Inductor compile of the process, and off again.

This module puts one pass object into each *slot*, a setting of Inductor that holds custom passes
(``inductor.pass_slot``). At each compile, the object takes the first of these sets of switches that exists:

1. those of the innermost ``overlap()`` of this thread;
2. those of ``enable()``;
3. those of the environment.

After ``disable()``, another package's pass may still call the object. The object then does nothing, unless the calling
thread is inside an ``overlap()`` of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from overlap_inductor.config import OverlapConfig
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.inductor import import_hook
from overlap_inductor.inductor.import_hook import when_imported
from overlap_inductor.torch_compat import telemetry
from overlap_inductor.torch_compat.compiled import compiled_by_inductor
from overlap_inductor.torch_compat.versions import unsupported_reason

log = logging.getLogger("overlap_inductor")

_Entry = tuple[object, OverlapConfig]


class _Switch:
    base: OverlapConfig | None = None
    from_environment = False
    environment: OverlapConfig | None = None
    waiting: list[Callable[[], None]] = []
    shared_passes: dict[str, Any] = {}
    """For each slot, the pass object that is put into it."""
    applied = False
    replaced: dict[str, tuple[Any, Any]] = {}
    """For each slot, its values before and after the pass was put in. When overlap is switched off, a slot that still
    holds the second value gets the first value back."""


_switch = _Switch()
_stack: ContextVar[tuple[_Entry, ...]] = ContextVar("overlap_inductor", default=())
_lock = threading.RLock()


def enable(**fields: Any) -> OverlapConfig:
    """Overlap in every graph that Inductor compiles from now on, in all threads, until ``disable()``. Inside a block of
    ``overlap()``, that block's switches are in force instead.

    A second call replaces the switches. Graphs that are already compiled stay as they are. If new switches could change
    their code, rank 0 logs a warning.

    Args:
        fields: fields of ``OverlapConfig``. For other fields, the environment's variables hold.

    Raises:
        ConfigError: a field or a variable has a value that is not allowed.
        UnsupportedError: this torch is too old or too new.
    """
    require_supported_torch()
    config = OverlapConfig.from_environment(**fields)
    with _lock:
        before = _switch.base or _switch.environment
        _switch.base = config
        _apply()
    if _key(before) != _key(config):
        _warn_about_compiled()
    return config


def disable() -> None:
    """Switch off ``enable()``, the environment's switch and every ``overlap()`` around this call.

    On this thread, Inductor's slots then hold only what others put there. On another thread that has already read or
    assigned a slot, the pass may stay in the slot. Inductor's functions are no longer wrapped.

    Graphs that are already compiled stay as they are. A backward that is not compiled yet gets no overlap, unless
    ``backend="overlap_inductor"`` compiled its forward.
    """
    with _lock:
        # This also cancels the hooks of the autoload entry point.
        import_hook.cancel_all()
        _switch.base = _switch.environment = None
        _switch.from_environment = False
        _stack.set(())
        _cancel_waiting()
        _switch.applied = False
        if _switch.shared_passes:
            from overlap_inductor.inductor import hooks

            _fill_slots()
            hooks.uninstall()


@contextmanager
def overlap(**fields: Any) -> Iterator[OverlapConfig]:
    """Overlap in all graphs that are compiled inside the ``with`` block on this thread, or, with ``mode="off"``, in
    none.

    The first call of a compiled function compiles it, so this call must be inside the block. The backward gets the
    switches of its forward, even after the block. Arguments and errors are those of ``enable``.
    """
    require_supported_torch()
    entry = (object(), OverlapConfig.from_environment(**fields))
    _stack.set((*_stack.get(), entry))
    with _lock:
        _apply()
    try:
        yield entry[1]
    finally:
        # Removed by identity: generators and coroutines may leave their blocks in any order.
        _stack.set(tuple(e for e in _stack.get() if e is not entry))
        with _lock:
            _apply()


def enable_from_environment() -> None:
    """``enable()`` for the autoload entry point: the first compile reads the variables. If this torch is not supported,
    this function only logs a warning."""
    reason = unsupported_reason()
    if reason:
        log.warning("OVERLAP_INDUCTOR is set, but %s", reason)
        return
    with _lock:
        _switch.from_environment = True
        _apply()


def effective() -> OverlapConfig | None:
    """The configuration that a compile on this thread gets now; ``None`` if nothing is switched on. Raises
    ``ConfigError`` if a variable that is in force has a value that is not allowed."""
    stack = _stack.get()
    if stack:
        return stack[-1][1]
    if _switch.base is not None or not _switch.from_environment:
        return _switch.base
    if _switch.environment is None:
        _switch.environment = OverlapConfig.from_environment()
    return _switch.environment


def require_supported_torch() -> None:
    """Raises ``UnsupportedError`` if this torch is too old or too new."""
    reason = unsupported_reason()
    if reason:
        raise UnsupportedError(reason)


def install_hooks() -> None:
    """Wrap Inductor's functions now. Imports Inductor's modules."""
    from overlap_inductor.inductor import hooks
    from overlap_inductor.passes.pipeline import POST_GRAD

    hooks.install(effective, _shared_pass(POST_GRAD))


def _key(config: OverlapConfig | None) -> object:
    """The values that decide the generated code; ``None`` for every configuration that is off."""
    return config.cache_key() if config is not None and config.mode != "off" else None


def _warn_about_compiled() -> None:
    compiled = compiled_by_inductor()
    if not compiled:
        return
    names = ", ".join(compiled[:3]) + (", ..." if len(compiled) > 3 else "")
    log.log(
        logging.WARNING if telemetry.global_rank() == 0 else logging.DEBUG,
        "overlap_inductor.enable() applies to functions that are compiled from now on. These are compiled already and"
        " keep their code: %s. To compile them with the new switches, call torch.compiler.reset() now, or call enable()"
        " before their first call.",
        names,
    )


def _apply() -> None:
    """Put the pass into the slots or take it out, and wrap Inductor's functions. Each step changes a
    module of Inductor. If the module is imported already, the step runs now; else it runs right after the import."""
    _cancel_waiting()
    if not _wanted() and not _switch.applied:
        return
    _switch.applied = True
    _switch.waiting = [
        when_imported("torch._inductor.config", _fill_slots),
        when_imported("torch._inductor.compile_fx", install_hooks),
    ]


def _wanted(everywhere: bool = False) -> bool:
    """Whether the slots should hold the passes on this thread. If ``everywhere``, the answer is for threads
    without an ``overlap()`` of their own. Does not read the environment."""
    stack = () if everywhere else _stack.get()
    if stack:
        return stack[-1][1].mode != "off"
    if _switch.base is not None:
        return _switch.base.mode != "off"
    return _switch.from_environment


def _fill_slots() -> None:
    from overlap_inductor.passes.pipeline import SLOTS

    for slot in SLOTS:
        _fill_slot(slot)


def _fill_slot(slot: str) -> None:
    from overlap_inductor.inductor import pass_slot
    from overlap_inductor.passes.pipeline import passes_in

    ours, value, works = _shared_pass(slot), pass_slot.read(slot), bool(passes_in(slot))
    before, after = _switch.replaced.get(slot, (None, None))
    wanted = _wanted() and works
    if wanted:
        if not any(p is ours for p in pass_slot.members(value)):
            _switch.replaced[slot] = (value, pass_slot.with_pass(value, ours))
            pass_slot.write(_switch.replaced[slot][1], slot)
    elif after is not None and value is after:
        pass_slot.write(before, slot)
    else:
        pass_slot.write(pass_slot.without_pass(value), slot)
    if not wanted:
        _switch.replaced.pop(slot, None)
    pass_slot.set_for_other_threads(ours if works and _wanted(everywhere=True) else None, slot)


def _shared_pass(slot: str) -> Any:
    if slot not in _switch.shared_passes:
        from overlap_inductor.inductor.pass_slot import OverlapPass

        _switch.shared_passes[slot] = OverlapPass(effective, slot)
    return _switch.shared_passes[slot]


def _cancel_waiting() -> None:
    for cancel in _switch.waiting:
        cancel()
    _switch.waiting = []
