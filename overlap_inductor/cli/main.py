"""The command ``overlap-inductor``. Only the chosen command's modules are imported: ``--help`` needs no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from overlap_inductor.errors import OverlapError
from overlap_inductor.version import __version__


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overlap-inductor", description="Hide tensor-parallel collectives behind their matmuls, in torch.compile."
    )
    parser.add_argument("--version", action="version", version=f"overlap_inductor {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="run two models on this machine, plain and with overlap, and compare")
    demo.add_argument("--ranks", type=int, help="processes to start: 2, 4 or 8 (default: the GPUs, else 2)")
    demo.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where two GPUs are, else cpu"
    )
    demo.add_argument("--layers", type=int, default=2, help="decoder layers of the Llama (default: %(default)s)")
    demo.add_argument("--hidden", type=int, default=512, help="hidden size (default: %(default)s)")
    demo.add_argument("--tokens", type=int, default=512, help="sequence length (default: %(default)s)")
    demo.add_argument(
        "--parts", default="llama,block", help="which models, with a comma between (default: %(default)s)"
    )
    demo.add_argument("--keep-dir", metavar="DIR", help="where reports and logs go (default: a new temporary folder)")
    demo.add_argument(
        "--timeout", type=float, default=600.0, help="seconds until hung ranks are stopped (default: %(default)s)"
    )
    demo.set_defaults(run=_demo)

    doctor = commands.add_parser("doctor", help="what this machine offers, what is switched on, and why not")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.set_defaults(run=_doctor)

    explain = commands.add_parser("explain", help="run a script in mode report and show what was found")
    explain.add_argument("script", help="a Python script that uses torch.compile")
    explain.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    explain.set_defaults(run=_explain)

    report = commands.add_parser("report", help="show the reports of a dump folder, ranks merged")
    report.add_argument("folder", help="what OVERLAP_INDUCTOR_DUMP named")
    report.set_defaults(run=_report)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status: 0 if it succeeded, 1 if its answer is no, 2 if it could not be run as
    asked."""
    chosen = build_parser().parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except OverlapError as error:
        print(f"overlap-inductor: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "overlap_inductor":
            raise
        text = f"the package {error.name} is needed and not installed: pip install {error.name}"
        print(f"overlap-inductor {chosen.command}: {text}", file=sys.stderr)
    return 2


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

    return explain_script(chosen.script, chosen.arguments)


def _report(chosen: argparse.Namespace) -> int:
    from overlap_inductor.report.read_folder import read_reports

    print(read_reports(chosen.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
