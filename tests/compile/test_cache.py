# SPDX-License-Identifier: Apache-2.0
"""Caches: a hit gives the report, counters, dump and strict errors of a compile. A change that matters is a miss.

Most tests use one process, because a hit loads the files that it would load in another process. One test uses two
processes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.compiler._cache import CacheArtifactManager
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.inductor import fingerprint
from overlap_inductor.report import publish as reporting
from overlap_inductor.switch.backend import overlap_inductor as backend
from tests.compile import fake_pass
from tests.compile.fake_pass import calls
from tests.compile.fake_pass import chain
from tests.compile.fake_pass import count
from tests.compile.fake_pass import fake as fake
from tests.compile.fake_pass import ours_of
from tests.compile.fake_pass import start_again
from tests.support.fork_base import ForkBase

pytestmark = pytest.mark.usefixtures("fake")

# The cache that is hit. ``aot``: AOTAutograd's, whose entries name graphs in Inductor's cache. ``inductor``: Inductor's
# alone. ``bundled``: AOTAutograd's, whose entries hold the compiled graphs themselves.
LAYERS: dict[str, dict[str, bool]] = {
    "aot": {"enable_autograd_cache": True},
    "inductor": {"enable_autograd_cache": False},
    "bundled": {"enable_autograd_cache": True, "bundled_autograd_cache": True},
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest, cache: Path) -> Iterator[str]:
    with functorch_config.patch(LAYERS[request.param]):
        yield request.param


@pytest.fixture
def cache(fake: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Switch the caches on, with an empty folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with inductor_config.patch(fx_graph_cache=True), functorch_config.patch(enable_autograd_cache=True):
        yield tmp_path / "cache"


def train(**options: Any) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    torch.compile(lambda x: x @ weight @ weight, **options)(torch.ones(2, 2)).sum().backward()


def outcome() -> tuple[list[str], dict[str, int]]:
    return [r.to_json(graphs=True) for r in reporting.all_reports()], count()


def was_hit() -> bool:
    hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    return hits > 0 and calls == []


def files(folder: Path) -> dict[str, bytes]:
    """The dump's files, except those that name the run: the page of all graphs and each ``run.json``."""
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in found.items() if name != "index.html" and not name.endswith("/run.json")}


def test_hit_gives_the_same_report_and_counts(layer: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "overlap_inductor")
    overlap_inductor.enable()
    train()
    assert len(calls) == 2
    assert "from cache" not in caplog.text
    first = outcome()
    assert [json.loads(r)["phase"] for r in first[0]] == ["forward", "backward"]
    start_again()
    train()
    assert was_hit()
    assert outcome() == first
    assert ["[from cache]" in r.getMessage() for r in ours_of(caplog)] == [False, False, True, True]


def test_hit_in_the_backend_and_by_enable_share_one_entry(cache: Path) -> None:
    overlap_inductor.enable()
    train()
    overlap_inductor.disable()
    start_again()
    train(backend=backend)
    assert was_hit() and len(reporting.all_reports()) == 2


def test_hit_writes_the_dump_to_the_current_folder(cache: Path, tmp_path: Path) -> None:
    """The dump folder is not part of the key. A hit writes the stored report to the dump folder that is set at the
    hit."""
    overlap_inductor.enable(dump=str(tmp_path / "a"))
    train()
    start_again()
    overlap_inductor.enable(dump=str(tmp_path / "b"))
    train()
    assert was_hit()
    assert len(files(tmp_path / "a")) >= 8
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_hit_is_as_strict(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If loading a cached graph raises, AOTAutograd compiles the graph again. Its sites must not be counted twice."""
    monkeypatch.setitem(fake_pass.STATUS, "status", "refused")
    overlap_inductor.enable(mode="strict")
    outcomes = []
    for _ in range(2):
        start_again()
        with pytest.raises(Exception) as error:
            torch.compile(lambda x: x @ x)(torch.ones(2, 2))
        assert "StrictError: OVERLAP_INDUCTOR=strict: 1 of 1 sites" in chain(error.value)
        outcomes.append(outcome())
    assert outcomes[0] == outcomes[1]


def test_a_strict_error_while_cached_graphs_are_loaded_counts_each_graph_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fake_pass.STATUS, "status", "refused")
    overlap_inductor.enable(mode="on")
    train()
    start_again()
    # The entry was stored in mode "on"; make its reports strict when they are loaded.
    original = reporting.activate

    def activate(report: Any, *arguments: Any, **keywords: Any) -> None:
        report.mode = "strict"
        original(report, *arguments, **keywords)

    monkeypatch.setattr(reporting, "activate", activate)
    with pytest.raises(Exception, match="strict"):
        train()
    assert [r.phase for r in reporting.all_reports()] == ["forward", "backward"] and calls == []


CHANGES: dict[str, dict[str, Any]] = {
    "schedule": {"schedule": "ring"},
    "patterns": {"patterns": "matmul_all_reduce"},
    "numerics": {"numerics": "allow_hop_rounding"},
    "sub_chunks": {"sub_chunks": 2},
    "mode": {"mode": "report"},
}


def test_another_switch_is_a_miss(cache: Path) -> None:
    overlap_inductor.enable()
    train()
    for change, fields in CHANGES.items():
        start_again()
        overlap_inductor.enable(**fields)
        train()
        assert not was_hit() and len(calls) == 2, change


def test_off_after_on_is_a_miss_and_on_again_a_hit(cache: Path) -> None:
    """Code compiled with overlap must not be loaded while overlap is off, or code without overlap while it is on."""
    overlap_inductor.enable()
    train()
    overlap_inductor.disable()
    start_again()
    train()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 0 and outcome() == ([], {})
    start_again()
    overlap_inductor.enable()
    train()
    assert was_hit() and len(reporting.all_reports()) == 2


def test_another_version_or_source_is_a_miss(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlap_inductor.enable()
    train()
    for owner, name, value in (
        (overlap_inductor, "__version__", "0.1.1"),
        (fingerprint, "source_hash", lambda: "other"),
    ):
        start_again()
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            train()
        assert not was_hit() and len(calls) == 2, name


def test_every_source_file_counts(tmp_path: Path) -> None:
    """Each changed or new source file changes the hash. To save time, the hashed copy has at most two files of each
    folder."""
    package = tmp_path / "package"

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if not Path(folder, name).is_dir()][2:] + ["__pycache__"]

    shutil.copytree(Path(overlap_inductor.__file__).parent, package, ignore=left_out)
    first = fingerprint.hash_sources(package)
    assert first == fingerprint.hash_sources(package)
    modules = sorted(package.rglob("*.py"))
    assert len(modules) > 20
    for path in modules:
        text = path.read_text()
        path.write_text(text + "\n")
        assert fingerprint.hash_sources(package) != first, path
        path.write_text(text)
    (package / "passes" / "new.py").write_text("")
    assert fingerprint.hash_sources(package) != first


def test_other_process_groups_are_another_key() -> None:
    """An all_reduce names its group but not the group's size. So equal graphs may need different plans."""
    keys = [fingerprint.fingerprint(OverlapConfig())]
    for world_size in (2, 4):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        try:
            keys.append(fingerprint.fingerprint(OverlapConfig()))
        finally:
            dist.destroy_process_group()
    assert len(set(keys)) == 3
    assert fingerprint.fingerprint(None) == fingerprint.fingerprint(OverlapConfig(mode="off"))


def test_cache_artifacts_carry_the_reports(layer: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CacheArtifactManager.clear()  # it holds the artifacts of earlier compiles in this process
    overlap_inductor.enable()
    train()
    first = outcome()
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    start_again()
    shutil.rmtree(cache)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache) + "_new")
    torch.compiler.load_cache_artifacts(saved[0])
    train()
    assert was_hit() and outcome() == first


def test_a_stored_report_that_cannot_be_read_is_no_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from overlap_inductor.report import report

    with monkeypatch.context() as another_version:
        another_version.setattr(report, "SCHEMA_VERSION", 99)
        overlap_inductor.enable()
        train()
    start_again()
    train()
    assert "cannot be read" in caplog.text and reporting.last_report() is None


PROCESS = """
import sys
import json
from tests.compile import fake_pass
fake_pass.put_in_place()
fake_pass.STATUS["status"] = sys.argv[2]
import torch
import overlap_inductor
from overlap_inductor.report import publish as reporting
from torch._dynamo.utils import counters
overlap_inductor.enable(dump=sys.argv[1])
weight = torch.ones(2, 2, requires_grad=True)
error = ""
try:
    torch.compile(lambda x: x @ weight @ weight)(torch.ones(2, 2)).sum().backward()
except Exception as raised:
    error = fake_pass.chain(raised)
print(json.dumps(dict(
    code=overlap_inductor.__file__, ran=len(fake_pass.calls), error=error,
    hits=counters["aot_autograd"]["autograd_cache_hit"], counts=fake_pass.count(),
    reports=[r.to_json(graphs=True) for r in reporting.all_reports()],
    last=reporting.last_report().to_json(graphs=True),
)))
"""


@pytest.mark.parametrize(("mode", "status"), [("on", "overlapped"), ("strict", "refused")])
def test_second_process(inductor_base: ForkBase, tmp_path: Path, mode: str, status: str) -> None:
    """With a warm cache, a process gives the dump, counters, reports and strict error of the first process."""
    package = tmp_path / "code"  # a copy, so that no edit changes it between the two processes
    shutil.copytree(Path(overlap_inductor.__file__).parent, package / "overlap_inductor")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OVERLAP_INDUCTOR")}
    environment |= {"OVERLAP_INDUCTOR": mode, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(package), str(Path(__file__).parents[2])])
    results = []
    for name in ("first", "second"):
        done = inductor_base.run("-c", PROCESS, str(tmp_path / name), status, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = results
    assert first["code"].startswith(str(package))
    assert first.pop("ran") > 0 and second.pop("ran") == 0
    assert first.pop("hits") == 0 and second.pop("hits") == (1 if mode == "on" else 0)
    assert ("StrictError" in first["error"]) == (mode == "strict")
    assert first == second
    assert files(tmp_path / "first") == files(tmp_path / "second") != {}
