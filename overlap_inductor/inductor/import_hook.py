# SPDX-License-Identifier: Apache-2.0
"""Runs a callback right after a module is first imported, without importing it.

The pass must be installed before the first compile. ``import torch`` loads this package (``switch.autoload``), but must
not also import ``torch._inductor``, which takes two seconds. So a finder in ``sys.meta_path`` waits for the import of
one module, and then removes itself.
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
"""The module that the callbacks use. If its body imports the awaited module, the callback waits until the body has
run."""
_postponed: list[_Waiting] = []
"""The finders whose callbacks wait for ``_NEEDED``. ``resume`` will run the callbacks."""


class _Waiting(MetaPathFinder):
    """Loads module ``name`` as usual and then runs ``callback``."""

    cancelled = False

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
            self.run()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def run(self) -> None:
        """Run the callback, or postpone it while the body of ``_NEEDED`` runs."""
        if self.cancelled:
            return
        if getattr(getattr(sys.modules.get(_NEEDED), "__spec__", None), "_initializing", False):
            _postponed.append(self)
        else:
            self.callback()

    def cancel(self) -> None:
        self.cancelled = True
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self in _postponed:
            _postponed.remove(self)


def when_imported(name: str, callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` when module ``name`` is imported: now if it already is, else right after its body has run.
    While the body of ``_NEEDED`` runs, the call is postponed to the end of that body.

    Returns a function that cancels a callback that has not run yet.
    """
    waiting = _Waiting(name, callback)
    if name in sys.modules:
        importlib.import_module(name)  # waits if another thread is still running the module's body
        waiting.run()
    else:
        sys.meta_path.insert(0, waiting)
    return waiting.cancel


def cancel_all() -> None:
    for waiting in [f for f in (*sys.meta_path, *_postponed) if isinstance(f, _Waiting)]:
        waiting.cancel()


def resume() -> None:
    """Run the postponed callbacks. Called by the last line of module ``_NEEDED``."""
    while _postponed:
        # ``run`` would postpone the callback again, because the body of ``_NEEDED`` still runs.
        _postponed.pop(0).callback()
