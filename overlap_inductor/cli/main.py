# SPDX-License-Identifier: Apache-2.0
"""The program ``overlap-inductor``. The modules of each of its commands are imported when the command runs, so
``--help`` needs no torch."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence

from overlap_inductor.errors import OverlapError
from overlap_inductor.facts.machine import BOXES
from overlap_inductor.version import __version__

READER_GONE = 141


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overlap-inductor", description="Hide tensor-parallel collectives behind their matmuls, in torch.compile."
    )
    parser.add_argument("--version", action="version", version=f"overlap_inductor {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="run two models on this machine, plain and with overlap, and compare")
    demo.add_argument(
        "--ranks",
        type=int,
        help="processes to start: 2, 4 or 8 (default: 2 on the CPU; on GPUs, the largest of these for which there are"
        " enough GPUs)",
    )
    demo.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: cuda with two or more GPUs, else cpu",
    )
    demo.add_argument("--layers", type=int, default=2, help="decoder layers of the Llama (default: %(default)s)")
    demo.add_argument("--hidden", type=int, help="hidden size (default: 512, on GPUs 4096)")
    demo.add_argument("--tokens", type=int, help="sequence length (default: 1024, on GPUs 4096)")
    demo.add_argument(
        "--link",
        default="auto",
        metavar="MBITS",
        help="rate in Mbit/s of a simulated slow link between CPU ranks, or none, or auto (default: auto). With auto,"
        " the rate is 500 if this process can simulate a link, which needs root; else the rate is not limited",
    )
    demo.add_argument(
        "--parts", default="llama,block", help="models to run, separated by a comma (default: %(default)s)"
    )
    demo.add_argument("--keep-dir", metavar="DIR", help="folder for reports and logs (default: a new temporary one)")
    demo.add_argument(
        "--timeout",
        type=float,
        default=900.0,
        help="seconds after which ranks that still run are stopped (default: %(default)s)",
    )
    demo.set_defaults(run=_demo)

    doctor = commands.add_parser(
        "doctor", help="show what this machine offers, which switches take effect, and why others do not"
    )
    doctor.add_argument("--json", action="store_true", help="print the checks as JSON")
    doctor.set_defaults(run=_doctor)

    explain = commands.add_parser(
        "explain",
        help="run a script in mode report and show the sites that were found",
        usage="overlap-inductor explain [-h] [--machine NAME] [--ranks N] [--short] SCRIPT [ARGUMENTS ...]",
    )
    explain.add_argument(
        "--machine",
        metavar="NAME",
        help="estimate for this machine instead of the one here: "
        + "; ".join(f"{box.name} ({box.title})" for box in BOXES.values()),
    )
    explain.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="let this one process be rank 0 of N; nothing is sent or computed (with --machine, the default is"
        " the number of the machine's GPUs)",
    )
    explain.add_argument("--short", action="store_true", help="a few lines for each graph, not the whole report")
    explain.add_argument("script", help="a Python script that uses torch.compile")
    explain.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    explain.set_defaults(run=_explain)

    report = commands.add_parser(
        "report", help="show the reports of a dump folder (equal reports once) and write its index.html"
    )
    report.add_argument("folder", help="the folder that OVERLAP_INDUCTOR_DUMP named")
    report.set_defaults(run=_report)

    bugreport = commands.add_parser(
        "bugreport", help="pack a dump folder, versions and the doctor's checks into one file"
    )
    bugreport.add_argument("folder", help="the folder that OVERLAP_INDUCTOR_DUMP named")
    bugreport.add_argument("-o", "--output", metavar="FILE", help="default: overlap_inductor_bugreport.zip")
    bugreport.set_defaults(run=_bugreport)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status of the command. ``explain`` returns that of the user's script.

    - 0: the command succeeded.
    - 1: the doctor found something bad, or the demo or the user's script failed.
    - 2: the command could not be run as asked.
    - 141: the reader of the output has gone away. A shell reports 141 for a program that SIGPIPE ended.
    """
    chosen = build_parser().parse_args(arguments)
    try:
        status = int(chosen.run(chosen))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _reader_gone():
            raise
        return READER_GONE
    except OverlapError as error:
        print(f"overlap-inductor: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "overlap_inductor":
            raise
        text = f"package {error.name} is needed and is not installed. Run: pip install {error.name}"
        print(f"overlap-inductor {chosen.command}: {text}", file=sys.stderr)
    return 2


def _reader_gone() -> bool:
    """Whether standard output is a pipe without a reader, as after ``| head``. If so, buffered text is dropped, because
    Python would otherwise fail to write it at exit and print an error."""
    try:
        number = sys.stdout.fileno()
    except OSError:  # replaced by an object that is no file
        return False
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return True


def _demo(chosen: argparse.Namespace) -> int:
    from overlap_inductor.cli.demo import DemoOptions
    from overlap_inductor.cli.demo import run_demo

    values = {name: value for name, value in vars(chosen).items() if name not in ("run", "command")}
    values["parts"] = tuple(part.strip() for part in chosen.parts.split(",") if part.strip())
    return run_demo(DemoOptions(**values))


def _doctor(chosen: argparse.Namespace) -> int:
    from overlap_inductor.cli.doctor import run_doctor

    return run_doctor(chosen.json)


def _explain(chosen: argparse.Namespace) -> int:
    from overlap_inductor.cli.explain_script import explain_script

    return explain_script(chosen.script, chosen.arguments, chosen.machine, chosen.ranks, chosen.short)


def _report(chosen: argparse.Namespace) -> int:
    from overlap_inductor.report.overview import write_overview
    from overlap_inductor.report.read_folder import page_folders
    from overlap_inductor.report.read_folder import read_reports

    print(read_reports(chosen.folder))
    for folder in page_folders(chosen.folder):
        try:
            page = write_overview(folder)
        except OSError as error:
            print(f"overlap-inductor report: the page over all graphs cannot be written: {error}", file=sys.stderr)
        else:
            print(f"Page over all graphs: {page}")
    return 0


def _bugreport(chosen: argparse.Namespace) -> int:
    from overlap_inductor.cli.bugreport import write_bug_report

    path = write_bug_report(chosen.folder, chosen.output)
    print(
        f"Wrote {path}: graphs, plans, tracebacks, versions and the doctor's checks. It holds no weights; your home"
        " folder and user name are replaced. Names of modules and switches are in it: look through it before you send"
        " it."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
