# SPDX-License-Identifier: Apache-2.0
"""Write tables and plots of the stored rows of ``bench.operators``.

The output folder gets ``operators.md``, and two plots for each machine, shape and dtype. If ``--rows`` is the default,
this command also draws the pictures of README and ``docs/``.

    python -m bench.report [--rows bench/results/operators.jsonl] [--out bench/results]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path

from bench import plots
from bench import rows
from bench import summaries
from bench import tables
from bench import trace_plot

_DEFAULT = rows.RESULTS / "operators.jsonl"
_ASSETS = rows.RESULTS.parent.parent / "docs" / "assets"
PICTURES: dict[Path, tuple[Callable[[], list[summaries.Row]], Callable[[list[summaries.Row], Path], None]]] = {
    _ASSETS / "h200.png": (summaries.headline_rows, plots.headline),
    _ASSETS / "slow_link.png": (summaries.slow_link_rows, plots.slow_link),
    _ASSETS / "layers.png": (summaries.drawn_layers_rows, plots.layers),
    _ASSETS / "layer_trace.png": (summaries.trace_rows, trace_plot.draw),
    _ASSETS / "layer_trace_gpu.png": (summaries.gpu_trace_rows, trace_plot.draw_layer),
}
"""The pictures of README and ``docs/``, each with two functions: one reads the picture's rows, the other draws the
picture."""
INTRODUCTION = """\
# Stored rows of `bench.operators`

`python -m bench.report` makes this page. Each heading names the machine, the layer's shape, the dtype, and
whether the host was hidden or in the loop. Below it are two tables.

The first table has a line for each case. Times are microseconds. A provider's cell has its time and, in brackets, its
speed-up over `keep` of the same run. The cell of `auto` also names the schedule that ran.

| column | meaning |
|---|---|
| matmul, collective | the time of each alone |
| sum, max | the sum and the maximum of these two times |
| best | the provider with the largest speed-up |
| speed-up, ratio, efficiency | those of the best provider |

The second table has a line for each provider of each case.

| column | meaning |
|---|---|
| median, p20, p80 | median, 20th and 80th percentile of the time in microseconds |
| speed-up | time of `keep` divided by the time of the provider |
| ratio | time of the provider divided by *max* |
| efficiency | the part of the hideable time that is hidden: `(sum - time) / (sum - max)` |
| host us | the host's time for one call |
| extra MiB | memory beyond operands and result |

[Performance](../../docs/performance.md) defines the other words.

"""
"""The beginning of ``operators.md``."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, default=_DEFAULT)
    parser.add_argument("--out", type=Path, default=rows.RESULTS)
    options = parser.parse_args(arguments)
    found = rows.read(options.rows)
    if not found:
        parser.error(
            f"{options.rows} has no rows of bench.operators; measure some with: torchrun --nproc-per-node 8 -m"
            " bench.operators"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    table = options.out / "operators.md"
    table.write_text(INTRODUCTION + tables.operators(found, details=True))
    written = [table, *plots.operators(found, options.out)]
    if options.rows.resolve() == _DEFAULT.resolve():
        for picture, (stored, draw) in PICTURES.items():
            draw(stored(), picture)
            written.append(picture)
    for path in written:
        print(path)


if __name__ == "__main__":
    main()
