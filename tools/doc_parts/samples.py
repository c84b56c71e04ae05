# SPDX-License-Identifier: Apache-2.0
"""Commands and outputs in the pages. A test runs the commands and compares the outputs.

A comment before a code block says what the block is::

    <!-- file: NAME -->   the block is written to the file NAME in the run's folder
    <!-- runs -->         the block is run in the run's folder, by Python or bash as the block's fence says
    <!-- runs in the checkout -->
                          the block is run in the root of the repository
    <!-- output -->       the block is the standard output of the last block that ran

The run's folder is the same for all blocks of one text. The blocks run in the text's order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.doc_parts.pages import ROOT

_BLOCK = re.compile(
    r"(<!-- (?:file: (\S+)|(runs(?: in the checkout)?)|(output)) -->\n\n?```(\w*)[^\n]*\n)(.*?)(?=^```)", re.S | re.M
)
_TORCH = re.compile(r"\btorch \d+\.\d+\.\d+\S*")
SECONDS = 600.0


@dataclass(frozen=True)
class Sample:
    """One block. ``kind``: file | runs | runs in the checkout | output. ``start``, ``end``: the positions of its
    content in the text."""

    kind: str
    name: str
    language: str
    content: str
    start: int
    end: int


class SampleError(RuntimeError):
    """A block ended with an exit status that is not 0, or ran too long."""


def samples(text: str) -> list[Sample]:
    found = []
    for match in _BLOCK.finditer(text):
        kind = "file" if match[2] else match[3] or match[4]
        found.append(Sample(kind, match[2] or "", match[5], match[6], match.start(6), match.end(6)))
    return found


def run(found: Iterable[Sample], folder: Path, programs: Path | None = None) -> list[tuple[Sample, str]]:
    """Run the blocks in ``folder``, or in the checkout if a block says so. Returns each output block with the output of
    this run. ``programs``: a folder whose ``python`` and ``overlap-inductor`` are used.

    Raises:
        SampleError: a block failed or ran too long. If it failed, the text of the error has the block's output.
    """
    outputs, last = [], ""
    for sample in found:
        if sample.kind == "file":
            (folder / sample.name).write_text(sample.content, encoding="utf-8")
        elif sample.kind == "output":
            outputs.append((sample, last))
        else:
            last = _run(sample, folder if sample.kind == "runs" else ROOT, programs)
    return outputs


def _run(sample: Sample, folder: Path, programs: Path | None) -> str:
    command = ["python", "-c"] if sample.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OVERLAP_INDUCTOR")}
    first = [str(path) for path in (programs, Path(sys.executable).parent) if path is not None]
    environment["PATH"] = os.pathsep.join([*first, environment.get("PATH", "")])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            [*command, sample.content],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SampleError(f"{sample.content}\ntook longer than {SECONDS:.0f} s") from error
    if done.returncode:
        raise SampleError(f"{sample.content}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def same(shown: str, found: str) -> bool:
    """Whether a page shows the output of a run. The version of torch may differ."""
    return _TORCH.sub("torch X", shown) == _TORCH.sub("torch X", found)


def with_outputs(text: str, outputs: Iterable[tuple[Sample, str]]) -> str:
    for sample, output in sorted(outputs, key=lambda pair: -pair[0].start):
        text = text[: sample.start] + output + text[sample.end :]
    return text
