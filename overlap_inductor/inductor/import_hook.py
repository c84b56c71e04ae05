# SPDX-License-Identifier: Apache-2.0
"""Runs a callback right after a module is first imported, without importing it.

``import torch`` must not pay for ``torch._inductor`` (two seconds), but the pass has to be in place before the first
compile reads the configuration. A finder in ``sys.meta_path`` waits for the one module and then removes itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NEEDED = "overlap_inductor.inductor.pass_slot"
"""The module that our callbacks use. It may itself be the first to import the module for which they wait. Then they
wait until its own body has run (``resume``)."""
_postponed: list[Callable[[], None]] = []


def _run(callback: Callable[[], None]) -> None:
    if getattr(getattr(sys.modules.get(_NEEDED), "__spec__", None), "_initializing", False):
        _postponed.append(callback)
    else:
        callback()


class _Waiting(MetaPathFinder):
    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name = name
        self.callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # first, so that the search below does not find this finder again
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _run(self.callback)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def cancel(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self.callback in _postponed:
            _postponed.remove(self.callback)


def when_imported(name: str, callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` once module ``name`` is imported: now if it is already, else right after its body has run.

    Returns a function that cancels it.
    """
    if name in sys.modules:
        importlib.import_module(name)  # another thread may be in the middle of its body: wait for the end of it
        _run(callback)
        return lambda: None
    waiting = _Waiting(name, callback)
    sys.meta_path.insert(0, waiting)
    return waiting.cancel


def cancel_all() -> None:
    """Cancel every callback that still waits."""
    for finder in [f for f in sys.meta_path if isinstance(f, _Waiting)]:
        finder.cancel()
    _postponed.clear()


def resume() -> None:
    """Run the postponed callbacks, once. The last line of module ``_NEEDED`` calls this."""
    while _postponed:
        _postponed.pop(0)()
