# SPDX-License-Identifier: Apache-2.0
"""The table of switches, made from the fields of ``OverlapConfig`` and the string below each field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re

from overlap_inductor.config import ENVIRONMENT_PREFIX
from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import names

NAMES = {"schedule": names.SCHEDULES, "transport": names.TRANSPORTS, "patterns": names.PATTERNS}
"""For each field whose values are names: the names that the field accepts."""


def table() -> str:
    """One row for each field: field, variable, default, meaning."""
    texts = docstrings()
    lines = ["| field | environment variable | default | meaning |", "|---|---|---|---|"]
    config = OverlapConfig()
    for field in dataclasses.fields(OverlapConfig):
        variable = ENVIRONMENT_PREFIX if field.name == "mode" else f"{ENVIRONMENT_PREFIX}_{field.name.upper()}"
        text = texts[field.name]
        if field.name in NAMES:
            text += f" Known names: {', '.join(f'`{name}`' for name in NAMES[field.name].known())}."
        lines.append(f"| `{field.name}` | `{variable}` | {_default(getattr(config, field.name))} | {_cell(text)} |")
    return "\n".join(lines)


def docstrings() -> dict[str, str]:
    """The string below each field of ``OverlapConfig``, as one line.

    Raises:
        ValueError: a field has no string below it.
    """
    (cls,) = ast.parse(inspect.getsource(OverlapConfig)).body
    assert isinstance(cls, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, following in zip(cls.body, cls.body[1:]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
                raise ValueError(f"OverlapConfig.{statement.target.id} needs a string below it that gives its meaning")
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def _default(value: object) -> str:
    if isinstance(value, tuple):
        return "all patterns"
    return "none" if value is None else f"`{value}`"


def _cell(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text).replace("|", "\\|")
