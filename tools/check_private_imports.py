"""Fails where a module outside ``overlap_inductor/torch_compat`` imports a private part of torch."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "overlap_inductor"
ALLOWED = ROOT / "torch_compat"


def private_imports(path: Path) -> list[str]:
    """``file:line name`` of each import of a torch module with a private component."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "torch" and any(part.startswith("_") for part in parts[1:]):
                if not name.startswith("torch.distributed._functional_collectives"):
                    found.append(f"{path.relative_to(ROOT.parent)}:{node.lineno} {name}")
    return found


def main() -> int:
    found = [line for path in sorted(ROOT.rglob("*.py")) if ALLOWED not in path.parents for line in private_imports(path)]
    for line in found:
        print(f"{line}: private torch APIs belong in overlap_inductor/torch_compat")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
