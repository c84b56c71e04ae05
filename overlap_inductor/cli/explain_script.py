# SPDX-License-Identifier: Apache-2.0
"""``overlap-inductor explain script.py``: run a user's script in mode ``report`` and show what was found."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from overlap_inductor.errors import OverlapError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NO_GRAPH = "The script compiled no graph. It must call torch.compile, and call the function that returns."


def explain_script(script: str, arguments: Sequence[str]) -> int:
    """Run ``script`` in this process as ``__main__`` with ``arguments``, and print every graph's report when it has
    ended.

    Graphs stay as they are, unless the script itself switches overlap on. Of several ranks only the first one prints.
    Returns the script's own exit status, or 1 if it raised, after its traceback. If it raised because it needs a
    launcher's variables, a line says how to start it.

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

    enable(mode="report", notice="off")  # the reports come at the end
    before = (sys.argv, sys.path)
    sys.argv = [script, *arguments]
    sys.path = [str(Path(script).resolve().parent), *sys.path]
    status, missing = 0, ""
    rank = global_rank()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        status = _status(ending)
    except BrokenPipeError:
        raise  # it may be the reader of our output, which main() knows
    except Exception as error:  # noqa: BLE001  (the script's own error: shown, and its reports after it)
        traceback.print_exc()
        status, missing = 1, _missing_variable(error)
    finally:
        sys.argv, sys.path = before
    if missing:
        command = f"torchrun --nproc-per-node 2 -m overlap_inductor explain {shlex.join([script, *arguments])}"
        print(
            f"overlap-inductor explain: the script needs the variables that torchrun sets, and {missing} is not set."
            f" Start it under torchrun, with as many processes as it needs: {command}",
            file=sys.stderr,
        )
    if rank == 0:
        reports = reporting.all_reports()
        text = "\n".join(render_text(report) for report in reports)
        if text or not missing:
            print(text or _NO_GRAPH)
    return status


def _missing_variable(error: BaseException) -> str:
    """The variable of a launcher, such as ``RANK``, whose absence led to ``error``; empty if none did."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyError):
            name = str(cause.args[0]) if cause.args else ""
        else:
            found = re.search(r"environment variable (\w+) expected", str(cause))
            name = found[1] if found else ""
        if name in LAUNCHER_VARIABLES and name not in os.environ:
            return name
        cause = cause.__cause__ or cause.__context__
    return ""


def _status(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    print(ending.code, file=sys.stderr)
    return 1
