# SPDX-License-Identifier: Apache-2.0
"""Draws where the time of a step or of a layer goes on one rank, plain and with overlap (rows of ``bench.layer_trace``
and ``bench.layer_trace_gpu``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLORS = {
    "matmul": "C0", "collective": "C3", "wait": "C1", "send": "C2", "loop": "C4", "attention": "C9", "pointwise": "0.6",
}  # fmt: skip
"""The kinds of work, with their colors. On a CPU, what has no kind (pointwise kernels, attention) stays white."""
WORDS = {"wait": "wait for a peer", "collective": "collective (the rank waits)", "loop": "op of a whole site"}
GPU_WORDS = {"wait": "wait for a peer", "collective": "NCCL", "send": "copy to a peer"}


def draw_layer(rows: list[dict[str, Any]], path: Path) -> None:
    """``draw`` for the rows of a layer on GPUs (``bench.layer_trace_gpu``)."""
    draw(rows, path, "milliseconds of one layer on rank 0", GPU_WORDS, digits=2)


def draw(
    rows: list[dict[str, Any]],
    path: Path,
    label: str = "milliseconds of one step on rank 0",
    words: Mapping[str, str] = WORDS,
    digits: int = 0,
) -> None:
    """Draw a line of bars for each row. The drawn rows are stored in the file as in ``plots.slow_link``.

    Args:
        label: what the horizontal axis shows.
        words: the legend's words for kinds, if they differ from a kind's name.
        digits: number of digits behind the point of a row's time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(11, 1.4 + 0.9 * len(rows)))
    for line, row in enumerate(reversed(rows)):
        for kind, begin, end in row["bars"]:
            axis.broken_barh([(begin, end - begin)], (line - 0.35, 0.7), color=COLORS[kind], linewidth=0)
        axis.text(row["step"], line, f"  {row['step']:.{digits}f} ms", va="center", fontsize=9)
    axis.set_yticks(range(len(rows)), [row["variant"] for row in reversed(rows)])
    axis.set_xlim(0, max(row["step"] for row in rows) * 1.08)
    axis.set_xlabel(label)
    kinds = [kind for kind in COLORS if any(kind == bar[0] for row in rows for bar in row["bars"])]
    handles = [patches.Patch(color=COLORS[kind], label=words.get(kind, kind)) for kind in kinds]
    figure.legend(handles=handles, loc="upper center", ncols=len(kinds), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=110, metadata={"Description": json.dumps(rows), "Software": None})
    pyplot.close(figure)
