# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of README and ``docs/``, and compares their output with the pages."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.fork_base import ForkBase
from tests.support.fork_commands import ForkCommands
from tools import make_docs
from tools.doc_parts import samples
from tools.doc_parts.pages import DOCS
from tools.doc_parts.pages import pages


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("paths", make_docs.page_runs(), ids=["README", "docs"])
def test_pages(tmp_path: Path, paths: list[Path], inductor_base: ForkBase) -> None:
    """The commands run in processes that have already imported torch, which saves most of their time."""
    with tempfile.TemporaryDirectory() as programs, ForkCommands(inductor_base, Path(programs)):
        outputs = make_docs.run_samples(paths, tmp_path, Path(programs))
    assert outputs
    for path, sample, output in outputs:
        assert samples.same(sample.content, output), f"{path.name}: run python tools/make_docs.py --samples\n{output}"


def test_every_page_with_samples_is_run() -> None:
    marked = {path.name for path in pages() if samples.samples(path.read_text())}
    assert marked == set(make_docs.RUN) and all((DOCS / name).is_file() for name in make_docs.RUN)
