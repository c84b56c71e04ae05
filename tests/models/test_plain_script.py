# SPDX-License-Identifier: Apache-2.0
"""Environment variables alone switch overlap on for an unchanged script."""

from __future__ import annotations

import importlib.metadata
import json
from collections import Counter
from pathlib import Path

import pytest
import transformers  # noqa: F401  (if it is missing, the error must come from here, not from a child)

from overlap_inductor.cli.local_ranks import rank_environment
from overlap_inductor.cli.local_ranks import run_ranks

SCRIPT = Path(__file__).with_name("plain_script.py")


def run(folder: Path, dump: Path, rewrite: str = "auto") -> list[tuple[float, int]]:
    """Run the script. Returns ``(relative difference of the logits from eager, graph breaks)`` of both ranks.
    ``rewrite``: the value of ``OVERLAP_INDUCTOR_SEQUENCE_PARALLEL``."""
    environment = {
        **rank_environment("cpu"),
        "OVERLAP_INDUCTOR": "1",
        "OVERLAP_INDUCTOR_SCHEDULE": "ring",
        "OVERLAP_INDUCTOR_SEQUENCE_PARALLEL": rewrite,
        "OVERLAP_INDUCTOR_DUMP": str(dump),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    results = folder / f"results of {dump.name}"
    results.mkdir()
    command = [str(SCRIPT), str(folder / "model"), str(results)]
    # ``run_ranks`` takes the place of ``torchrun``, because ``torchrun`` would import torch once more.
    run_ranks(command, 2, results, environment=environment, timeout=500, on_line=print, on_wait=lambda: None)
    return [tuple(json.loads((results / f"rank{rank}.json").read_text())) for rank in range(2)]


def texts(dump: Path) -> dict[str, str]:
    """Texts of the dump's files, except those that name the run: the page of all graphs, and each ``run.json``."""
    found = {str(f.relative_to(dump)): f.read_text() for f in sorted(dump.rglob("*")) if f.is_file()}
    return {name: text for name, text in found.items() if name != "index.html" and not name.endswith("/run.json")}


@pytest.mark.thorough
def test_environment_variables_alone(tmp_path: Path) -> None:
    """All sites are in the dump. No graph break occurs. The dumps with a cold and with a warm cache are equal."""
    if not importlib.metadata.entry_points(group="torch.backends", name="overlap_inductor"):
        pytest.skip("the package is not installed here, so torch cannot load it by itself; pip install -e . first")
    for dump in (tmp_path / "cold", tmp_path / "warm"):
        for difference, breaks in run(tmp_path, dump):
            assert difference < 1e-5 and breaks == 0
    found = texts(tmp_path / "cold")
    names = [n for n in found if n.endswith("sites.json")]
    assert len(names) == 2 and len({found[n] for n in names}) == 1
    sites = [s for s in json.loads(found[names[0]])["sites"] if s["decision"]["status"] == "overlapped"]
    assert Counter((s["module"].rsplit(".", 1)[-1], s["pattern"]) for s in sites) == {
        ("o_proj", "matmul_all_reduce"): 1,
        ("down_proj", "matmul_all_reduce"): 1,
        ("lm_head", "matmul_all_gather"): 1,
    }
    assert found == texts(tmp_path / "warm")


@pytest.mark.thorough
def test_the_rewrite_of_an_unchanged_script(tmp_path: Path) -> None:
    """The same script, with the sequence-parallel rewrite on: every all-reduce is rewritten."""
    if not importlib.metadata.entry_points(group="torch.backends", name="overlap_inductor"):
        pytest.skip("the package is not installed here, so torch cannot load it by itself; pip install -e . first")
    for difference, breaks in run(tmp_path, tmp_path / "dump", "on"):
        assert difference < 1e-5 and breaks == 0
    found = texts(tmp_path / "dump")
    report = json.loads(next(text for name, text in found.items() if name.endswith("sites.json")))
    (stretch,) = report["stretches"]
    assert stretch["status"] == "rewritten" and stretch["all_reduces"] == 3
    sites = [s for s in report["sites"] if s["decision"]["status"] == "overlapped"]
    assert Counter((s["module"].rsplit(".", 1)[-1], s["pattern"]) for s in sites) == {
        ("q_proj", "all_gather_matmul"): 1,
        ("o_proj", "matmul_reduce_scatter"): 1,
        ("gate_proj", "all_gather_matmul"): 1,
        ("down_proj", "matmul_reduce_scatter"): 1,
        ("lm_head", "all_gather_matmul"): 1,
    }
