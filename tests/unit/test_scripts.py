# SPDX-License-Identifier: Apache-2.0
"""The scripts of ``tests/gpu`` and ``bench`` can be imported, and the package has the attributes that they use."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    str(p.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for folder in ("tests/gpu", "bench", "bench/support")
    for p in (ROOT / folder).glob("[a-z]*.py")
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_imported(name: str) -> None:
    pytest.importorskip(
        "triton",
        reason="Triton comes with the package's test extra; an environment without this extra has none",
    )
    pytest.importorskip("matplotlib", reason="matplotlib comes with the bench extra")
    pytest.importorskip("transformers", reason="transformers comes with the test extra")
    script = importlib.import_module(name)
    assert missing(script) == []


def missing(script: ModuleType) -> list[str]:
    """The attributes of the package's modules that ``script`` uses and that do not exist, as ``module.attribute``."""
    modules = {
        name: value
        for name, value in vars(script).items()
        if isinstance(value, ModuleType) and value.__name__.startswith("overlap_inductor")
    }
    return [
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(inspect.getsource(script)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
        and not hasattr(modules[node.value.id], node.attr)
    ]
