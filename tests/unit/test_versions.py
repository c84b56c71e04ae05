# SPDX-License-Identifier: Apache-2.0
"""Versions are parsed by the rules of PEP 440, and never compared as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import overlap_inductor
from overlap_inductor.torch_compat import versions


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0", (2, 13)),
        ("2.13.0+cpu", (2, 13)),
        ("2.13.0a0+git1234", (2, 13)),
        ("2.15.0.dev20260301+cu130", (2, 15)),
        ("2.15.0rc2", (2, 15)),
        ("v2.11", (2, 11)),
        ("3", (3, 0)),
        ("2.x", None),
        ("", None),
    ],
)
def test_release(version: str, expected: tuple[int, int] | None) -> None:
    assert versions.release(version) == expected


@pytest.mark.parametrize("version", ["2.11.0", "2.15.9+cu130", "2.12.0a0+git1"])
def test_supported(version: str) -> None:
    assert versions.unsupported_reason(version) is None


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0.dev20261101", "2.1.1", "1.13.0", "2.x"])
def test_not_supported(version: str) -> None:
    """``2.1`` is older than ``2.11``. A development version of ``2.16`` is unknown, as the release ``2.16`` is."""
    assert f"supports torch {versions.supported()} and this is torch {version}" in str(
        versions.unsupported_reason(version)
    )


def test_no_version_is_compared_as_text() -> None:
    """Compared as text, ``2.9`` would come after ``2.11``."""
    folder = Path(overlap_inductor.__file__).parent
    found = [
        p for p in folder.rglob("*.py") if re.search(r"__version__\.(startswith|split)|__version__ [<>]", p.read_text())
    ]
    assert found == []
