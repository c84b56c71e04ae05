# SPDX-License-Identifier: Apache-2.0
"""Draws where the time of a step goes on one rank, plain and with overlap (rows of ``bench.layer_trace``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLORS = {"matmul": "C0", "collective": "C3", "wait": "C1", "send": "C2", "loop": "C4"}
"""The kinds of ``bench.layer_trace``, with their colors. What has no kind (pointwise kernels, attention) stays
white."""
WORDS = {"wait": "wait for a peer", "collective": "collective (the rank waits)", "loop": "op of a whole site"}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a line of bars for each row. The drawn rows are stored in the file as in ``plots.slow_link``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(11, 1.4 + 0.9 * len(rows)))
    for line, row in enumerate(reversed(rows)):
        for kind, begin, end in row["bars"]:
            axis.broken_barh([(begin, end - begin)], (line - 0.35, 0.7), color=COLORS[kind], linewidth=0)
        axis.text(row["step"], line, f"  {row['step']:.0f} ms", va="center", fontsize=9)
    axis.set_yticks(range(len(rows)), [row["variant"] for row in reversed(rows)])
    axis.set_xlim(0, max(row["step"] for row in rows) * 1.08)
    axis.set_xlabel("milliseconds of one step on rank 0")
    kinds = [kind for kind in COLORS if any(kind == bar[0] for row in rows for bar in row["bars"])]
    handles = [patches.Patch(color=COLORS[kind], label=WORDS.get(kind, kind)) for kind in kinds]
    figure.legend(handles=handles, loc="upper center", ncols=len(kinds), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=110, metadata={"Description": json.dumps(rows), "Software": None})
    pyplot.close(figure)
