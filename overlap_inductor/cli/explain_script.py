# SPDX-License-Identifier: Apache-2.0
"""``overlap-inductor explain script.py``: run a user's script in mode ``report`` and show what was found."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from overlap_inductor.errors import OverlapError


def explain_script(script: str, arguments: Sequence[str]) -> int:
    """Run ``script`` in this process as ``__main__`` with ``arguments``, and print every graph's report when it has
    ended.

    Graphs stay as they are, unless the script itself switches overlap on. Of several ranks only the first one prints.
    Returns the script's own exit status, or 1 if it raised, after its traceback.

    Raises:
        OverlapError: there is no such script.
        UnsupportedError: this torch is not supported.
    """
    if not Path(script).is_file():
        raise OverlapError(
            f"{script} is not a file; expected a Python script: overlap-inductor explain SCRIPT [ARGUMENTS]"
        )
    from overlap_inductor.report import publish as reporting
    from overlap_inductor.report.text import render_text
    from overlap_inductor.switch.install import enable
    from overlap_inductor.torch_compat.telemetry import global_rank

    enable(mode="report")
    before = (sys.argv, sys.path)
    sys.argv = [script, *arguments]
    sys.path = [str(Path(script).resolve().parent), *sys.path]
    status = 0
    rank = global_rank()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        status = _status(ending)
    except Exception:  # noqa: BLE001  (the script's own error: shown, and its reports after it)
        traceback.print_exc()
        status = 1
    finally:
        sys.argv, sys.path = before
    if rank == 0:
        reports = reporting.all_reports()
        text = "\n".join(render_text(report) for report in reports)
        print(text or "The script compiled no graph. It must call torch.compile, and call the function that returns.")
    return status


def _status(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    print(ending.code, file=sys.stderr)
    return 1
