# SPDX-License-Identifier: Apache-2.0
"""``overlap-inductor demo``: compile and run two models on this machine with overlap, in a few minutes, and check the
numbers.

Two CPU ranks (or the GPUs) compile a Hugging Face Llama and a sequence-parallel block, plain and with overlap.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import TextIO

from overlap_inductor.cli.local_ranks import RankError
from overlap_inductor.cli.local_ranks import rank_environment
from overlap_inductor.cli.local_ranks import run_ranks
from overlap_inductor.errors import ConfigError
from overlap_inductor.errors import UnsupportedError

PARTS = ("llama", "block")
HEADS = 8
LLAMA_NEEDS = ("transformers", "accelerate")
TITLES = {
    "llama": 'Hugging Face Llama, tp_plan="auto", inference',
    "block": "DTensor sequence-parallel block, forward and backward",
}


@dataclass
class DemoOptions:
    """The demo's command line. ``tokens``: length of the whole sequence. ``timeout``: seconds until hung ranks are
    stopped."""

    ranks: int | None = None
    device: str = "auto"
    layers: int = 2
    hidden: int = 512
    tokens: int = 512
    parts: tuple[str, ...] = PARTS
    keep_dir: str | None = None
    timeout: float = 600.0


class Progress:
    """Shows rank 0's steps and how long each takes, one line a step. On a terminal the running step's time counts up.

    ``line`` is called by the thread that reads rank 0's output, ``wait`` by the one that watches the ranks.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.results: list[dict[str, Any]] = []
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty()
        self._lock = threading.Lock()
        self._start("starting the ranks")

    def line(self, text: str) -> None:
        """Take one line of rank 0's standard output. A line that is not the demo's own is passed on."""
        try:
            record = json.loads(text)
        except ValueError:
            record = None
        with self._lock:
            if not isinstance(record, dict):
                self._write(f"\n  | {text}\n")
            elif "step" in record:
                self._finish()
                self._start(record["step"])
            elif "part" in record:
                self.results.append(record)

    def wait(self) -> None:
        """Show the running step's time, if the stream is a terminal."""
        if self._live:
            with self._lock:
                self._write(f"\r\x1b[K  {self._step} ... {time.monotonic() - self._begin:.0f} s")

    def finish(self) -> None:
        """End the last step's line."""
        with self._lock:
            self._finish()

    def _start(self, step: str) -> None:
        self._step, self._begin = step, time.monotonic()
        self._write(f"  {step} ...")

    def _finish(self) -> None:
        again = f"\r\x1b[K  {self._step} ..." if self._live else ""
        self._write(f"{again} {time.monotonic() - self._begin:.1f} s\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def run_demo(options: DemoOptions) -> int:
    """Run the demo and print what it found. Returns 0, or 1 if numbers differ, nothing was overlapped or a rank failed.

    Raises:
        ConfigError: the options contradict each other, or do not fit this machine.
        UnsupportedError: a package that a part needs is missing, or this torch is not supported.
    """
    device, ranks = _resolve(options)
    folder = _writable(options.keep_dir or tempfile.mkdtemp(prefix="overlap_inductor_demo_"))
    settings = {"device": device, "layers": options.layers, "hidden": options.hidden, "tokens": options.tokens}
    settings.update(parts=options.parts, folder=str(folder))
    backend = "nccl" if device == "cuda" else "gloo, one thread each"
    print(
        f"{ranks} {device} ranks ({backend}); {options.layers} layers, hidden {options.hidden}, {options.tokens}"
        " tokens\n"
    )
    progress = Progress()
    command = ["-m", "overlap_inductor.cli.demo_worker", json.dumps(settings)]
    try:
        run_ranks(
            command,
            ranks,
            folder,
            environment=rank_environment(device),
            timeout=options.timeout,
            on_line=progress.line,
            on_wait=progress.wait,
        )
    except RankError as error:
        progress.finish()
        print(f"\nFAILED: {error}\nThe ranks' logs are in {folder}.", file=sys.stderr)
        return 1
    progress.finish()
    shutil.rmtree(folder / "llama", ignore_errors=True)
    good = [show_part(result, device) for result in progress.results]
    complete = [result["part"] for result in progress.results] == list(options.parts)
    print(f"\nReports: {folder / 'reports'} (open an index.html; or: overlap-inductor report {folder / 'reports'})")
    passed = complete and all(good)
    print(
        "PASSED"
        if passed
        else "FAILED: see the lines marked FAIL above"
        if complete
        else f"FAILED: a part returned no result; see the ranks' logs in {folder}"
    )
    return 0 if passed else 1


def show_part(result: dict[str, Any], device: str) -> bool:
    """Print one part's sites, differences and times. Returns whether the numbers agree and something was overlapped."""
    print(f"\n{TITLES[result['part']]}")
    overlapped = 0
    for graph in result["graphs"]:
        overlapped += graph["overlapped"]
        print(f"  graph {graph['graph']} {graph['phase']}: {graph['headline']}")
        for line in _aligned(graph["rows"]):
            print(f"    {line}")
    if not overlapped:
        print("  FAIL: no site was overlapped")
    print("  largest difference against plain torch.compile (in brackets: plain against eager)")
    noise = {check["name"]: check for check in result["plain_against_eager"]}
    for check in result["checks"]:
        verdict = "ok" if check["passed"] else "FAIL"
        print(
            f"    {check['name']:28} {check['difference']:.2e}  [{noise[check['name']]['difference']:.2e}]  "
            f"allowed {check['tolerance']:.2e}, largest value {check['largest']:.2e}  {verdict}"
        )
    print(f"  {times_line(result['times_ms']['plain'], result['times_ms']['overlap'], device)}")
    return overlapped > 0 and all(check["passed"] for check in result["checks"])


def times_line(plain: float, overlap: float, device: str) -> str:
    """Both median times (ms), and which is faster."""
    ratio = plain / overlap
    text = f"median time: plain {plain:.2f} ms, overlap {overlap:.2f} ms: "
    if ratio >= 1.02:
        return text + f"overlap is {ratio:.2f}x faster here"
    if ratio > 0.98:
        return text + "no difference here"
    why = (
        "expected: between processes of one CPU a transfer costs the cores that the matmuls need"
        if device == "cpu"
        else (
            "expected if sizes are small: the demo forces the ring on every site; schedule auto would keep small ones"
        )
    )
    return text + f"overlap is {1 / ratio:.2f}x SLOWER here ({why})"


def _aligned(rows: list[list[Any]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))] if cells else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _writable(folder: str) -> Path:
    """``folder``, created if it is missing. Raises ``ConfigError`` if this process cannot write files in it."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        raise ConfigError(
            f"--keep-dir {folder}: cannot be written ({error.strerror}); name a folder that this process may write"
        ) from error


def _lack_of_gpus(usable: int) -> str:
    """Why fewer than two GPUs can be used, and what to change."""
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        missing = "CUDA" if torch.version.cuda is None else "NCCL"
        return f"this torch ({torch.__version__}) is built without {missing}; install a build that has it"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = "this machine" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden}"
    return f"{where} has {usable} that torch can use; run it where nvidia-smi shows two"


def _resolve(options: DemoOptions) -> tuple[str, int]:
    """Device and number of ranks for this machine."""
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown or not options.parts:
        raise ConfigError(f"--parts {','.join(options.parts)}: expected one or more of {', '.join(PARTS)}")
    missing = [name for name in LLAMA_NEEDS if importlib.util.find_spec(name) is None]
    if "llama" in options.parts and missing:
        raise UnsupportedError(
            f"the demo's part llama needs {' and '.join(missing)}, which this Python does not have. Run: pip install"
            f" {' '.join(missing)} (or run only the other part: overlap-inductor demo --parts block)"
        )
    import torch
    import torch.distributed as dist

    from overlap_inductor.switch.install import require_supported_torch

    require_supported_torch()
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    device = ("cuda" if gpus >= 2 else "cpu") if options.device == "auto" else options.device
    if device == "cuda" and gpus < 2:
        raise ConfigError(f"--device cuda: the demo needs 2 GPUs, and {_lack_of_gpus(gpus)}, or use --device cpu")
    ranks = options.ranks or (max(n for n in (2, 4, HEADS) if n <= gpus) if device == "cuda" else 2)
    if device == "cuda" and ranks > gpus:
        raise ConfigError(
            f"--device cuda --ranks {ranks}: this machine has {gpus} usable GPUs; use --device cpu or fewer ranks"
        )
    if options.layers < 1:
        raise ConfigError(f"--layers {options.layers}: expected at least 1")
    if ranks < 2 or HEADS % ranks:
        raise ConfigError(f"--ranks {ranks}: expected 2, 4 or 8 (the demo's model has {HEADS} attention heads)")
    if options.tokens < 1 or options.tokens % ranks or options.hidden < 1 or options.hidden % (HEADS * 2):
        raise ConfigError(
            f"--tokens {options.tokens} --hidden {options.hidden}: expected tokens to be a multiple of the {ranks}"
            f" ranks and hidden a multiple of {HEADS * 2}"
        )
    return device, ranks
