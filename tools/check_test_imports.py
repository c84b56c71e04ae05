# SPDX-License-Identifier: Apache-2.0
"""Fails if a test module is imported, because a change of its tests might then break other files.

No module of ``tests`` or ``tools`` may import a test module or a ``conftest``. No module of ``bench`` may import
anything from ``tests``. Shared code belongs in ``tests/support`` or ``bench/support``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests", "bench", "tools")


def imported(source: str, module: str) -> Iterator[tuple[int, str]]:
    """``(line, dotted name)`` of every import in ``source``, also inside functions.

    Relative imports are resolved against ``module``, the dotted name of the file. ``from a import b`` gives ``a.b``,
    which may be a module or a name in module ``a``.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def complaint(module: str, name: str) -> str | None:
    """The reason why ``module`` must not import ``name``, or ``None``."""
    parts = name.split(".")
    if parts[0] == "tests":
        if module.split(".")[0] == "bench":
            return "bench must not import from tests; put shared code in bench/support"
        if any(part.startswith("test_") or part == "conftest" for part in parts[1:-1]) or _is_test_module(parts):
            return "a test module must not be imported; put shared code in tests/support"
    return None


def _is_test_module(parts: list[str]) -> bool:
    """Whether the last part is ``conftest`` or a test module. A function whose name begins with ``test_``
    does not count."""
    if parts[-1] == "conftest":
        return True
    return parts[-1].startswith("test_") and ROOT.joinpath(*parts).with_suffix(".py").exists()


def main() -> int:
    found = False
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = path.relative_to(ROOT)
            module = ".".join(file.with_suffix("").parts)
            for line, name in imported(path.read_text(), module):
                if reason := complaint(module, name):
                    print(f"{file}:{line} {name}: {reason}")
                    found = True
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
