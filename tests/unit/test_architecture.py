# SPDX-License-Identifier: Apache-2.0
"""The paths in ``docs/architecture.md`` and in the schedules' docstrings exist. The page's dotted names that begin with
``lowerings``, ``passes``, ``sites`` or ``transports`` exist. The page's table lists the package's folders in the order
of the layers in ``pyproject.toml``."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from overlap_inductor.lowerings.registry import SCHEDULES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def _named_paths(text: str) -> set[str]:
    """Paths in backticks, relative to the repository or to the package."""
    return {p for p in re.findall(r"`+([\w/.]+)`+", text) if "/" in p or p.endswith(".py")}


@pytest.mark.parametrize("path", sorted(_named_paths(TEXT)))
def test_every_path_exists(path: str) -> None:
    assert (ROOT / path).exists() or (ROOT / "overlap_inductor" / path).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:lowerings|passes|sites|transports)\.[\w.]+)`", TEXT))))
def test_every_dotted_name_exists(name: str) -> None:
    module, _, last = f"overlap_inductor.{name}".rpartition(".")
    assert hasattr(importlib.import_module(module), last)


def test_every_folder_is_in_the_table_in_the_order_of_the_layers() -> None:
    folders = re.findall(r"^\| `(\w+)` \| ", TEXT, re.M)
    config = (ROOT / "pyproject.toml").read_text()
    layers = re.findall(r'"([^"]+)"', config.split("layers = [")[1].split("]")[0])
    assert folders == [layer for layer in layers if (ROOT / "overlap_inductor" / layer).is_dir()]


@pytest.mark.parametrize("schedule", [s.name for s in SCHEDULES])
def test_a_schedules_folder_names_its_ops_kernels_and_tests(schedule: str) -> None:
    folder = ROOT / "overlap_inductor" / "lowerings" / schedule
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert all(f"- {part}:" in text for part in ("Ops", "Kernels", "Tests"))
    paths = _named_paths(text)
    assert any(path.startswith("tests/") for path in paths)
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "overlap_inductor" / path).exists(), path
