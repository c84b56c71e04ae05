# SPDX-License-Identifier: Apache-2.0
"""Fails if a module outside ``torch_compat`` and ``inductor`` uses private parts of other code.

Private parts are the private names of torch, and private attributes of objects other than ``self`` and ``cls``.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "overlap_inductor"
ALLOWED = (ROOT / "torch_compat", ROOT / "inductor")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.expr) -> list[str]:
    """The parts of an attribute chain, such as ``["torch", "ops", "aten"]``. The first part is empty if the chain does
    not start at a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return parts[::-1]


def private_parts(source: str) -> list[tuple[int, str]]:
    """``(line, name)`` of each use of a private part in ``source``.

    Operators such as ``aten._to_copy`` are public despite their names, and so is ``os._exit``. They are left out.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
            for name in (module + alias.name for alias in node.names):
                parts = name.split(".")
                if parts[0] == "torch" and any(map(is_private, parts)):
                    found.append((node.lineno, name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            parts = dotted(node)
            own = len(parts) == 2 and parts[0] in ("self", "cls")
            name_of_an_operator = parts[:-1] == ["aten"] or (parts[:2] == ["torch", "ops"] and len(parts) <= 4)
            if not own and not name_of_an_operator and parts != ["os", "_exit"]:
                found.append((node.lineno, ".".join(parts)))
    return found


def main() -> int:
    found = False
    for path in sorted(ROOT.rglob("*.py")):
        if not any(folder in path.parents for folder in ALLOWED):
            for line, name in private_parts(path.read_text()):
                print(
                    f"{path.relative_to(ROOT.parent)}:{line} private name {name}: private torch APIs belong in"
                    " torch_compat or inductor, and other private attributes are read only through self or cls"
                )
                found = True
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
