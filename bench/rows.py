# SPDX-License-Identifier: Apache-2.0
"""Rows of measurements, one JSON object for each line of a file."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from collections.abc import Mapping
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch

from bench.providers import Provider
from bench.shapes import Case
from bench.tables import overlap_efficiency
from bench.timing import Timing
from overlap_inductor.inductor.fingerprint import source_hash

RESULTS = Path(__file__).resolve().parent / "results"
_VARIABLES = re.compile(
    r"OVERLAP_INDUCTOR.*|(NCCL|TORCH_SYMM)(?!.*VERSION).*|CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING)"
)
"""Environment variables that may change a measurement."""
_DRIVER = Path("/proc/driver/nvidia/version")


def environment(device: torch.device) -> dict[str, Any]:
    """The machine, versions, commit, environment variables and date of a measurement. ``commit`` is ``None`` outside
    a checkout or without git. ``sources`` is a digest of the package's own files."""
    gpu = device.type == "cuda"
    driver = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text()) if _DRIVER.exists() else None
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = None
    return {
        "gpu": torch.cuda.get_device_name(device) if gpu else f"{platform.machine()} CPU",
        "torch": str(torch.__version__),
        "triton": triton,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "driver": driver.group() if driver else None,
        "commit": _commit(),
        "sources": source_hash()[:12],
        "variables": {name: os.environ[name] for name in sorted(os.environ) if _VARIABLES.fullmatch(name)},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() if found.returncode == 0 else None


def rows_of(
    case: Case,
    setting: str,
    providers: Iterable[Provider],
    times: Mapping[str, Timing],
    errors: Mapping[str, float],
    extra_bytes: Mapping[str, float | None],
    where: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """One row for each provider. ``times`` also holds the times of ``keep``, ``matmul`` and ``collective``.

    Times are in microseconds. Times, errors and extra bytes are maxima over ranks. Fields of a row::

        bound_us            the time of matmul or collective, whichever is longer
        ratio               the provider's time divided by bound_us
        efficiency          see overlap_efficiency
        error               the largest error, relative to the largest element
        peak_extra_bytes    memory beyond operands and result, including symmetric memory
    """
    matmul, collective, keep = (times[name].median for name in ("matmul", "collective", "keep"))
    bound = max(matmul, collective)
    standards = {"matmul_us": matmul, "collective_us": collective, "sum_us": matmul + collective, "bound_us": bound}
    shared = {
        "shape": case.shape, "pattern": case.pattern, "world_size": case.world_size, "tokens": case.tokens,
        "dtype": case.operands, "setting": setting,
    }  # fmt: skip
    rows = []
    for provider in providers:
        time, extra = times[provider.name], extra_bytes[provider.name]
        rows.append({
            **shared,
            "provider": provider.name,
            "runs": provider.runs,
            "median_us": round(time.median, 1), "p20_us": round(time.p20, 1), "p80_us": round(time.p80, 1),
            "speedup": round(keep / time.median, 3),
            **{name: round(us, 1) for name, us in standards.items()},
            "ratio": round(time.median / bound, 3),
            "efficiency": round(overlap_efficiency(matmul + collective, time.median, matmul, collective), 3),
            "host_us": round(time.host, 1),
            "peak_extra_bytes": None if extra is None else int(extra) + provider.held,
            "error": float(f"{errors[provider.name]:.3g}"),
            "repeats": time.repeats,
            "parameters": dict(provider.parameters),
            **where,
        })  # fmt: skip
    return rows


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(path: Path) -> list[dict[str, Any]]:
    """The last row for each GPU, case, setting and provider. Rows without a setting are left out: they are older than
    version 0.1.0."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    keys = ("gpu", "world_size", "shape", "dtype", "setting", "pattern", "tokens", "provider")
    return list({tuple(row[k] for k in keys): row for row in rows if "setting" in row}.values())
