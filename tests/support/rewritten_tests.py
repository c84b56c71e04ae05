# SPDX-License-Identifier: Apache-2.0
"""Writes pytest's cache of test modules with rewritten assertions before workers read it.

Workers collect the same modules at the same time. In a new checkout, each worker would rewrite each module: eight
seconds of processor time for ``tests/unit`` and ``tests/compile``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook


def rewrite_tests(config: pytest.Config) -> int | None:
    """Fork a process that rewrites the test modules in the folders and files of the command line. Returns its ID.
    Without a cache, nothing is done.

    The process runs while the workers' base imports torch. So it stays ahead of the workers. If it fails, workers
    rewrite the modules themselves.
    """
    if sys.dont_write_bytecode:
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        hook = next(finder for finder in sys.meta_path if isinstance(finder, AssertionRewritingHook))
        for argument in config.args:
            path = Path(argument.split("::")[0])
            for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
                _rewrite(hook, file.resolve())
    except BaseException:  # noqa: BLE001  (nobody else would print it)
        traceback.print_exc()
    os._exit(0)


def _rewrite(hook: AssertionRewritingHook, file: Path) -> None:
    """Let ``hook`` write the cache of ``file``, but not run the module: code runs only in a ``dict``."""
    module = SimpleNamespace(__spec__=importlib.util.spec_from_file_location(file.stem, file), __name__=file.stem)
    try:
        hook.exec_module(_NotRun(module))  # type: ignore[arg-type]
    except TypeError:
        pass


class _NotRun:
    """A module whose ``__dict__`` is no ``dict``."""

    def __init__(self, module: SimpleNamespace) -> None:
        object.__setattr__(self, "_module", module)

    def __getattribute__(self, name: str) -> object:
        return () if name == "__dict__" else getattr(object.__getattribute__(self, "_module"), name)
