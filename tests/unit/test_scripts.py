"""Scripts that only GPUs run can at least be imported: a name that has moved is found here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    str(p.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for folder in ("tests/gpu", "bench")
    for p in (ROOT / folder).glob("[a-z]*.py")
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_imported(name: str) -> None:
    pytest.importorskip(
        "triton",
        reason="Triton comes with the package's test extra; environments of other torch versions may have none",
    )
    pytest.importorskip("matplotlib", reason="the bench extra is for make test")
    pytest.importorskip("transformers", reason="the test extra is for make test")
    importlib.import_module(name)
