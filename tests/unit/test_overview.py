# SPDX-License-Identifier: Apache-2.0
"""The page that lists all graphs of a dump folder. The page shows each run separately."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from overlap_inductor.cli import main as cli
from overlap_inductor.report import dump
from overlap_inductor.report import overview
from overlap_inductor.report import runs
from overlap_inductor.report.dump import write_dump
from overlap_inductor.report.folder import runs_of
from overlap_inductor.report.overview import graph_rows
from overlap_inductor.report.overview import write_overview
from overlap_inductor.report.read_folder import read_reports
from tests.support.fork_base import ForkBase
from tests.support.html_page import Page
from tests.unit import sample_reports as samples

WRITE = """
import sys
from overlap_inductor.report.dump import write_dump
from tests.unit import sample_reports as samples
for layers in map(int, sys.argv[3].split(",")):
    write_dump(samples.llama(layers), sys.argv[1], int(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, empty in ((dump, "_written", {}), (dump, "_numbers", {}), (overview, "_due", {})):
        monkeypatch.setattr(module, name, empty)
    for name in [*runs._LAUNCHER, "LOCAL_WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)


def write_as(base: ForkBase, folder: Path, rank: int, layers: str, **variables: str) -> None:
    """Write reports of ``rank`` in a separate process. ``variables``: added to its environment, for example those of a
    launcher."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    base.run("-c", WRITE, str(folder), str(rank), layers, env=environment).check_returncode()


@pytest.fixture(scope="module")
def two_runs(torch_base: ForkBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs of two ranks, started as by ``torchrun``. The second run has fewer graphs."""
    folder = tmp_path_factory.mktemp("dump")
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for layers in ("1,2", "5"):
        for rank in (0, 1):
            write_as(torch_base, folder, rank, layers, TORCHELASTIC_RUN_ID="none", **variables)
    return folder


def test_a_second_run_is_not_read_as_the_first(two_runs: Path) -> None:
    first, second = runs_of(two_runs)
    assert second.id == f"{first.id}-2" and first.date <= second.date
    assert [first.ranks, second.ranks] == [[0, 1], [0, 1]]
    shown = [[(row.graph, row.ranks, row.headline) for row in graph_rows(two_runs, run)] for run in (first, second)]
    assert shown == [
        [("0_0_inference_2", "0..1", "5 sites found: 4 overlapped, 1 refused; 2 near misses")],
        [("0_0_inference", "0..1", "11 sites found: 10 overlapped, 1 refused; 5 near misses")],
    ], "of the first run, only graph 0_0_inference_2 is left: the second run overwrites the report of 0_0_inference"


def test_the_command_names_the_runs(two_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (two_runs / "index.html").unlink(missing_ok=True)
    assert cli.main(["report", str(two_runs)]) == 0
    text = capsys.readouterr().out
    heads = re.findall(r"^#+ Run [0-9a-f]{8}(?:-2)?, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$", text, re.M)
    assert len(heads) == 2
    assert (
        text.index("0_0_inference_2, ranks 0..1\n") < text.index(heads[1]) < text.index("0_0_inference, ranks 0..1\n")
    )
    assert text.endswith(f"Page over all graphs: {two_runs / 'index.html'}\n")
    assert (two_runs / "index.html").exists()


def test_the_page_lists_runs_graphs_and_ranks(two_runs: Path) -> None:
    page = Page(write_overview(two_runs).read_text())
    words = " ".join(page.words.split())
    assert page.problems == []
    assert "2 runs wrote to this folder, the newest first." in words
    assert words.index("11 sites found") < words.index("5 sites found: 4 overlapped")
    assert "13.42 ms -> 9.02 ms, 1.49x" in words
    links = [attributes["href"] or "" for attributes in page.named("a")]
    assert "rank_1/0_0_inference_2/index.html" in links
    assert all((two_runs / link).is_file() for link in links)
    assert "prefers-color-scheme: dark" in (two_runs / "index.html").read_text()


def test_one_run_needs_no_heading(tmp_path: Path) -> None:
    write_dump(samples.block(), tmp_path, 0)
    assert "Run " not in read_reports(str(tmp_path))


def test_the_first_write_leaves_a_page(tmp_path: Path) -> None:
    write_dump(samples.block(), tmp_path, 0)
    assert "1_0_forward" in (tmp_path / "index.html").read_text()


def test_the_page_is_complete_when_the_process_has_ended(torch_base: ForkBase, tmp_path: Path) -> None:
    """The page is not rewritten after every graph. So it must be rewritten when the process ends."""
    write_as(torch_base, tmp_path, 0, "1,2,3,4,5,6")
    text = (tmp_path / "index.html").read_text()
    assert [f">{name}</a>" in text for name in ("0_0_inference", "0_0_inference_6")] == [True, True]


def test_the_page_is_not_made_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new page for each graph's report would cost quadratic time."""
    made = []
    monkeypatch.setattr(overview, "write_overview", made.append)
    monkeypatch.setattr(overview, "_SHARE", 1e9)
    for layers in (1, 2, 3):
        write_dump(samples.llama(layers), tmp_path, 0)
    assert made == [tmp_path]


def test_ranks_that_write_at_once_lose_no_report_and_leave_no_temporary_file(tmp_path: Path) -> None:
    reports = [samples.llama(layers) for layers in (1, 2, 3)]

    def rank(number: int) -> None:
        for report in reports:
            write_dump(report, tmp_path, number)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    page = Page(write_overview(tmp_path).read_text())
    assert page.problems == []
    assert len({attributes["href"] for attributes in page.named("a")}) == 4 * 3
    assert not list(tmp_path.rglob(".*")), "no temporary file is left"


def test_graphs_stand_in_the_order_of_their_compiles(tmp_path: Path) -> None:
    for report in (samples.empty(graph="10_0"), samples.empty(graph="2_0"), samples.empty(graph="1_0")):
        write_dump(report, tmp_path, 0)
    (run,) = runs_of(tmp_path)
    assert [row.graph for row in graph_rows(tmp_path, run)] == ["10_0_inference", "2_0_inference", "1_0_inference"]


def test_reports_of_an_earlier_version_belong_to_no_run(tmp_path: Path) -> None:
    place = write_dump(samples.block(), tmp_path, 0)
    assert place is not None
    (place / runs.MARK).unlink()
    (run,) = runs_of(tmp_path)
    assert (run.id, run.title) == ("", "Reports of no known run")
    assert "1_0_forward" in write_overview(tmp_path).read_text()
    (place / runs.MARK).write_text('{"run": "of another version"}')
    assert [run.id for run in runs_of(tmp_path)] == [""]


def test_a_folder_that_cannot_be_written_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dump(samples.block(), tmp_path, 0)

    def read_only(path: Path, text: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(overview, "replace_file", read_only)
    assert cli.main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "feed_forward.w1" in shown.out and "Read-only file system" in shown.err


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}


def test_ranks_of_one_launch_have_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a launch may depend on the parent process only if all ranks run on one host."""
    whole = {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}
    half = {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}
    key, key_of_two_hosts = runs.launch_key({**whole, "RANK": "0"}), runs.launch_key({**half, "RANK": "0"})
    assert runs.launch_key({**whole, "RANK": "3", "LOCAL_RANK": "3"}) == key
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert runs.launch_key(whole) != key, "another launcher on this host has another key"
    assert runs.launch_key({**half, "RANK": "3"}) == key_of_two_hosts, "the other host's launcher has the same key"


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "MASTER_PORT"])
def test_launches_that_the_launcher_tells_apart_have_keys_of_their_own(name: str) -> None:
    assert runs.launch_key({**TORCHRUN, name: "5"}) != runs.launch_key({**TORCHRUN, name: "6"})


def test_a_script_without_a_launcher_is_a_run_of_its_own(torch_base: ForkBase, tmp_path: Path) -> None:
    for layers in ("1,2", "3"):
        write_as(torch_base, tmp_path, 0, layers)
    ids = [run.id for run in runs_of(tmp_path)]
    assert len(ids) == 2 and not any("-" in name for name in ids), "two keys, not two runs of one key"
