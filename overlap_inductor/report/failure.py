# SPDX-License-Identifier: Apache-2.0
"""``Failure``: an error inside the pass, kept in the graph's report for a bug report."""

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
        stage: the part that failed, see below.
        error: the exception's type and message.
        traceback: the text that Python prints. Each file's path is relative to the longest folder that contains it,
            among ``sys.path`` and the folder that holds this package.
        sites: ids of the sites concerned; empty for stages ``pass`` and ``sequence_parallel``.

    Stages:

    - ``pass``: no site is overlapped. If the sequence-parallel pass has already rewritten stretches, they stay
      rewritten.
    - ``rewrite``: ``sites`` are not overlapped.
    - ``seam``: the two ``sites`` of a seam (``passes.sequence.seams``) are overlapped without bands.
    - ``chain``: the four ``sites`` of a chain are overlapped in bands, but its two seams run one after the other.
    - ``sequence_parallel``: no stretch of the graph is rewritten.
    """

    stage: str
    error: str
    traceback: str
    sites: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, error: Exception, stage: str, sites: list[str] | None = None) -> Failure:
        """Make a ``Failure`` from ``error``, while it is handled or afterwards."""
        lines = "".join(traceback.format_exception(error))
        text = re.sub(r'^(\s*File )"([^"]+)"', lambda m: f'{m[1]}"{_below_import_path(m[2])}"', lines, flags=re.M)
        return cls(stage, f"{type(error).__name__}: {error}", text, sites or [])


def _below_import_path(path: str) -> str:
    """``path`` in the form that ``Failure.traceback`` describes. If none of the folders named there contains ``path``,
    returns ``path`` unchanged."""
    ours = str(Path(__file__).parents[2])
    roots = sorted((root for root in {ours, *sys.path} if root), key=len, reverse=True)
    for root in roots:
        if path.startswith(f"{root.rstrip('/')}/"):
            return path[len(root.rstrip("/")) + 1 :]
    return path
