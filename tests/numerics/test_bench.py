# SPDX-License-Identifier: Apache-2.0
"""Runs the operator bench as ``torchrun`` does, on two gloo processes, then makes tables and plots from its rows."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.gloo_ranks import run_ranks

FIELDS = {
    "shape", "pattern", "world_size", "tokens", "dtype", "setting", "provider", "runs",
    "median_us", "p20_us", "p80_us", "speedup", "matmul_us", "collective_us", "sum_us", "bound_us",
    "ratio", "efficiency", "host_us", "peak_extra_bytes", "error", "repeats", "parameters",
    "gpu", "torch", "triton", "nccl", "driver", "commit", "sources", "variables", "date",
}  # fmt: skip


def _command(rank: int, world_size: int, arguments: list[str]) -> str:
    """Run ``python -m bench.operators ARGUMENTS`` in this rank's process. Returns what it prints."""
    sys.argv = ["operators", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        try:
            runpy.run_module("bench.operators", run_name="__main__")
        except SystemExit as end:
            assert not end.code, printed.getvalue()
    return printed.getvalue()


def test_the_command_writes_rows_and_the_report_makes_tables_and_plots(tmp_path: Path) -> None:
    pytest.importorskip(
        "triton",
        reason="Triton comes with the package's test extra; an environment without this extra has none",
    )
    pytest.importorskip("matplotlib", reason="matplotlib comes with the package's bench extra")
    file = tmp_path / "rows.jsonl"
    # The first case always runs: the first pattern at the larger token count. After it, the time budget is spent.
    command = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--shapes",
        "tiny",
        "--tokens",
        "16",
        "64",
        "--patterns",
        "all_gather_matmul",
        "matmul_reduce_scatter",
    ]
    command += [
        "--schedules",
        "ring",
        "auto",
        "--repeats",
        "5",
        "--case-seconds",
        "0.1",
        "--budget-seconds",
        "1",
        "--out",
        str(file),
    ]
    printed, _ = run_ranks(2, _command, command, timeout=200, grouped=False)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["pattern"], r["tokens"], r["setting"], r["provider"]) for r in rows] == [
        ("all_gather_matmul", 64, setting, provider)
        for setting in ("hidden", "compiled")
        for provider in ("keep", "ring/p2p", "auto")
    ]
    assert all(set(row) == FIELDS for row in rows)
    assert [row["runs"] for row in rows] == ["keep", "ring", "keep"] * 2 and all(
        row["p20_us"] <= row["median_us"] <= row["p80_us"] for row in rows
    )
    assert "3 of 4 cases left out" in printed
    assert sum(line.startswith("| all_gather_matmul | 64 |") for line in printed.splitlines()) == 2

    from bench import report

    report.main(["--rows", str(file), "--out", str(tmp_path / "report")])
    written = {path.name: path.stat().st_size for path in (tmp_path / "report").iterdir()}
    assert set(written) == {
        "operators.md",
        *(f"operators_2_x86_64_cpu_tiny_float32_{figure}.png" for figure in ("speedup", "ratio")),
    }
    assert min(written.values()) > 500
