# SPDX-License-Identifier: Apache-2.0
"""Runs ``bench.layers`` on two gloo ranks, with a tiny Llama, in forward and in training. The slow link that the bench
puts between gloo ranks is left out."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import layer_variants
from bench import layers
from bench import tables
from bench.layer_variants import LOCAL
from bench.layer_variants import PLAIN
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks

TINY = "--layers 1 --hidden 64 --ffn 128 --heads 4 --kv-heads 4 --vocabulary 64 --tokens 32 --repeats 5 --seconds 1"


def _worker(rank: int, world_size: int, settings: str, folder: str, compare_all: bool) -> str:
    """What ``python -m bench.layers_worker`` prints on this rank.

    No C++ kernel is built: matmuls and transfers run in ATen and gloo. With ``compare_all``, the bench compares the
    results of every variant, and only the variant without collectives is compiled.
    """
    compile_anew(kernels=False)
    if compare_all:
        made = layer_variants.variants
        layer_variants.variants = lambda *a: [dataclasses.replace(v, right=True) for v in made(*a)]
        compiled = layer_variants.compiled
        layer_variants.compiled = lambda v, model, *a: compiled(v, model, *a) if v.name == LOCAL else model
    sys.argv = ["layers_worker", settings, f"{folder}/model"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_module("bench.layers_worker", run_name="__main__")
    return printed.getvalue()


def run(folder: Path, words: list[str], compare_all: bool = False) -> list[Any]:
    """What each rank's worker prints. With ``compare_all``, a rank's text may instead be a traceback."""
    pytest.importorskip("transformers", reason="transformers comes with the test extra")
    arguments = [*TINY.split(), *words, "--trace", str(folder), "--ranks", "2", "--megabits", "500"]
    _, settings = layers.on_link(layers.parsed(arguments), 0, 1e11, 8e9)
    text = json.dumps(dataclasses.asdict(settings))
    return run_ranks(2, _worker, text, str(folder), compare_all, timeout=500, expect_failure=compare_all, grouped=False)


@pytest.mark.parametrize(
    ("phase", "only"),
    [
        ("forward", ["ring, sequence_parallel on"]),
        pytest.param("forward", ["auto, sequence_parallel auto", LOCAL], marks=pytest.mark.thorough),
        pytest.param("training", ["ring, sequence_parallel off"], marks=pytest.mark.thorough),
    ],
    ids=["forward", "forward, auto", "training"],
)
def test_variants_are_compared_and_timed(phase: str, only: list[str], tmp_path: Path) -> None:
    switches = ["--set", "step_node_budget=100000", "sub_chunks=1"]
    first, second = run(tmp_path, ["--phases", phase, *switches, "--variants", *only])
    assert second == ""
    rows = [json.loads(line) for line in first.splitlines()]
    every = [v.name for v in layer_variants.variants("ring", "{}", {})]
    assert [row["variant"] for row in rows] == [name for name in every if name in (PLAIN, *only)]
    ring = [row for row in rows if row["variant"].startswith("ring")]
    assert all(any(": ring" in site for site in row["sites"]) for row in ring)
    assert bool(ring) == any(name.startswith("ring") for name in only)
    assert all(row["error"] < 1e-5 for row in rows if row["variant"] != LOCAL)
    # The bench counts the plain program's collectives in the graphs of another variant that the sequence-parallel
    # rewrite has not changed. Without such a variant, the collectives of the plain program are not counted.
    uncounted = [LOCAL, PLAIN] if all("sequence_parallel on" in name for name in only) else [LOCAL]
    assert all(row["collectives"] for row in rows if row["variant"] not in uncounted)
    assert all(row["median_ms"] >= row["fastest_ms"] > 0 for row in rows)
    assert len(tables.layers(rows).splitlines()) == 2 + len(rows)
    traced = [json.loads(line) for line in (tmp_path / f"{phase}_2_ranks_rank_1.jsonl").read_text().splitlines()]
    # A message may be there already when the rank waits for it, so the time of a wait may be rounded to 0. ``auto`` may
    # keep all sites of so small a model. Then it waits for nothing.
    overlapped = {row["variant"]: any(": ring" in site for site in row["sites"]) for row in rows}
    assert {row["variant"] for row in traced} == {PLAIN, *only} - {LOCAL}
    for row in traced:
        assert any("waits" in kinds for kinds in row["sites"].values()) == overlapped[row["variant"]]
    assert all(row["matmul"] > 0 for row in traced)


# Marked ``thorough``, because ``test_variants_are_compared_and_timed`` checks the errors of the other variants.
@pytest.mark.thorough
def test_a_wrong_variant_ends_the_bench(tmp_path: Path) -> None:
    """The variant without collectives is wrong on purpose. The test marks it as right, so the bench must find the error
    and end."""
    for text in run(tmp_path, ["--phases", "forward", "--variants", LOCAL], compare_all=True):
        assert "Wrong: forward no collectives: error" in text
