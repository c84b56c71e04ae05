# SPDX-License-Identifier: Apache-2.0
"""``overlap-inductor explain script.py``: run a user's script in mode ``report`` and show the reports of its graphs.

With ``--machine`` or ``--ranks``, the script runs in one process that plays rank 0. Its graphs are planned and not run.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
import textwrap
import traceback
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_inductor.errors import ConfigError
from overlap_inductor.errors import OverlapError
from overlap_inductor.facts.machine import BOXES
from overlap_inductor.facts.machine import Box

if TYPE_CHECKING:
    from overlap_inductor.report.report import OverlapReport

_NO_GRAPH = (
    "The script compiled no graph. It must call torch.compile, and then call the compiled function, in its own process."
)
_NO_GPU = (
    "overlap-inductor explain: the script asks for a GPU, and this machine has none that torch can use. Let the script"
    ' put its tensors on "cpu" if torch.cuda.is_available() is False. With --machine, its sites are still planned'
    " for that machine."
)

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

WIDTH = 120


def explain_script(
    script: str,
    arguments: Sequence[str],
    machine: str | None = None,
    ranks: int | None = None,
    short: bool = False,
) -> int:
    """Run ``script`` in this process as ``__main__`` with ``arguments``. At its end, rank 0 prints the reports of the
    last 256 graphs and the total of their estimated times.

    Returns the script's own exit status, or 1 if it raised an exception.

    Args:
        machine: name of the machine for which plans are made. ``None``: this machine.
        ranks: size of the group in which this process acts as rank 0. ``None`` with ``machine``: the number of GPUs of
            ``machine``. ``None`` without ``machine``: the script runs in the group that it makes itself.
        short: whether to print only a few lines of each report, not the whole report.

    Raises:
        OverlapError: there is no such script.
        ConfigError: ``machine`` is not known, ``ranks`` is below 2, ``machine`` has fewer GPUs than ``ranks``, or a
            switch in the environment has a wrong value. With ``machine`` or ``ranks``, also if the script asks for a
            number of ranks that it cannot get, or if ``WORLD_SIZE`` is set and is not 1.
        UnsupportedError: this torch is not supported.
    """
    if not Path(script).is_file():
        raise OverlapError(
            f"{script} is not a file; expected a Python script: overlap-inductor explain SCRIPT [ARGUMENTS]"
        )
    box = _box(machine, ranks)
    from overlap_inductor.report import publish as reporting
    from overlap_inductor.switch.install import enable
    from overlap_inductor.torch_compat.telemetry import global_rank

    enable(mode="report", notice="off")  # the reports come at the end
    rank = global_rank()
    if box is None and ranks is None:
        status = _run(script, arguments)
    else:
        with _elsewhere(box, ranks):
            status = _run(script, arguments)
    if rank == 0:
        _show(reporting.all_reports(), box, ranks, short, status)
    return status


def _run(script: str, arguments: Sequence[str]) -> int:
    from overlap_inductor.torch_compat.fake_ranks import RanksError

    before = (sys.argv, sys.path)
    sys.argv = [script, *arguments]
    sys.path = [str(Path(script).resolve().parent), *sys.path]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        return _status(ending)
    except (RanksError, BrokenPipeError):
        raise  # main() handles both errors. A broken pipe may be our own output, whose reader has ended.
    except Exception as error:  # noqa: BLE001  (an error of the script is shown, then the reports)
        traceback.print_exc()
        if _lacks_a_gpu(error):
            print(f"\n{_NO_GPU}", file=sys.stderr)
        if variable := _missing_variable(error):
            print(f"\n{_no_launcher(variable, shlex.join([script, *arguments]))}", file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path = before
    return 0


def _box(machine: str | None, ranks: int | None) -> Box | None:
    if machine is not None and machine not in BOXES:
        raise ConfigError(
            f"--machine {machine}: no figures of such a machine were measured; expected one of: {', '.join(BOXES)}"
        )
    box = BOXES[machine] if machine is not None else None
    if ranks is not None and ranks < 2:
        raise ConfigError(f"--ranks {ranks}: expected 2 or more; one rank has nothing to overlap")
    if ranks is not None and box is not None and ranks > box.gpus:
        raise ConfigError(
            f"--ranks {ranks}: expected 2 to {box.gpus}; {box.name} has {box.gpus} GPUs, and links between several such"
            " machines were not measured"
        )
    if (box is not None or ranks is not None) and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, as set by a launcher such as torchrun; with --machine or"
            " --ranks, start explain without a launcher, because only one process runs, as rank 0"
        )
    return box


@contextmanager
def _elsewhere(box: Box | None, ranks: int | None) -> Iterator[None]:
    """In this context, this process plays rank 0 of a group. Its graphs are planned for ``box`` and not run."""
    from overlap_inductor.inductor.post_grad import stopped_before_code
    from overlap_inductor.torch_compat.fake_ranks import one_process_as
    from overlap_inductor.torch_compat.target import planning_for

    most = box.gpus if box is not None else None
    with one_process_as(ranks or most or 1, ranks is not None, most), planning_for(box), stopped_before_code():
        yield


def _lacks_a_gpu(error: Exception) -> bool:
    import torch

    return not torch.cuda.is_available() and re.search(r"cuda|nvidia", str(error), re.IGNORECASE) is not None


def _show(reports: Sequence[OverlapReport], box: Box | None, ranks: int | None, short: bool, status: int) -> None:
    from overlap_inductor.cli import tables
    from overlap_inductor.report import totals
    from overlap_inductor.report.text import render_text

    if not reports:
        print(_NO_GRAPH if status == 0 else f"The script ended with exit status {status} before it compiled a graph.")
        return
    print("\n".join(str(report) if short else render_text(report) for report in reports))
    if len(reports) > 1:
        table = tables.headed(
            ("graph", "phase", "sites", "as written", "as planned", "ratio"), _rows(reports), (2, 3, 4)
        )
        print(tables.as_text([table]))
    if total := totals.line_of_all(reports):
        print(f"{total}\nEach graph counts once, however often it runs.")
    if box is not None or ranks is not None:
        where = "this machine" if box is None else f"{box.name}: {box.title}"
        text = (
            f"Times are estimates of the cost model for {where}. Nothing was measured: one process played rank 0,"
            " nothing was sent, and compiled graphs returned zeros."
        )
        print(textwrap.fill(text, WIDTH, break_on_hyphens=False))


def _rows(reports: Sequence[OverlapReport]) -> list[tuple[str, ...]]:
    """A row for each graph. Its times include only sites that have an estimate."""
    from overlap_inductor.report import totals
    from overlap_inductor.report import words

    rows = []
    for report in reports:
        times = totals.of_sites([report])
        estimated = ("", "", "") if times is None else (*map(words.microseconds, (times.keep, times.plan)), times.ratio)
        rows.append((report.graph, report.phase, str(len(report.sites)), *estimated))
    return rows


def _no_launcher(variable: str, command: str) -> str:
    return (
        f"overlap-inductor explain: the script needs the variables that torchrun sets, and {variable} is not set."
        f" Either let one process play rank 0 of 8 ranks:\n  overlap-inductor explain --ranks 8 {command}\n"
        "or start as many processes as the script needs, for example 2:\n"
        f"  torchrun --nproc-per-node 2 -m overlap_inductor explain {command}"
    )


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
