# SPDX-License-Identifier: Apache-2.0
"""Figures derived from timings, and markdown tables of them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

SETTING_WORDS = {"hidden": "the host hidden", "compiled": "compiled graphs, the host in the loop"}


def overlap_efficiency(serial: float, overlapped: float, matmul: float, collective: float) -> float:
    """The part of the hideable time that is hidden: ``(serial - overlapped) / (serial - max(matmul, collective))``.
    ``serial``: the time of matmul and collective one after the other. All times have the same unit.

    Raises:
        ValueError: nothing can be hidden (``serial`` is not more than the longer of ``matmul`` and ``collective``).
    """
    hideable = serial - max(matmul, collective)
    if hideable <= 0:
        raise ValueError(
            f"serial {serial} is not longer than max(matmul {matmul}, collective {collective}): nothing can be hidden"
        )
    return (serial - overlapped) / hideable


def row_efficiency(row: dict[str, Any]) -> float | None:
    """The overlap efficiency of one row of ``bench.slow_link``. ``None`` if nothing can be hidden."""
    try:
        return overlap_efficiency(row["serial_ms"], row["ring_ms"], row["matmul_ms"], row["collective_ms"])
    except ValueError:
        return None


def slow_link(rows: list[dict[str, Any]]) -> str:
    """A table of rows of ``bench.slow_link``, one line for each, in their order. Times are milliseconds."""
    lines = [
        (
            "| pattern | ranks | cores | matmul / transfer | matmul ms | collective ms | serial ms | ring ms |"
            " speed-up | efficiency |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        efficiency = row_efficiency(row)
        lines.append(
            f"| {row['pattern']} | {row['world_size']} | {row['cores']} |"
            f" {row['matmul_ms'] / row['collective_ms']:.2f} |"
            f" {row['matmul_ms']:.0f} | {row['collective_ms']:.0f} | {row['serial_ms']:.0f} | {row['ring_ms']:.0f} |"
            f" {row['serial_ms'] / row['ring_ms']:.2f} | {'-' if efficiency is None else f'{efficiency:.2f}'} |"
        )
    return "\n".join(lines) + "\n"


def layers(rows: Sequence[dict[str, Any]]) -> str:
    """A table of rows of ``bench.layers``, one line for each, in their order. Times are milliseconds."""
    head = (
        "ranks", "link", "layers", "phase", "tokens", "variant", "ms", "p20-p80", "speed-up", "fastest ms", "tokens/s",
        "step MiB", "compile s", "load", "collectives", "collectives left", "overlapped",
    )  # fmt: skip
    lines = header(*head)
    for row in rows:
        moved = [count for name, count in row["sites"].items() if not name.endswith(": keep")]
        counts = [_collectives(row[key]) for key in ("collectives", "collectives_left")]
        lines.append(
            line(
                row["ranks"],
                row["link"],
                row["layers"],
                row["phase"],
                row["batch"] * row["tokens"],
                row["variant"],
                f"{row['median_ms']:.1f}",
                f"{row['p20_ms']:.1f}-{row['p80_ms']:.1f}",
                f"{row['speedup']:.2f}",
                f"{row['fastest_ms']:.1f}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['step_mib']:.0f}",
                f"{row['compile_s']:.0f}",
                f"{row['load']:.0f}",
                *counts,
                f"{sum(moved)} of {sum(row['sites'].values())}" if row["sites"] else "-",
            )
        )
    return "\n".join(lines) + "\n"


def _collectives(counts: dict[str, int]) -> str:
    """The counts as text, sorted by name: ``2 all_gather, 5 all_reduce``."""
    names = {name: name.removesuffix("_tensor").removesuffix("_into") for name in counts}
    return ", ".join(f"{count} {names[name]}" for name, count in sorted(counts.items())) or "-"


def groups(rows: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Group rows by their values of ``keys``. Groups are in the order of their first rows."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[k] for k in keys), []).append(row)
    return found


def provider_names(rows: Iterable[dict[str, Any]]) -> list[str]:
    """``keep``, then the other providers in the order of their first rows."""
    return list(dict.fromkeys(["keep", *(row["provider"] for row in rows)]))


def as_planned(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, without those of schedules whose parameters were set by ``--set``."""
    return [row for row in rows if " " not in row["provider"]]


def heading(row: dict[str, Any]) -> str:
    return f"{row['world_size']} x {row['gpu']}, {row['shape']}, {row['dtype']}, {SETTING_WORDS[row['setting']]}"


def operators(rows: Sequence[dict[str, Any]], details: bool = False) -> str:
    """Rows of ``bench.operators`` as tables, one for each GPU, number of ranks, shape, dtype and setting.

    A cell has microseconds. Brackets hold the speed-up over ``keep`` of the same run; cells of ``keep`` have no
    brackets. For ``auto``, the brackets also name the schedule. ``best`` is the provider with the largest speed-up. The
    last columns have its speed-up, its time divided by ``max`` (the bound), and its overlap efficiency.

    Args:
        details: whether each table is followed by one with every row, also rows whose parameters were set by ``--set``.
    """
    parts = []
    for same in groups(rows, "gpu", "world_size", "shape", "dtype", "setting").values():
        parts.append(f"**{heading(same[0])}**\n\n{_overview(same)}")
        if details:
            parts.append(_details(same))
    return "\n".join(parts)


def line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def header(*cells: str) -> list[str]:
    return [line(*cells), "|---" * len(cells) + "|"]


def _overview(rows: Sequence[dict[str, Any]]) -> str:
    rows = as_planned(rows)
    names = provider_names(rows)
    lines = header(
        "pattern", "tokens", "matmul", "collective", "sum", "max", *names, "best", "speed-up", "ratio", "efficiency"
    )
    for (pattern, tokens), same in groups(_in_order(rows), "pattern", "tokens").items():
        of = {row["provider"]: row for row in same}
        # Each speed-up is against ``keep`` of its own run. The bounds are those of the last ``keep``.
        standard = of.get("keep", same[0])
        bounds = [f"{standard[k]:.0f}" for k in ("matmul_us", "collective_us", "sum_us", "bound_us")]
        best = max((row for row in same if row["provider"] != "keep"), key=lambda row: row["speedup"], default=None)
        last = (
            ["-"] * 4
            if best is None
            else [best["provider"], *(f"{best[k]:.2f}" for k in ("speedup", "ratio", "efficiency"))]
        )
        lines.append(line(pattern, tokens, *bounds, *(_cell(of.get(name), best) for name in names), *last))
    return "\n".join(lines) + "\n"


def _in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort by pattern, in the order of their first rows, and then by tokens."""
    patterns = list(groups(rows, "pattern"))
    return sorted(rows, key=lambda row: (patterns.index((row["pattern"],)), row["tokens"]))


def _cell(row: dict[str, Any] | None, best: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if row["provider"] == "keep":
        return f"{row['median_us']:.0f}"
    text = f"{row['median_us']:.0f} ({row['speedup']:.2f}{', ' + row['runs'] if row['provider'] == 'auto' else ''})"
    return f"**{text}**" if row is best else text


def _details(rows: Sequence[dict[str, Any]]) -> str:
    lines = header(
        "pattern",
        "tokens",
        "provider",
        "median",
        "p20",
        "p80",
        "speed-up",
        "ratio",
        "efficiency",
        "host us",
        "extra MiB",
    )
    for row in _in_order(rows):
        times = [f"{row[k]:.1f}" for k in ("median_us", "p20_us", "p80_us")]
        figures = [f"{row[k]:.2f}" for k in ("speedup", "ratio", "efficiency")]
        extra = "-" if row["peak_extra_bytes"] is None else f"{row['peak_extra_bytes'] / 2**20:.1f}"
        lines.append(
            line(row["pattern"], row["tokens"], row["provider"], *times, *figures, f"{row['host_us']:.0f}", extra)
        )
    return "\n".join(lines) + "\n"
