# SPDX-License-Identifier: Apache-2.0
"""The package that pip installs: its metadata, and the files in the source archive and in the wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from overlap_inductor.torch_compat import versions
from overlap_inductor.version import __version__

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; import sys; getattr(build_meta, sys.argv[1])(sys.argv[2])"
FOLDERS = (".ci", "bench", "docs", "examples", "overlap_inductor", "tests", "tools")
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "SECURITY.md")
pytestmark = pytest.mark.xdist_group("the package is built once")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str], str]:
    """The names of the files in the source archive and in the wheel, and the wheel's metadata. Archive and wheel are
    built from a copy of the project, because a build writes into the project's folder."""
    pytest.importorskip("setuptools", minversion="77", reason='older versions refuse license = "Apache-2.0"')
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    for kind in ("build_sdist", "build_wheel"):
        subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=source, check=True, timeout=300)
    with tarfile.open(out / f"overlap_inductor-{__version__}.tar.gz") as archive:
        sdist = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    with zipfile.ZipFile(out / f"overlap_inductor-{__version__}-py3-none-any.whl") as wheel:
        metadata = wheel.read(f"overlap_inductor-{__version__}.dist-info/METADATA").decode()
        return sdist, set(wheel.namelist()), metadata


def tracked(*folders: str) -> set[str]:
    """Files of the project below ``folders``."""
    found = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_source_archive_holds_all_that_the_tests_need(built: tuple[set[str], set[str], str]) -> None:
    sdist, _, _ = built
    missing = {*tracked(*FOLDERS), *FILES, "pyproject.toml"} - sdist
    assert missing == set()


def test_the_wheel_holds_only_the_package(built: tuple[set[str], set[str], str]) -> None:
    _, wheel, _ = built
    ours = {name for name in wheel if not name.startswith(f"overlap_inductor-{__version__}.dist-info/")}
    assert ours == tracked("overlap_inductor") and "overlap_inductor/py.typed" in ours


def test_metadata(built: tuple[set[str], set[str], str]) -> None:
    _, _, text = built
    newest = ".".join(map(str, versions.FIRST_UNKNOWN))
    oldest = ".".join(map(str, versions.OLDEST))
    (torch,) = re.findall(r"^Requires-Dist: torch([^;\n]+)$", text, re.M)
    assert set(torch.split(",")) == {f">={oldest}", f"<{newest}"}, "the versions that the code supports"
    assert "License-Expression: Apache-2.0\n" in text and "Author: overlap_inductor contributors\n" in text
    assert "Classifier: Typing :: Typed\n" in text
