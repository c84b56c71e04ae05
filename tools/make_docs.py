# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of README and ``docs/``: tables, reason codes, drawings, sample outputs.

python tools/make_docs.py             # tables, reason codes and drawings
python tools/make_docs.py --samples   # also run the commands of the pages and store their outputs (minutes)
python tools/make_docs.py --check     # change nothing; fail if a table, a reason code or a drawing is out of date
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench import summaries  # noqa: E402
from tools.doc_parts import drawings  # noqa: E402
from tools.doc_parts import hardware  # noqa: E402
from tools.doc_parts import reasons  # noqa: E402
from tools.doc_parts import samples  # noqa: E402
from tools.doc_parts import switches  # noqa: E402
from tools.doc_parts.pages import DOCS  # noqa: E402
from tools.doc_parts.pages import filled  # noqa: E402
from tools.doc_parts.pages import pages  # noqa: E402

PARTS: dict[str, Callable[[], str]] = {
    "hardware": hardware.table,
    "switches": switches.table,
    "reasons": reasons.sections,
    **{f"drawing.{name}": partial(drawings.picture, name) for name in drawings.PICTURES},
    **{f"measured.{name}": make for name, make in summaries.TABLES.items()},
}
"""For the name of each generated part, the function that makes the part."""
README = ROOT / "README.md"
RUN = ("getting-started.md", "reading-a-report.md", "switches.md", "testing.md")
"""The pages whose blocks are run, in this order and in one folder. README's blocks are run first, in another folder."""


def outdated() -> dict[Path, str]:
    """The pages on which a part in ``PARTS`` is out of date, each with the page's new text."""
    found = {path: filled(path.read_text(encoding="utf-8"), PARTS) for path in (README, *pages())}
    return {path: text for path, text in found.items() if text != path.read_text(encoding="utf-8")}


def run_samples(
    paths: Sequence[Path], folder: Path, programs: Path | None = None
) -> list[tuple[Path, samples.Sample, str]]:
    """Run the blocks of the pages ``paths``. Returns ``(page, output block, output of this run)`` of each output block.

    Args:
        folder: where the blocks run, except those that run in the checkout.
        programs: a folder whose ``python`` and ``overlap-inductor`` the blocks use.
    """
    found = []
    for path in paths:
        outputs = samples.run(samples.samples(path.read_text(encoding="utf-8")), folder, programs)
        found += [(path, sample, output) for sample, output in outputs]
    return found


def page_runs() -> list[list[Path]]:
    """Lists of pages. The blocks of the pages of one list share a folder."""
    return [[README], [DOCS / name for name in RUN]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make_docs.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a page is out of date")
    parser.add_argument("--samples", action="store_true", help="run the commands of the pages and store their outputs")
    options = parser.parse_args(arguments)
    changed = outdated()
    for path, text in changed.items():
        print(f"{path.relative_to(ROOT)}: {'out of date; run python tools/make_docs.py' if options.check else 'made'}")
        if not options.check:
            path.write_text(text, encoding="utf-8")
    if options.check:
        return 1 if changed else 0
    if options.samples:
        outputs = []
        for paths in page_runs():
            with tempfile.TemporaryDirectory() as folder:
                outputs += run_samples(paths, Path(folder))
        for path in {path for path, _, _ in outputs}:
            mine = [(sample, output) for where, sample, output in outputs if where == path]
            path.write_text(samples.with_outputs(path.read_text(encoding="utf-8"), mine), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
