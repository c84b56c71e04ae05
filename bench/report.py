# SPDX-License-Identifier: Apache-2.0
"""Write tables and plots of the stored rows of ``bench.operators``.

The output folder gets ``operators.md``, and two plots for each machine, shape and dtype. If ``--rows`` names the
default file, the pictures of README and ``docs/`` are also drawn.

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

_DEFAULT = rows.RESULTS / "operators.jsonl"
_ASSETS = rows.RESULTS.parent.parent / "docs" / "assets"
PICTURES: dict[Path, tuple[Callable[[], list[summaries.Row]], Callable[[list[summaries.Row], Path], None]]] = {
    _ASSETS / "h200.png": (summaries.headline_rows, plots.headline),
    _ASSETS / "slow_link.png": (summaries.slow_link_rows, plots.slow_link),
    _ASSETS / "layers.png": (summaries.layers_rows, plots.layers),
}
"""The pictures of README and ``docs/``. Each has a function that reads its stored rows and a function that draws
them."""


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
    table.write_text(tables.operators(found, details=True))
    written = [table, *plots.operators(found, options.out)]
    if options.rows.resolve() == _DEFAULT.resolve():
        for picture, (stored, draw) in PICTURES.items():
            draw(stored(), picture)
            written.append(picture)
    for path in written:
        print(path)


if __name__ == "__main__":
    main()
