"""Figures derived from timings, and markdown tables of them."""

from __future__ import annotations

from typing import Any


def overlap_efficiency(serial: float, overlapped: float, matmul: float, collective: float) -> float:
    """Share of what can be hidden that is hidden: ``(serial - t) / (serial - max(matmul, collective))``; times in one unit.

    Raises:
        ValueError: nothing can be hidden (``serial`` is no more than the longer of the two).
    """
    hideable = serial - max(matmul, collective)
    if hideable <= 0:
        raise ValueError(f"serial {serial} is not longer than max(matmul {matmul}, collective {collective}): nothing can be hidden")
    return (serial - overlapped) / hideable


def row_efficiency(row: dict[str, Any]) -> float | None:
    """The overlap efficiency of one benchmark row, or ``None`` where nothing can be hidden."""
    try:
        return overlap_efficiency(row["serial_ms"], row["ring_ms"], row["matmul_ms"], row["collective_ms"])
    except ValueError:
        return None


def slow_link(rows: list[dict[str, Any]]) -> str:
    """The slow-link table: milliseconds, speed-up and overlap efficiency by ratio of matmul to transfer."""
    lines = [
        "| pattern | ranks | matmul / transfer | matmul ms | collective ms | serial ms | ring ms | speed-up | efficiency |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        efficiency = row_efficiency(row)
        lines.append(
            f"| {row['pattern']} | {row['world_size']} | {row['matmul_ms'] / row['collective_ms']:.2f} | {row['matmul_ms']:.0f} | "
            f"{row['collective_ms']:.0f} | {row['serial_ms']:.0f} | {row['ring_ms']:.0f} | {row['serial_ms'] / row['ring_ms']:.2f} | "
            f"{'-' if efficiency is None else f'{efficiency:.2f}'} |"
        )
    return "\n".join(lines) + "\n"
