# SPDX-License-Identifier: Apache-2.0
"""Runs models and random programs without overlap and with it, and compares the results.

    python tools/sweep_models.py    # every part: some hours
    python tools/sweep_models.py --part hugging_face --families llama gemma2 --ranks 3 --train
    python tools/sweep_models.py --part hugging_face --sizes even    # even sizes in place of odd sizes
    python tools/sweep_models.py --part hugging_face --sizes even --train --sequence-parallel on
    python tools/sweep_models.py --part torchtitan    # tests/support/torchtitan_models.py says what must be installed
    python tools/sweep_models.py --part programs --seeds 0 500    # the ranks' programs differ in bias, K and padding

Ranks are gloo processes with random weights. Schedule ``ring`` is forced, so every site that it can compute is
overlapped. Rewritten graphs are interpreted, because compiling is slow. ``--generated`` runs Inductor's code instead,
except for random programs.

By default, Hugging Face families have odd sizes. Some of these sizes, for example the vocabulary size, are primes that
the number of ranks does not divide. If a family with odd sizes cannot run without overlap, the family is tried once
more. The sizes of the MLP are then even, and each head has its own key-value head.

``--sequence-parallel on`` rewrites every all-reduce that may be rewritten. A family's row says how many all-reduces its
graphs have, how many were rewritten and why others were not (``left``).

Each case is one JSON row, appended to ``--out``. Its ``outcome`` is one of::

    right                          the results are those of the plain compile
    fell back                      the results are right, but the ranks differed, so they ran the plain program
    nothing overlapped             the results are right, but no site was overlapped
    nothing to compare             rounding alone makes results on some rank too inexact to compare, even without
                                   overlap; all other results are right
    does not run without overlap   an error occurs even without overlap; the row has the error
    wrong                          the results differ, a rank died or hung, or an error occurs only with overlap

A batch of random programs is only ``right`` or ``wrong``; its row counts the programs that fell back. The exit status
is 1 if any case is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.rows import RESULTS  # noqa: E402
from bench.rows import environment  # noqa: E402
from tests.support import gloo_ranks  # noqa: E402
from tests.support import hugging_face_families  # noqa: E402
from tests.support import program_checks  # noqa: E402
from tests.support import torchtitan_models  # noqa: E402
from tests.support import with_and_without  # noqa: E402

PARTS = ("hugging_face", "torchtitan", "programs")
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"step_node_budget": 1},
    {"numerics": "allow_hop_rounding", "ring_direction": "bidirectional", "sub_chunks": 2},
)
"""Fields of ``OverlapConfig``. Batch ``n`` of random programs runs with ``FIELDS[n % len(FIELDS)]``."""
TORCHTITAN = (
    (False, True, "even"),
    (False, False, "even"),
    (True, False, "even"),
    (True, True, "even"),
    (False, True, "odd"),
)
"""``(whether each block is compiled by itself, whether the loss is parallel, sizes of the MLP)``."""
BATCH = 50
"""The number of random programs whose results are one row."""
SHOWN = (
    "error",
    "rounding",
    "worst",
    "sites",
    "reasons",
    "near_misses",
    "all_reduces",
    "rewritten",
    "left",
    "fell_back",
    "warnings",
    "notices",
)


def main() -> int:
    arguments = _arguments()
    counts: dict[str, Counter[str]] = {}
    where = environment(torch.device("cpu"))
    end = time.monotonic() + arguments.limit
    wrong: list[str] = []
    for part in arguments.part:
        for row in _PARTS[part](arguments):
            row = {"part": part, **row, **where}
            print(json.dumps({k: v for k, v in row.items() if k not in where}), flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            counts.setdefault(f"{part}, {row['ranks']} ranks{', trained' if row['train'] else ''}", Counter())[
                row["outcome"]
            ] += 1
            if row["outcome"] == "wrong":
                wrong.append(f"{part} {row['case']}, {row['ranks']} ranks")
            if time.monotonic() > end:
                print(f"stopped after {arguments.limit:.0f} s (--limit)")
                break
    _show(counts)
    print("nothing wrong" if not wrong else "wrong: " + "; ".join(wrong))
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--ranks",
        nargs="*",
        type=int,
        default=(2, 3),
        help="numbers of tensor-parallel ranks, by default 2 and 3; an empty --ranks runs only torchtitan's 2-D meshes",
    )
    parser.add_argument(
        "--train",
        action="store_true",
        help="also compare gradients of Hugging Face families (torchtitan's models always train; so does every second"
        " batch of random programs)",
    )
    parser.add_argument("--families", nargs="+", help="Hugging Face families or torchtitan models; by default all")
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=hugging_face_families.VARIANTS,
        default=("odd",),
        help="sizes of Hugging Face families",
    )
    parser.add_argument(
        "--seeds", nargs=2, type=int, default=(0, 400), metavar=("FIRST", "END"), help="seeds of random programs"
    )
    parser.add_argument(
        "--generated",
        action="store_true",
        help="run Inductor's code (slow) instead of interpreting graphs, except for random programs",
    )
    parser.add_argument(
        "--sequence-parallel",
        choices=("auto", "on", "off"),
        default="auto",
        help="value of the switch sequence_parallel for Hugging Face families",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="begin no further case after this time, except the first case of each part",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "uneven_sweep.jsonl", help="rows are appended here")
    return parser.parse_args()


def _row(case: str, size: int, trains: bool, run: Callable[..., Any], *values: Any) -> dict[str, Any]:
    """The row of one case on ``size`` ranks. It has the outcome of all ranks, and figures of the rank with the largest
    error."""
    start = time.monotonic()
    try:
        found = gloo_ranks.run_ranks(size, run, *values, timeout=300, expect_failure=True)
    except AssertionError as error:
        found = [f"hung: {str(error)[-1500:]}"]
    outcome = with_and_without.outcome(found)
    row: dict[str, Any] = {
        "case": case,
        "ranks": size,
        "train": trains,
        "outcome": outcome,
        "seconds": round(time.monotonic() - start, 1),
    }
    failures = [
        r if isinstance(r, str) else f"{r['could_not_be']}: {r['error_text']}\n{r.get('trace', '')}"
        for r in found
        if isinstance(r, str) or "could_not_be" in r
    ]
    if failures:
        # If one rank fails, the other ranks only report that a connection was closed.
        causes = [f for f in failures if "onnection closed" not in f and "onnection reset" not in f]
        return {**row, "error_text": (causes or failures)[0][-2500:]}
    worst = max(found, key=lambda r: r["error"])
    return {
        **row,
        **{k: worst[k] for k in SHOWN},
        "fell_back": max(r["fell_back"] for r in found),
        "warnings": [w for r in found for w in r["warnings"]],
    }


def _hugging_face(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    import transformers

    gloo_ranks.PRELOADED += ["transformers.models.auto.modeling_auto", "transformers.modeling_utils"]
    for size in arguments.ranks:
        for family in arguments.families or hugging_face_families.families():
            for variant in arguments.sizes:
                row = _family(family, size, variant, arguments)
                yield {**row, "transformers": transformers.__version__}
                if variant == "odd" and row["outcome"] == "does not run without overlap":
                    yield {
                        **_family(family, size, "odd vocabulary", arguments),
                        "transformers": transformers.__version__,
                    }


def _family(family: str, size: int, variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        row = _row(
            family,
            size,
            arguments.train,
            hugging_face_families.row_of,
            family,
            folder,
            variant,
            arguments.train,
            arguments.generated,
            {"sequence_parallel": arguments.sequence_parallel},
        )
    return {**row, "sizes": variant, "sequence_parallel": arguments.sequence_parallel}


def _torchtitan(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("torchtitan") is None:
        yield {
            "case": "torchtitan",
            "ranks": 0,
            "train": True,
            "outcome": "does not run without overlap",
            "error_text": "torchtitan is not installed",
        }
        return
    gloo_ranks.PRELOADED += ["torchtitan.models.llama3", "torchtitan.models.qwen3", "torchtitan.models.deepseek_v3"]
    for name in arguments.families or torchtitan_models.MODELS:
        for size in arguments.ranks:
            for per_block, parallel_loss, mlp in TORCHTITAN:
                words = f"{name}, {_compiled(per_block, parallel_loss)}, {mlp} MLP"
                yield _row(
                    words,
                    size,
                    True,
                    torchtitan_models.row_of,
                    name,
                    size,
                    per_block,
                    parallel_loss,
                    mlp,
                    arguments.generated,
                )
        for per_block in (False, True):
            words = f"{name}, 2 x 2 mesh (data, tensor), {_compiled(per_block, True)}, even MLP"
            values = (name, 2, per_block, True, "even", arguments.generated)
            yield _row(words, 4, True, torchtitan_models.row_of, *values)


def _compiled(per_block: bool, parallel_loss: bool) -> str:
    return f"{'each block' if per_block else 'whole model'} compiled{', loss parallel' if parallel_loss else ''}"


def _programs(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    first, end = arguments.seeds
    for size in arguments.ranks:
        for number, begin in enumerate(range(first, end, BATCH)):
            fields, trains = FIELDS[number % len(FIELDS)], bool(number % 2)
            seeds = list(range(begin, min(begin + BATCH, end)))
            start = time.monotonic()
            found = gloo_ranks.run_ranks(
                size, program_checks.check_uneven, seeds, fields, trains, timeout=1200, expect_failure=True
            )
            problems = [p for r in found for p in ([r] if isinstance(r, str) else r[0])]
            row: dict[str, Any] = {
                "case": f"seeds {begin} to {seeds[-1]}",
                "ranks": size,
                "train": trains,
                "fields": fields,
            }
            row |= {
                "outcome": "wrong" if problems else "right",
                "seconds": round(time.monotonic() - start, 1),
                "problems": problems[:4],
            }
            yield (
                row
                if any(isinstance(r, str) for r in found)
                else {**row, "sites": found[0][1], "fell_back": found[0][2]}
            )


def _show(counts: dict[str, Counter[str]]) -> None:
    outcomes = sorted({o for c in counts.values() for o in c})
    print(f"\n{'':40}" + "".join(f"{o:>30}" for o in outcomes))
    for name, found in counts.items():
        print(f"{name:40}" + "".join(f"{found[o]:>30}" for o in outcomes))


_PARTS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "hugging_face": _hugging_face,
    "torchtitan": _torchtitan,
    "programs": _programs,
}

if __name__ == "__main__":
    sys.exit(main())
