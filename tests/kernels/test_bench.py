# SPDX-License-Identifier: Apache-2.0
"""Runs the operator bench in Triton's interpreter, with schedules that compute a site in one op. A wrong result must
end the bench."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tests.support.gloo_ranks import run_ranks
from tests.support.shared_memory import use_shared_memory

ARGUMENTS = ["--device", "cpu", "--dtype", "float16", "--shapes", "tiny", "--repeats", "2", "--case-seconds", "0"]


def _run(rank: int, world_size: int, folder: str, arguments: list[str]) -> list[dict[str, Any]]:
    from bench import operators
    from bench import timing

    # In the interpreter, a call takes some tenths of a second.
    timing.CALLS_IN_LOOP = 1, 1
    use_shared_memory(folder)
    torch.manual_seed(rank)
    with torch.no_grad():
        return operators.run(
            operators.parsed([*ARGUMENTS, "--out", f"{folder}/rows.jsonl", *arguments]),
            torch.device("cpu"),
            time.monotonic(),
        )


def test_schedules_of_one_op_run_as_ops_and_in_compiled_graphs(tmp_path: Path) -> None:
    arguments = [
        "--tokens",
        "8",
        "--patterns",
        "all_gather_matmul",
        "--schedules",
        "fused/sm_push",
        "chunked/copy_engine",
        "--set",
        "fused.parts=1",
    ]
    first, second = run_ranks(2, _run, str(tmp_path), arguments, timeout=200)
    found = {(row["setting"], row["provider"]): row for row in first}
    assert list(found) == [
        ("hidden", "keep"), ("hidden", "fused/sm_push"), ("hidden", "chunked/copy_engine"), ("hidden", "fused parts=1"),
        ("compiled", "keep"), ("compiled", "fused/sm_push"), ("compiled", "chunked/copy_engine"),
    ]  # fmt: skip
    assert [row["runs"] for row in first] == ["keep", "fused", "chunked", "fused", "keep", "fused", "chunked"]
    assert (
        found["hidden", "fused parts=1"]["parameters"]["parts"] == 1
        and found["hidden", "fused/sm_push"]["parameters"]["parts"] == 2
    )
    assert found["hidden", "chunked/copy_engine"]["parameters"]["transport"] == "copy_engine"
    assert all(0 < row["error"] < 2e-2 or row["provider"] == "keep" for row in first)
    # All ranks report the same times.
    assert [row["median_us"] for row in first] == [row["median_us"] for row in second]


def test_small_messages(tmp_path: Path) -> None:
    arguments = [
        "--tokens",
        "2",
        "--patterns",
        "matmul_all_reduce",
        "--schedules",
        "small_message",
        "--settings",
        "hidden",
    ]
    (first, _) = run_ranks(2, _run, str(tmp_path), arguments, timeout=200)
    assert [row["provider"] for row in first] == ["keep", "small_message/sm_push"]


def _fp8(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    arguments = [
        "--tokens",
        "8",
        "--patterns",
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "--schedules",
        "chunked/copy_engine",
        "--settings",
        "hidden",
    ]
    return [
        row for dtype in ("fp8", "fp8_rows") for row in _run(rank, world_size, folder, [*arguments, "--dtype", dtype])
    ]


def test_fp8(tmp_path: Path) -> None:
    (first, _) = run_ranks(2, _fp8, str(tmp_path), timeout=200)
    assert [(row["dtype"], row["pattern"], row["runs"]) for row in first] == [
        (dtype, pattern, runs)
        for dtype in ("fp8", "fp8_rows")
        for pattern in ("all_gather_matmul", "matmul_reduce_scatter")
        for runs in ("keep", "chunked")
    ]
    # Results are rounded to bf16, so no error is 0.
    assert all(0 < row["error"] < 2e-2 for row in first)


def _wrong(rank: int, world_size: int, folder: str) -> str:
    from bench.measure import WrongResult
    from overlap_inductor.lowerings.fused import calls as fused

    right = fused.all_gather_matmuls
    fused.all_gather_matmuls = lambda *arguments: [result + rank for result in right(*arguments)]
    try:
        _run(
            rank,
            world_size,
            folder,
            [
                "--tokens",
                "8",
                "--patterns",
                "all_gather_matmul",
                "--schedules",
                "fused/sm_push",
                "--settings",
                "hidden",
            ],
        )
    except WrongResult as error:
        return str(error)
    return "nothing was wrong"


def test_a_wrong_result_on_one_rank_ends_the_bench_on_all(tmp_path: Path) -> None:
    for text in run_ranks(2, _wrong, str(tmp_path), timeout=200):
        assert text.startswith("fused/sm_push is wrong for tiny all_gather_matmul 8: off by")
    assert not (tmp_path / "rows.jsonl").exists()
