# SPDX-License-Identifier: Apache-2.0
"""Real models run as an unchanged script, without and with the environment variables that switch overlap on. The
results must agree, and the dump of each rank must have all sites of the model."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_inductor.cli.local_ranks import rank_environment
from overlap_inductor.cli.local_ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("plain_models.py")
TOLERANCE = 1e-5
AUTOLOADED = {f"overlap_inductor{part}" for part in ("", ".version", ".switch", ".switch.autoload")}
"""What ``import torch`` imports of this project, also if no variable is set."""

Results = dict[str, torch.Tensor]
Sites = dict[tuple[str, str, str], int]


def _rewritten(layers: int) -> Sites:
    """The sites of a language model whose all-reduces are rewritten (``sequence_parallel`` is ``auto``). In each layer:
    the projections before and after attention, the router, and the experts. Then the head."""
    return {
        ("inference", "all_gather_matmul", "3 mm"): layers,
        ("inference", "matmul_reduce_scatter", "1 mm"): layers,
        ("inference", "all_gather_matmul", "1 mm"): layers + 1,
        ("inference", "matmul_reduce_scatter", "2 grouped_mm"): layers,
    }


SITES: dict[str, Sites] = {
    "llama": {
        ("forward", "all_gather_matmul", "3 mm"): 2,
        ("forward", "matmul_reduce_scatter", "1 mm"): 4,
        ("forward", "all_gather_matmul", "2 mm"): 2,
        ("forward", "all_gather_matmul", "1 mm"): 1,
        ("backward", "matmul_reduce_scatter", "1 mm"): 1,
        ("backward", "all_gather_matmul", "2 mm"): 4,
        ("backward", "matmul_reduce_scatter", "2 mm"): 2,
        ("backward", "matmul_reduce_scatter", "3 mm"): 2,
    },
    # The first block's input and the last block's output are whole.
    "blocks": {
        ("forward", "matmul_reduce_scatter", "1 addmm"): 2,
        ("forward", "all_gather_matmul", "1 addmm"): 1,
        ("backward", "matmul_reduce_scatter", "1 mm"): 2,
        ("backward", "all_gather_matmul", "2 mm"): 1,
    },
    "dlrm": {
        ("forward", "embedding_all_to_all", "3 embedding_bag"): 1,
        ("backward", "embedding_all_to_all", "3 embedding_gradient"): 1,
    },
    "torchtitan": {
        ("forward", "all_to_all_experts", "3 grouped_mm"): 1,
        ("backward", "all_to_all_experts", "3 grouped_mm"): 1,
    },
    "ulysses": {
        ("inference", "matmul_all_to_all", "1 addmm"): 3,
        ("inference", "all_to_all_matmul", "1 addmm"): 1,
    },
    "mixtral": _rewritten(layers=2),
    # On 2 ranks, the estimate is against the rewrite of the attention. The experts keep their all-reduce.
    "qwen2_moe": {
        ("inference", "matmul_all_reduce", "1 mm"): 1,
        ("inference", "matmul_all_reduce", "2 grouped_mm"): 1,
        ("inference", "matmul_all_gather", "1 mm"): 1,
    },
    "qwen3_moe": _rewritten(layers=1),
}
"""``{model: {(phase, pattern, matmuls or lookups of a site): number of overlapped sites}}``."""
SITES_ON_4_RANKS: dict[str, Sites] = {
    # On more ranks, the estimate is for the rewrite. The router and the shared expert then share a gather.
    "qwen2_moe": {
        ("inference", "all_gather_matmul", "3 addmm"): 1,
        ("inference", "matmul_reduce_scatter", "1 mm"): 1,
        ("inference", "all_gather_matmul", "4 mm"): 1,
        ("inference", "matmul_all_reduce", "2 grouped_mm"): 1,
        ("inference", "all_gather_matmul", "1 mm"): 1,
    },
}
"""The sites of models that have others on 4 ranks than on 2."""


TRAINED = ("llama", "blocks")
"""The models whose training step is rewritten."""


def run(
    model: str, ranks: int, folder: Path, name: str, switches: dict[str, str]
) -> list[tuple[Results, dict[str, Any]]]:
    """Run the script. Returns ``(results, compiler's counts and imported modules)`` of each rank. Runs with the same
    ``folder`` share Inductor's cache."""
    results = folder / name
    results.mkdir()
    environment = {
        **rank_environment("cpu"),
        **switches,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        # Experts compute in bf16. A kernel rounds each value to bf16 also where Inductor fuses two ops. Otherwise, the
        # two runs would round different values, because they fuse different ops.
        "TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [str(SCRIPT), model, str(folder / "weights"), str(results)]
    run_ranks(command, ranks, results, environment=environment, timeout=500, on_line=print, on_wait=lambda: None)
    files = [results / f"rank{rank}" for rank in range(ranks)]
    return [(torch.load(f.with_suffix(".pt")), json.loads(f.with_suffix(".json").read_text())) for f in files]


def overlapped_sites(dump: Path) -> Sites:
    """The overlapped sites of one rank's dump. No step of the pass may have failed."""
    found: Counter[tuple[str, str, str]] = Counter()
    for path in dump.glob("*/sites.json"):
        report = json.loads(path.read_text())
        assert report["failures"] == [] and report["notices"] == [], report
        for site in report["sites"]:
            kinds = Counter(m["kind"] for m in site["matmuls"])
            if site["decision"]["status"] == "overlapped":
                matmuls = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
                found[report["phase"], site["pattern"], matmuls] += 1
    return dict(found)


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        ("dlrm", 2),
        *(
            pytest.param(model, ranks, marks=pytest.mark.thorough)
            for model in SITES
            for ranks in (2, 4)
            if (model, ranks) != ("dlrm", 2)
        ),
    ],
)
def test_an_unchanged_script(model: str, ranks: int, tmp_path: Path) -> None:
    """The script's results with overlap equal those of plain ``torch.compile``. No graph breaks, and no rank falls
    back to the graph without overlap."""
    if not importlib.metadata.entry_points(group="torch.backends", name="overlap_inductor"):
        pytest.skip("the package is not installed here, so torch cannot load it by itself; pip install -e . first")
    dump = tmp_path / "dump"
    switches = {"OVERLAP_INDUCTOR": "1", "OVERLAP_INDUCTOR_SCHEDULE": "ring", "OVERLAP_INDUCTOR_DUMP": str(dump)}
    if model in TRAINED:
        switches["OVERLAP_INDUCTOR_SEQUENCE_PARALLEL"] = "on"
    plain = run(model, ranks, tmp_path, "plain", {})
    assert not dump.exists()
    overlapped = run(model, ranks, tmp_path, "overlapped", switches)
    expected = SITES_ON_4_RANKS.get(model, SITES[model]) if ranks == 4 else SITES[model]
    problems = []
    for rank, ((wanted, without), (found, about)) in enumerate(zip(plain, overlapped, strict=True)):
        # Otherwise, the script itself may use this project.
        assert {m for m in without["modules"] if m.split(".")[0] == "overlap_inductor"} <= AUTOLOADED
        if (sites := overlapped_sites(dump / f"rank_{rank}")) != expected:
            problems.append(f"rank {rank}: sites {sites}")
        counts = about["counts"]
        mine = counts["overlap_inductor"]
        if mine["sites_overlapped"] != sum(expected.values()) or "reason.ranks_differ" in mine:
            problems.append(f"rank {rank}: {mine}")
        if counts["graph_break"] or without["counts"]["graph_break"]:
            problems.append(f"rank {rank}: graph breaks {counts['graph_break']}")
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            error, largest = float((found[name] - tensor).abs().max()), float(tensor.abs().max())
            print(f"rank {rank}: {name} differs by {error:.2g} of {largest:.2g}")
            if not (largest > 0 and error <= TOLERANCE * largest):
                problems.append(f"rank {rank}: {name} differs by {error:.2g} of {largest:.2g}")
    assert problems == []
