"""Plots of benchmark rows (matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.tables import row_efficiency


def slow_link(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed-up and overlap efficiency against the ratio of matmul to transfer time, a line for each pattern and world size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for key in sorted({(r["pattern"], r["world_size"]) for r in rows}):
        chosen = sorted((r for r in rows if (r["pattern"], r["world_size"]) == key), key=lambda r: r["matmul_ms"] / r["collective_ms"])
        ratio = [r["matmul_ms"] / r["collective_ms"] for r in chosen]
        label = f"{key[0]}, {key[1]} ranks"
        left.plot(ratio, [r["serial_ms"] / r["ring_ms"] for r in chosen], marker="o", label=label)
        points = [(x, e) for x, e in ((x, row_efficiency(r)) for x, r in zip(ratio, chosen, strict=True)) if e is not None]
        right.plot([x for x, _ in points], [e for _, e in points], marker="o", label=label)
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set_ylabel("speed-up over the plain graph")
    right.set_ylabel("overlap efficiency")
    right.axhline(0.6, color="grey", linewidth=0.8, linestyle="--")
    for axis in (left, right):
        axis.set_xlabel("matmul time / transfer time")
        axis.set_xscale("log")
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
