# SPDX-License-Identifier: Apache-2.0
"""README's table of hardware: which schedules run on each kind of hardware, and on which kinds they were measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench import rows
from bench.summaries import headline_rows
from bench.tables import header
from bench.tables import line
from overlap_inductor.facts.machine import Box
from overlap_inductor.facts.machine import machine_for
from overlap_inductor.lowerings.registry import SCHEDULES
from overlap_inductor.torch_compat.target import planning_for

GPUS = {
    "NVIDIA H200": (9, 0),
    "NVIDIA H100": (9, 0),
    "NVIDIA A100": (8, 0),
    "NVIDIA Blackwell (B200)": (10, 0),
}
"""Compute capabilities, by the GPU's name in the table."""
RANKS = tuple(range(8))
UNKNOWN = "unknown: `overlap-inductor demo` measures it"


def table() -> str:
    lines = [[f"{name}, one machine with NVLink", _names(_on_gpus(name)), *_measured(name)] for name in GPUS]
    own = [s.name for s in SCHEDULES if s.why_not_between(RANKS, torch.device("cpu")) is None]
    # The schedules of an A100 use no kernels of this package. So they also run on other GPUs and across machines.
    several = [s.name for s in SCHEDULES if s.name in _on_gpus("NVIDIA A100")]
    compare = "unknown: time your model with and without overlap"
    lines.append(["other GPUs, GPUs without NVLink, groups over several machines", _names(several), "not yet", compare])
    lines.append(
        [
            "CPUs (gloo), one machine or several",
            _names(own),
            "2 and 4 ranks over slow links",
            "gains over slow links only",
        ]
    )
    return "\n".join(
        [*header("hardware", "schedules that run", "measured", "what to expect"), *(line(*cells) for cells in lines)]
    )


def _on_gpus(name: str) -> list[str]:
    """Names of the schedules that run on 8 GPUs of one machine, if the GPUs reach each other's memory."""
    with planning_for(Box(name, name, len(RANKS), GPUS[name], machine_for("cuda"))):
        # Inside ``planning_for``, schedules answer for the GPUs of the ``Box``. So the device passed may be the CPU.
        return [s.name for s in SCHEDULES if s.why_not_between(RANKS, torch.device("cpu")) is None]


def _names(schedules: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in schedules) or "none"


def _measured(name: str) -> list[str]:
    """The numbers of GPUs on which schedules were measured, and what a user can expect. Stored rows may have the memory
    size after the GPU's name (``NVIDIA H100 80GB HBM3``)."""
    stored = [row for row in rows.read(rows.RESULTS / "operators.jsonl") if row["gpu"].startswith(name)]
    *others, most = [str(count) for count in sorted({row["world_size"] for row in stored})] or [""]
    counts = f"{', '.join(others)} and {most} GPUs" if others else f"{most} GPUs"
    if {row["pattern"] for row in stored} >= {row["pattern"] for row in headline_rows()}:
        return [counts, "the picture above"]
    kernels = set(_on_gpus(name)) - set(_on_gpus("NVIDIA A100"))
    expected = "the same kernels as on H200; time estimates may be less accurate" if kernels else UNKNOWN
    return [f"some patterns, on {counts}" if stored else "not yet", expected]
