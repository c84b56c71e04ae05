# SPDX-License-Identifier: Apache-2.0
"""The list of reason codes, read from the sources of the package: every code, and the files that give it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from overlap_inductor.report.advice import ADVICE
from tools.doc_parts.pages import ROOT
from tools.doc_parts.reason_texts import GROUPS

PACKAGE = ROOT / "overlap_inductor"
_NAMES = re.compile(r"OVERLAP_INDUCTOR\w*(?:=(?:\w+|<\w+>))?|torch(?:\.\w+)+(?:\([^)]*\))?|\.\w+\(\)")


@functools.cache
def codes() -> dict[str, list[str]]:
    """Every reason code, and the files of the package that give it, both in alphabetical order."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for code in _codes_in(path):
            found.setdefault(code, set()).add(path.relative_to(PACKAGE).as_posix())
    return {code: sorted(found[code]) for code in sorted(found)}


def _codes_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        # A code is the first argument of ``Reason("code", ...)`` or ``@check("code")``.
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Reason", "check"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def sections() -> str:
    """A section for each group of codes, with a part for each code.

    Raises:
        ValueError: the package's codes and the codes with a meaning differ.
        KeyError: a code has no advice.
    """
    where = codes()
    described = [code for group in GROUPS.values() for code in group]
    if sorted(described) != sorted(where):
        missing, extra = sorted(set(where) - set(described)), sorted(set(described) - set(where))
        raise ValueError(f"reason codes without a meaning: {missing}; meanings of codes that do not exist: {extra}")
    parts = []
    for title, group in GROUPS.items():
        parts.append(f"## {title}")
        for code, meaning in group.items():
            files = ", ".join(f"`{name}`" for name in where[code])
            parts.append(
                f"### {code}\n\n{meaning}\n\n*What you can do.* {_marked(ADVICE[code])}\n\n*Given by* {files}."
            )
    return "\n\n".join(parts)


def _marked(advice: str) -> str:
    """``advice``, which is plain text, as Markdown: names of variables, modules and functions as code."""
    return _NAMES.sub(r"`\g<0>`", advice)
