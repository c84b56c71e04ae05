# SPDX-License-Identifier: Apache-2.0
"""``Failure``: an error inside the pass. It is kept in the graph's report, so that a bug report can be made from the
dump."""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

BUG_REPORT = (
    "This is a bug of overlap_inductor. To report it, run again with OVERLAP_INDUCTOR_DUMP=FOLDER, then run"
    " `overlap-inductor bugreport FOLDER` and send the file that it writes."
)


@dataclass
class Failure:
    """One error that the pass caught. The graph was restored, and compiled without the part that failed.

    Attributes:
        stage: ``pass`` (nothing of the graph is overlapped) | ``rewrite`` (``sites`` are not overlapped) |
            ``seam`` (the two ``sites`` of a seam, ``passes.sequence.seams``, are overlapped without bands) |
            ``sequence_parallel`` (no stretch of the graph is rewritten).
        error: the exception's type and message.
        traceback: as Python prints it. A file's path is relative to the folder from which the file was imported, so
            that it is the same on every machine.
        sites: ids of the sites whose rewrite failed, or of the two sites of the seam; empty for the other stages.
    """

    stage: str
    error: str
    traceback: str
    sites: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, error: Exception, stage: str, sites: list[str] | None = None) -> Failure:
        """Make a ``Failure`` from ``error``. Call this method while ``error`` is handled or afterwards."""
        lines = "".join(traceback.format_exception(error))
        text = re.sub(r'^(\s*File )"([^"]+)"', lambda m: f'{m[1]}"{_below_import_path(m[2])}"', lines, flags=re.M)
        return cls(stage, f"{type(error).__name__}: {error}", text, sites or [])


def _below_import_path(path: str) -> str:
    """``path`` relative to the folder of ``sys.path`` from which it was imported; unchanged if there is no such
    folder."""
    ours = str(Path(__file__).parents[2])
    roots = sorted((root for root in {ours, *sys.path} if root), key=len, reverse=True)
    for root in roots:
        if path.startswith(f"{root.rstrip('/')}/"):
            return path[len(root.rstrip("/")) + 1 :]
    return path
