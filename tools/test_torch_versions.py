# SPDX-License-Identifier: Apache-2.0
"""Runs tests on every supported minor version of torch, each in an environment of its own.

    python tools/test_torch_versions.py [--all] [2.11.0 2.15.0]

The tests are the unit tests, the compile tests, two files of numerics, and those of a transformer block. (The block is
made parallel by hand, and with DTensor.) ``--all`` also runs the tests of kernels (in Triton's interpreter), all
numerics (over gloo), and those of all models. With ``--all``, each version takes some 15 minutes on two cores.

``TORCH_PYTHONS`` may list the paths of interpreters that already have torch, separated by spaces. Without it, an
environment for each version is made in ``.torch-versions/``. Two versions run at a time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VERSIONS = ("2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0")
TESTS = (
    "tests/unit",
    "tests/compile",
    "tests/numerics/test_replicated_matmuls.py",
    "tests/numerics/test_seams.py",
    "tests/models/test_blocks.py",
)
"""``test_replicated_matmuls.py`` also runs a rewritten graph with Inductor's ``simple_overlap``, which torch has from
2.14 on. ``test_blocks.py`` also runs the transformer block with activation checkpointing. Torch 2.12 and 2.13 cannot
compile the DTensor block with checkpointing, so they run that block only without it."""
EVERYTHING: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
    ({}, ("tests/unit", "tests/compile")),
    ({"TRITON_INTERPRET": "1"}, ("tests/kernels",)),
    ({}, ("tests/numerics", "tests/models")),
)
"""The tests of ``make test`` and ``make test-thorough``, except the examples. Each entry is ``(environment variables,
paths)`` of one run of pytest."""
ROOT = Path(__file__).resolve().parent.parent


def interpreters(versions: Sequence[str]) -> list[tuple[str, str | None]]:
    """``(label, path of python)``. The path is ``None`` if torch or another package cannot be installed."""
    given = os.environ.get("TORCH_PYTHONS", "").split()
    if given:
        return [(path, path) for path in given]
    found: list[tuple[str, str | None]] = []
    for version in versions:
        home = ROOT / ".torch-versions" / version
        python = home / "bin" / "python"
        if not python.exists():
            venv.create(home, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "-q"]
        needs = (
            "rich>=13",
            "packaging>=22",
            "matplotlib",
            "numpy<2.4",
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "transformers>=4.57",
            "accelerate",
            "safetensors",
        )
        installed = subprocess.run([*pip, f"torch=={version}", *needs], check=False)
        # A build of torch for GPUs installs the Triton version that it needs. Other builds install none.
        if (
            installed.returncode == 0
            and subprocess.run([str(python), "-c", "import triton"], capture_output=True, check=False).returncode
        ):
            installed = subprocess.run([*pip, "triton==3.6.0"], check=False)
        found.append((version, str(python) if installed.returncode == 0 else None))
    return found


def run(label: str, python: str | None, everything: bool) -> tuple[str, str, str]:
    """``(torch version, result lines, output of the runs that failed)``."""
    if python is None:
        return label, "could not be installed", ""
    version = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=False
    )
    results, output = [], ""
    for variables, tests in EVERYTHING if everything else (({}, TESTS),):
        command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        results.append(lines[-1] if lines else f"exit code {done.returncode}")
        output += done.stdout[-6000:] + done.stderr[-2000:] if done.returncode else ""
    return version.stdout.strip() or label, "; ".join(results), output


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--all", action="store_true", help="also run kernels in the interpreter, numerics and models")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(max_workers=2) as pool:
        rows = list(pool.map(lambda pair: run(*pair, arguments.all), interpreters(arguments.versions)))
    for _, _, output in rows:
        print(output, end="")
    for version, result, _ in rows:
        print(f"torch {version:14s} {result}")
    return 1 if any(output for _, _, output in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
