# SPDX-License-Identifier: Apache-2.0
"""Runs ``bench.layers`` on two gloo ranks without a slow link. The model is a tiny Llama, in forward and in
training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench import layers
from bench import tables
from bench.layer_variants import LOCAL
from bench.layer_variants import PLAIN
from overlap_inductor.cli.local_ranks import RankError
from overlap_inductor.cli.local_ranks import rank_environment
from overlap_inductor.cli.local_ranks import run_ranks

ROOT = Path(__file__).parents[2]
TINY = "--layers 1 --hidden 64 --ffn 128 --heads 4 --kv-heads 4 --vocabulary 64 --tokens 32 --repeats 5 --seconds 1"


def run(folder: Path, words: str) -> list[dict[str, object]]:
    pytest.importorskip("transformers", reason="the test extra has it")
    settings = layers.settings_of(layers.parsed([*TINY.split(), *words.split(), "--trace", str(folder)]), 500)
    printed: list[str] = []
    run_ranks(
        ["-m", "bench.layers_worker", json.dumps(dataclasses.asdict(settings)), str(folder / "model")],
        2,
        folder,
        environment=rank_environment("cpu") | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        timeout=600,
        on_line=printed.append,
        on_wait=lambda: None,
    )
    return [json.loads(line) for line in printed if line.startswith("{")]


def test_every_variant_is_compared_and_timed(tmp_path: Path) -> None:
    options = "--phases forward training --set step_node_budget=100000"
    rows = run(tmp_path, options)
    names = list(dict.fromkeys(row["variant"] for row in rows))
    assert (names[0], names[-1]) == (PLAIN, LOCAL) and len(rows) == 2 * len(names)
    ring = [row for row in rows if str(row["variant"]).startswith("ring")]
    assert ring and all(any(": ring" in site for site in row["sites"]) for row in ring)  # type: ignore[attr-defined]
    assert all(row["error"] < 1e-5 for row in rows if row["variant"] != LOCAL)  # type: ignore[operator]
    assert all(row["collectives"] for row in rows if row["variant"] != LOCAL)
    assert all(row["median_ms"] >= row["fastest_ms"] > 0 for row in rows)  # type: ignore[operator]
    assert len(tables.layers(rows).splitlines()) == 2 + len(rows)
    traced = [json.loads(line) for line in (tmp_path / "forward_2_ranks_rank_1.jsonl").read_text().splitlines()]
    waits = [row["wait"] for row in traced if row["variant"].startswith("ring")]
    assert waits and min(waits) > 0 and all(row["matmul"] > 0 for row in traced)


def test_a_wrong_variant_ends_the_bench(tmp_path: Path) -> None:
    """The results of the variant without collectives are wrong on purpose. Here the bench takes this variant for a
    right one, compares its results, and must end."""
    (tmp_path / "sitecustomize.py").write_text(
        "import dataclasses\n"
        "from bench import layer_variants\n"
        "made = layer_variants.variants\n"
        "layer_variants.variants = lambda *a: [dataclasses.replace(v, right=True) for v in made(*a)]\n"
    )
    worker = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); import sitecustomize;"
        " runpy.run_module('bench.layers_worker', run_name='__main__')"
    )
    settings = layers.settings_of(layers.parsed([*TINY.split(), "--phases", "forward", "--variants", LOCAL]), 500)
    with pytest.raises(RankError, match="Wrong: forward no collectives: error"):
        run_ranks(
            ["-c", worker, str(tmp_path), json.dumps(dataclasses.asdict(settings)), str(tmp_path / "model")],
            2,
            tmp_path,
            environment=rank_environment("cpu") | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            timeout=600,
            on_line=lambda line: None,
            on_wait=lambda: None,
        )
