# SPDX-License-Identifier: Apache-2.0
"""``import_hook.when_imported`` runs its callback at the right time. Until then, the callback can be cancelled."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlap_inductor.inductor import import_hook
from overlap_inductor.inductor.import_hook import when_imported

NAME = "waited_for_by_a_test"
Body = Callable[[str], None]


@pytest.fixture
def body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Body]:
    """A function that writes the source of module ``NAME``, which is not imported yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda text: (tmp_path / f"{NAME}.py").write_text(text) and importlib.invalidate_caches()
    import_hook.cancel_all()
    sys.modules.pop(NAME, None)


@pytest.fixture
def needed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake of the module that callbacks use. The fake looks as if its body were still running, so callbacks are
    postponed."""
    module = SimpleNamespace(__spec__=SimpleNamespace(_initializing=True))
    monkeypatch.setitem(sys.modules, import_hook._NEEDED, module)
    return module


def test_it_runs_once_after_the_body(body: Body) -> None:
    body("import sys; sys.seen_by_a_test = ['body']\n")
    when_imported(NAME, lambda: sys.seen_by_a_test.append("callback"))
    importlib.import_module(NAME)
    importlib.import_module(NAME)
    assert sys.seen_by_a_test == ["body", "callback"]


def test_it_runs_at_once_if_the_module_is_there() -> None:
    ran: list[int] = []
    cancel = when_imported("json", lambda: ran.append(1))
    cancel()
    assert ran == [1]


def test_cancelled_before_the_import(body: Body) -> None:
    body("")
    ran: list[int] = []
    cancel = when_imported(NAME, lambda: ran.append(1))
    cancel()
    importlib.import_module(NAME)
    assert ran == []


def test_cancelled_by_the_modules_own_body(body: Body) -> None:
    """While a module's body runs, the body or another thread may cancel the callback, for example by ``disable()``."""
    body("import sys; sys.cancel_of_a_test()\n")
    ran: list[int] = []
    sys.cancel_of_a_test = when_imported(NAME, lambda: ran.append(1))
    importlib.import_module(NAME)
    assert ran == []


@pytest.mark.parametrize("cancelled", ["no", "alone", "with all"])
def test_postponed_although_the_module_is_there(needed: SimpleNamespace, cancelled: str) -> None:
    ran: list[str] = []
    when_imported("json", lambda: ran.append("other"))
    cancel = when_imported("json", lambda: ran.append("this"))
    assert ran == [], "the body of the module that callbacks use still runs"
    if cancelled != "no":
        cancel() if cancelled == "alone" else import_hook.cancel_all()
    needed.__spec__._initializing = False
    import_hook.resume()
    assert ran == {"no": ["other", "this"], "alone": ["other"], "with all": []}[cancelled]
