# SPDX-License-Identifier: Apache-2.0
"""Plots of benchmark rows (matplotlib)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from bench.layer_variants import LOCAL
from bench.layer_variants import PLAIN
from bench.tables import SETTING_WORDS
from bench.tables import as_planned
from bench.tables import groups
from bench.tables import provider_names
from bench.tables import row_efficiency


def slow_link(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw speed-up and overlap efficiency against the ratio of computation time to transfer time. Each world size has
    a column of panels.

    The drawn rows are stored in the file as its description. A test compares them with the rows in ``bench/results``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib import ticker

    sizes = sorted({row["world_size"] for row in rows})
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    figure, axes = pyplot.subplots(2, len(sizes), figsize=(5 * len(sizes), 7.5), squeeze=False, sharex=True)
    for (speedup, efficiency), world_size in zip(axes.T, sizes, strict=True):
        for pattern in patterns:
            chosen = sorted(
                (_ratio(r), r["serial_ms"] / r["ring_ms"], row_efficiency(r))
                for r in rows
                if (r["pattern"], r["world_size"]) == (pattern, world_size)
            )
            style: dict[str, Any] = {"marker": "o", "markersize": 4, "color": f"C{patterns.index(pattern)}"}
            speedup.plot([x for x, _, _ in chosen], [s for _, s, _ in chosen], label=pattern, **style)
            points = [(x, e) for x, _, e in chosen if e is not None]
            efficiency.plot([x for x, _ in points], [e for _, e in points], **style)
        speedup.axhline(1.0, color="grey", linewidth=0.8)
        efficiency.axhline(1.0, color="grey", linewidth=0.8)
        efficiency.axhline(0.6, color="grey", linewidth=0.8, linestyle=":")
        speedup.set_title(f"{world_size} ranks")
        speedup.set_ylabel("speed-up over the plain graph")
        efficiency.set_ylabel("overlap efficiency")
        efficiency.set_xlabel("computation time / transfer time")
        for axis in (speedup, efficiency):
            axis.set_xscale("log")
            # For a range of one decade, the default labels ("2 x 10^-1" and so on) overlap.
            axis.xaxis.set_major_locator(ticker.FixedLocator([0.125, 0.25, 0.5, 1.0, 2.0, 4.0]))
            axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axis.xaxis.set_minor_locator(ticker.NullLocator())
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=8.5)
    figure.tight_layout(rect=(0, 0.03 + 0.025 * ((len(patterns) + 2) // 3), 1, 1))
    figure.savefig(path, dpi=110, metadata={"Description": json.dumps(rows), "Software": None})
    pyplot.close(figure)


def _ratio(row: dict[str, Any]) -> float:
    return row["matmul_ms"] / row["collective_ms"]  # type: ignore[no-any-return]


def layers(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the speed-up of each variant over plain ``torch.compile``, in groups of bars. Each number of ranks has axes
    of its own. A line shows the speed-ups at the 80th and 20th percentile of the time. A mark shows the speed-up
    without collectives.

    The drawn rows are stored as in ``slow_link``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    programs = groups(rows, "ranks", "link", "layers", "phase", "tokens")
    numbers = sorted({ranks for ranks, *_ in programs})
    most = max(sum(ranks == number for ranks, *_ in programs) for number in numbers)
    names = [n for n in dict.fromkeys(row["variant"] for row in rows) if n not in (PLAIN, LOCAL)]
    size = (max(6.0, 2.0 * most), 3.4 * len(numbers) + 0.6)
    drawn, every = pyplot.subplots(len(numbers), squeeze=False, figsize=size)
    for number, (axis,) in zip(numbers, every, strict=True):
        _layers_of({p: same for p, same in programs.items() if p[0] == number}, names, axis)
    handles: list[Any] = [pyplot.Rectangle((0, 0), 1, 1, color=f"C{index}") for index in range(len(names))]
    labels = list(names)
    if any(row["variant"] == LOCAL for row in rows):
        handles.append(pyplot.Line2D([], [], color="black", marker="_", markersize=14, markeredgewidth=2, linestyle=""))
        labels.append(LOCAL)
    drawn.legend(handles, labels, loc="lower center", ncols=min(len(labels), 3), fontsize=8)
    drawn.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    drawn.savefig(path, dpi=120, metadata={"Description": json.dumps(rows), "Software": None})
    pyplot.close(drawn)


def _layers_of(programs: dict[tuple[Any, ...], list[dict[str, Any]]], names: list[str], axis: Any) -> None:
    """Draw the programs of one number of ranks. ``names``: the variants, each with a color."""
    width = 0.8 / max(len(names), 1)
    for place, same in enumerate(programs.values()):
        of = {row["variant"]: row for row in same}
        plain = of[PLAIN]["median_ms"]
        for index, name in enumerate(names):
            if name not in of:
                continue
            x, row = place + (index - (len(names) - 1) / 2) * width, of[name]
            axis.bar(x, row["speedup"], width=0.95 * width, color=f"C{index}")
            axis.plot([x, x], [plain / row["p80_ms"], plain / row["p20_ms"]], color="black", linewidth=1)
            axis.annotate(f"{row['speedup']:.2f}", (x, 0.03), ha="center", fontsize=8, color="white")
        if LOCAL in of:
            axis.plot([place], [of[LOCAL]["speedup"]], "_", color="black", markersize=50, markeredgewidth=2)
    axis.axhline(1.0, color="grey", linewidth=0.8, zorder=0)
    axis.set_xticks(range(len(programs)), [f"{p}\n{r} ranks, {n} layers\n{link}" for r, link, n, p, _ in programs])
    axis.set_ylabel("speed-up over torch.compile")


FIGURES = {"speedup": "speed-up over keep", "ratio": "time / max(matmul, collective)"}
"""The fields of a row that are drawn against tokens, each with its axis label."""


def operators(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw rows of ``bench.operators`` against tokens, and return the files.

    Each machine, shape and dtype gets a file for each entry of ``FIGURES``. Rows whose parameters were set by ``--set``
    are left out.
    """
    return [
        _against_tokens(same, figure, folder)
        for same in groups(as_planned(rows), "gpu", "world_size", "shape", "dtype").values()
        for figure in FIGURES
    ]


def _against_tokens(rows: list[dict[str, Any]], figure: str, folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = sorted({row["tokens"] for row in rows})
    settings, patterns = (list(dict.fromkeys(row[k] for row in rows)) for k in ("setting", "pattern"))
    # A provider has one colour in all panels.
    colours = {name: f"C{i % 10}" for i, name in enumerate(provider_names(rows))}
    drawn, axes = pyplot.subplots(
        len(settings), len(patterns), figsize=(5 * len(patterns), 4 * len(settings)), sharey="row", squeeze=False
    )
    for (setting, pattern, name), some in groups(rows, "setting", "pattern", "provider").items():
        points = sorted((row["tokens"], row[figure]) for row in some)
        axis = axes[settings.index(setting)][patterns.index(pattern)]
        axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, color=colours[name])
    for i, j in itertools.product(range(len(settings)), range(len(patterns))):
        axis = axes[i][j]
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(tokens, [str(count) for count in tokens], minor=False)
        axis.set_title(f"{patterns[j]}, {SETTING_WORDS[settings[i]]}", fontsize=9)
        axis.set_xlabel("tokens")
        axis.set_ylabel(FIGURES[figure])
    first = rows[0]
    drawn.suptitle(f"{first['world_size']} x {first['gpu']}, {first['shape']}, {first['dtype']}")
    lines = [pyplot.Line2D([], [], color=colour, marker="o", label=name) for name, colour in colours.items()]
    drawn.legend(handles=lines, loc="lower center", ncols=min(len(lines), 3 * len(patterns)), fontsize=8)
    drawn.tight_layout(rect=(0, 0.06, 1, 1))
    gpu = first["gpu"].replace("NVIDIA ", "").replace(" ", "_").lower()
    path = folder / f"operators_{first['world_size']}_{gpu}_{first['shape']}_{first['dtype']}_{figure}.png"
    drawn.savefig(path, dpi=110)
    pyplot.close(drawn)
    return path


HEADLINE_COLOURS = {"auto": "#1f77b4", "async_tp": "#ff9f4a"}
HEADLINE_NAMES = {"auto": "overlap_inductor (schedule auto)", "async_tp": "PyTorch async TP"}


def headline(found: list[dict[str, Any]], path: Path) -> None:
    """Draw README's picture, with a panel for each pattern. At each token count, bars show the providers' speed-ups
    over plain ``torch.compile``. A mark shows the speed-up if the shorter of matmul and collective were wholly hidden.

    The drawn rows (``summaries.headline_rows``) are stored as in ``slow_link``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = groups(found, "pattern")
    drawn, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.4), sharey=True, squeeze=False)
    for axis, ((pattern,), rows) in zip(axes[0], panels.items(), strict=True):
        names = [name for name in HEADLINE_COLOURS if any(row[name] is not None for row in rows)]
        for place, name in enumerate(names):
            on = "white" if name == "auto" else "black"
            left = 0.4 * place - 0.2 * (len(names) - 1)
            bars = [(i + left, row[name]) for i, row in enumerate(rows) if row[name] is not None]
            axis.bar([x for x, _ in bars], [y for _, y in bars], width=0.38, color=HEADLINE_COLOURS[name])
            for x, y in bars:
                axis.annotate(f"{y:.2f}", (x, y - 0.02), ha="center", va="top", fontsize=7.5, color=on)
        axis.plot(
            range(len(rows)), [row["limit"] for row in rows], "_", color="black", markersize=26, markeredgewidth=2
        )
        # Drawn behind the bars: in front, the line would cross the numbers of bars that end near 1.
        axis.axhline(1.0, color="grey", linewidth=0.8, zorder=0)
        axis.set_xticks(range(len(rows)), [str(row["tokens"]) for row in rows])
        axis.set_xlim(-0.6, len(rows) - 0.4)
        axis.set_title(pattern, fontsize=10)
        axis.set_xlabel("tokens")
    axes[0][0].set_ylabel("speed-up over torch.compile")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in HEADLINE_COLOURS.values()]
    handles.append(pyplot.Line2D([], [], color="black", marker="_", markersize=14, markeredgewidth=2, linestyle=""))
    drawn.legend(handles, [*HEADLINE_NAMES.values(), "limit: the shorter of both hidden"], loc="lower center", ncols=3)
    drawn.tight_layout(rect=(0, 0.1, 1, 1))
    drawn.savefig(path, dpi=120, metadata={"Description": json.dumps(found), "Software": None})
    pyplot.close(drawn)
