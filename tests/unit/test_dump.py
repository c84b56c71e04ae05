# SPDX-License-Identifier: Apache-2.0
"""The dump folder has a fixed layout, and equal reports give equal bytes. A failed write leaves no half-written file
and does not fail the compile."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from overlap_inductor.errors import OverlapError
from overlap_inductor.report import dump
from overlap_inductor.report.dump import FILES
from overlap_inductor.report.dump import write_dump
from overlap_inductor.report.read_folder import read_reports
from overlap_inductor.report.runs import MARK
from overlap_inductor.report.text import render_text
from tests.support.fork_base import ForkBase
from tests.unit import sample_reports as samples


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "_written", {})
    monkeypatch.setattr(dump, "_warned", set())


def contents(folder: Path) -> dict[str, bytes]:
    """The files in the graphs' folders, without those that name the run."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARK]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.parent != folder}


def test_layout_and_contents(tmp_path: Path) -> None:
    report = samples.llama(2)
    place = write_dump(report, str(tmp_path), 3)
    assert place == tmp_path / "rank_3" / "0_0_inference"
    assert sorted(p.name for p in place.iterdir()) == sorted([*FILES, MARK]), (
        "the five files, the mark of the run, and no temporary file"
    )
    assert (place / "report.txt").read_text() == render_text(report)
    assert json.loads((place / "sites.json").read_text()) == report.to_dict()
    assert (place / "graph.before.txt").read_text() == report.before
    assert (place / "graph.after.txt").read_text() == report.after
    assert "<!doctype html>" in (place / "index.html").read_text()


def test_the_same_report_again_gives_the_same_bytes(tmp_path: Path) -> None:
    write_dump(samples.llama(2), tmp_path, 0)
    first = contents(tmp_path)
    write_dump(samples.llama(2), tmp_path, 0)
    assert contents(tmp_path) == first


def test_another_process_writes_the_same_bytes(torch_base: ForkBase, tmp_path: Path) -> None:
    """Apart from ``run.json``, a graph's folder must hold no time, process number or address, and no order that depends
    on the hash seed."""
    script = (
        "import sys; from overlap_inductor.report.dump import write_dump; from tests.unit import sample_reports as s\n"
        "for r in (s.llama(3), s.block(), s.llama(2)): write_dump(r, sys.argv[1], 0)"
    )
    # The script runs in a fork of another process, which has another hash seed.
    here, there = tmp_path / "here", tmp_path / "there"
    for report in (samples.llama(3), samples.block(), samples.llama(2)):
        write_dump(report, here, 0)
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    torch_base.run("-c", script, str(there), env=environment).check_returncode()
    assert contents(here) == contents(there)
    assert len(contents(here)) == 3 * len(FILES)


def test_another_report_of_the_same_name_gets_a_suffix(tmp_path: Path) -> None:
    """A recompile must not overwrite an earlier graph's report of the same name."""
    places = [write_dump(samples.llama(layers), tmp_path, 0) for layers in (1, 2, 1, 3)]
    assert [p.name for p in places if p] == ["0_0_inference", "0_0_inference_2", "0_0_inference", "0_0_inference_3"]
    assert "layers.{0..1}" in (tmp_path / "rank_0" / "0_0_inference_2" / "report.txt").read_text()


def test_phases_and_ranks_have_folders_of_their_own(tmp_path: Path) -> None:
    for phase in ("forward", "backward"):
        for rank in (0, 1):
            write_dump(samples.empty(phase=phase), tmp_path, rank)
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*"))
    assert names == ["rank_0/0_0_backward", "rank_0/0_0_forward", "rank_1/0_0_backward", "rank_1/0_0_forward"]


def test_a_graph_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    place = write_dump(samples.empty(graph="../../evil/0"), tmp_path / "dump", 0)
    assert place is not None and place.resolve().parent == (tmp_path / "dump" / "rank_0").resolve()


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert write_dump(samples.llama(1), blocked, 0) is None
        assert write_dump(samples.llama(2), blocked, 0) is None
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1
    assert str(blocked) in messages[0] and "OVERLAP_INDUCTOR_DUMP" in messages[0]


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write into the old file itself could leave half a file, or show it to a reader."""
    place = write_dump(samples.llama(1), tmp_path, 0)
    assert place is not None
    before = contents(tmp_path)

    def full_disk(self: Path, text: str, **kwargs: object) -> int:
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    assert write_dump(samples.llama(1), tmp_path, 0) is None
    monkeypatch.undo()
    assert contents(tmp_path) == before


def test_text_that_is_not_valid_unicode_is_still_written(tmp_path: Path) -> None:
    place = write_dump(samples.empty(notices=["lone surrogate \udc80"]), tmp_path, 0)
    assert place is not None and "\\udc80" in (place / "report.txt").read_text()


def test_reading_back_merges_ranks_with_the_same_text(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        write_dump(samples.llama(2), tmp_path / "run", rank)
    write_dump(samples.block(), tmp_path / "run", 1)
    text = read_reports(str(tmp_path / "run"))
    assert "0_0_inference, ranks 0..2\n" in text
    assert "1_0_forward, rank 1\n" in text
    assert text.count("5 sites found") == 1, "one report for the three ranks"
    assert "run/0_0_inference, ranks 0..2\n" in read_reports(str(tmp_path)), "dumps below a folder are found"
    assert "1_0_forward, rank 1\n" in read_reports(str(tmp_path / "run" / "rank_1"))


def test_ranks_that_disagree_are_shown_apart(tmp_path: Path) -> None:
    write_dump(samples.llama(2), tmp_path, 0)
    write_dump(samples.llama(3), tmp_path, 1)
    text = read_reports(str(tmp_path))
    assert "0_0_inference, rank 0\n" in text and "0_0_inference, rank 1\n" in text


@pytest.mark.parametrize("make", [True, False])
def test_reading_a_folder_without_reports_says_what_was_expected(tmp_path: Path, make: bool) -> None:
    folder = tmp_path / "x"
    if make:
        folder.mkdir()
    with pytest.raises(OverlapError, match="OVERLAP_INDUCTOR_DUMP"):
        read_reports(str(folder))
