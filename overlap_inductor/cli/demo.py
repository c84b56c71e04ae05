# SPDX-License-Identifier: Apache-2.0
"""``overlap-inductor demo``: run two models here with and without overlap, compare the results and time the runs.

The models are a Hugging Face Llama and a sequence-parallel block. By default, they run on 8, 4 or 2 GPUs: the
largest of these numbers that this machine has. With fewer than two GPUs, they run on two CPU processes, joined by a
slow link if possible.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from overlap_inductor.cli import demo_text
from overlap_inductor.cli import slow_link
from overlap_inductor.cli.demo_progress import Progress
from overlap_inductor.cli.local_ranks import RankError
from overlap_inductor.cli.local_ranks import rank_environment
from overlap_inductor.cli.local_ranks import run_ranks
from overlap_inductor.errors import ConfigError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.facts.machine import BOXES
from overlap_inductor.facts.machine import machine_for

PARTS = ("llama", "block")
HEADS = 8
LLAMA_NEEDS = ("transformers", "accelerate")
SIZES = {"cpu": (512, 1024), "cuda": (4096, 4096)}
"""Default hidden size and sequence length. With these, matmuls and collectives last longer than a launch."""
MEGABITS = 500
"""Default rate of the slow link in Mbit/s. A collective of the demo then lasts about as long as its matmul."""


@dataclass
class DemoOptions:
    """The demo's command line.

    Attributes:
        tokens: length of the whole sequence.
        link: rate in Mbit/s of the slow link between CPU ranks, ``none``, or ``auto`` (``MEGABITS`` if possible).
        timeout: seconds after which ranks that still run are stopped, and the demo fails.
    """

    ranks: int | None = None
    device: str = "auto"
    layers: int = 2
    hidden: int | None = None
    tokens: int | None = None
    parts: tuple[str, ...] = PARTS
    link: str = "auto"
    keep_dir: str | None = None
    timeout: float = 900.0


@dataclass(frozen=True)
class Setup:
    """The options, resolved for this machine. ``megabits``: the link's rate, or ``None``. ``no_link``: why CPU ranks
    have no link, else empty."""

    device: str
    ranks: int
    hidden: int
    tokens: int
    megabits: int | None = None
    no_link: str = ""


def run_demo(options: DemoOptions) -> int:
    """Run the demo and print what it found. Returns 0 if all went well. Returns 1 in these cases:

    - A rank failed or did not end in time, or a part returned no result.
    - Results differ too much from those of plain ``torch.compile``.
    - In one of the parts, no schedule overlapped any site.

    Raises:
        ConfigError: an option has a wrong value, the options contradict each other or do not fit this machine, or no
            files can be written in ``keep_dir``.
        UnsupportedError: a package is missing, this torch is not supported, or the estimate failed.
    """
    setup = _resolve(options)
    folder = _writable(options.keep_dir or tempfile.mkdtemp(prefix="overlap_inductor_demo_"))
    settings = {"device": setup.device, "layers": options.layers, "hidden": setup.hidden, "tokens": setup.tokens}
    settings.update(parts=options.parts, folder=str(folder))
    print(f"{_described(setup)}; {options.layers} layers, hidden {setup.hidden}, {setup.tokens} tokens\n")
    progress = Progress()
    command = ["-m", "overlap_inductor.cli.demo_worker", json.dumps(settings)]
    try:
        with ExitStack() as stack:
            hosts: Sequence[slow_link.Host] = ()
            if setup.megabits is not None:
                hosts = stack.enter_context(slow_link.slow_hosts(setup.ranks, setup.megabits))
            run_ranks(
                command,
                setup.ranks,
                folder,
                environment=rank_environment(setup.device),
                hosts=hosts,
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
    shared_cpu = setup.device == "cpu" and setup.megabits is None
    for result in progress.results:
        print(demo_text.part(result, shared_cpu))
    if shared_cpu:
        print(
            "\nThese ranks are processes of one CPU and cannot gain: a transfer takes the cores that the matmuls need."
            f"\nNo slow link joins them: {setup.no_link}."
        )
    elif setup.megabits is not None:
        gigabits = machine_for("cpu").link_bytes * 8 / 1e9
        print(
            f"\nauto estimated with the shipped figures for CPU ranks, which assume a link of {gigabits:.0f} Gbit/s."
            f" The link of this demo has {setup.megabits} Mbit/s, so auto may have kept sites that gain here. In your"
            " own job, name your link's rate. For the link of this demo, that would be:"
            f" OVERLAP_INDUCTOR_MACHINE='{{\"link_bytes\": {setup.megabits * 1e6 / 8:g}}}'."
        )
    if setup.device == "cpu":
        _estimate()
    complete = [result["part"] for result in progress.results] == list(options.parts)
    print(f"\nReports: {folder / 'reports'} (open an index.html; or: overlap-inductor report {folder / 'reports'})")
    good = complete and all(map(demo_text.passed, progress.results))
    print(
        "PASSED"
        if good
        else "FAILED: see the lines marked FAIL above"
        if complete
        else f"FAILED: a part returned no result; see the ranks' logs in {folder}"
    )
    return 0 if good else 1


def _estimate() -> None:
    """Print the estimated gain of the block (``cli.demo_estimate``) on the first machine in ``BOXES``.

    Raises:
        UnsupportedError: the process of the estimate failed.
    """
    box = next(iter(BOXES.values()))
    print(f"\nAn estimate for {box.title}: the same block with the hidden size of Llama-3-8B", flush=True)
    script = Path(__file__).with_name("demo_estimate.py")
    command = [sys.executable, "-m", "overlap_inductor", "explain", "--machine", box.name, "--short", str(script)]
    done = subprocess.run(command, env=rank_environment("cpu"), capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(f"the estimate failed: {' '.join(command)}\n{done.stderr[-2000:]}")
    print(textwrap.indent(done.stdout.rstrip(), "  "))


def _described(setup: Setup) -> str:
    if setup.device == "cuda":
        return f"{setup.ranks} GPUs (nccl)"
    where = f", joined by a link of {setup.megabits} Mbit/s" if setup.megabits is not None else ""
    return f"{setup.ranks} CPU ranks (gloo, one thread each){where}"


def _writable(folder: str) -> Path:
    """``folder``, created if it is missing. Raises ``ConfigError`` if this process cannot write files in it."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        raise ConfigError(
            f"--keep-dir {folder}: cannot be written ({error.strerror}); name a folder that this process can write"
        ) from error


def _lack_of_gpus(usable: int) -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        missing = "CUDA" if torch.version.cuda is None else "NCCL"
        return f"this torch ({torch.__version__}) is built without {missing}; install a build that has it"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = "on this machine" if hidden is None else f"with CUDA_VISIBLE_DEVICES={hidden}"
    return (
        f"{where}, torch can use {usable} GPU{'' if usable == 1 else 's'}; run the demo where"
        " torch.cuda.device_count() is 2 or more"
    )


def _resolve(options: DemoOptions) -> Setup:
    """The options for this machine. Raises as ``run_demo`` does."""
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown or not options.parts:
        raise ConfigError(f"--parts {','.join(options.parts)}: expected one or more of {', '.join(PARTS)}")
    missing = [name for name in LLAMA_NEEDS if importlib.util.find_spec(name) is None]
    if "llama" in options.parts and missing:
        raise UnsupportedError(
            f"the demo's part llama needs {' and '.join(missing)}, which this Python does not have. Run: pip install"
            f" {' '.join(missing)} (or run only the other part: overlap-inductor demo --parts block)"
        )
    from overlap_inductor.switch.install import require_supported_torch

    require_supported_torch()
    device, ranks = _device(options)
    hidden, tokens = (
        default if size is None else size
        for size, default in zip((options.hidden, options.tokens), SIZES[device], strict=True)
    )
    if options.layers < 1:
        raise ConfigError(f"--layers {options.layers}: expected at least 1")
    if ranks < 2 or HEADS % ranks:
        raise ConfigError(f"--ranks {ranks}: expected 2, 4 or 8 (the demo's model has {HEADS} attention heads)")
    if tokens < 1 or tokens % ranks or hidden < 1 or hidden % (HEADS * 2):
        raise ConfigError(
            f"--tokens {tokens} --hidden {hidden}: expected tokens to be a multiple of the {ranks} ranks and hidden a"
            f" multiple of {HEADS * 2}"
        )
    return Setup(device, ranks, hidden, tokens, *_link(options.link, device))


def _device(options: DemoOptions) -> tuple[str, int]:
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    device = ("cuda" if gpus >= 2 else "cpu") if options.device == "auto" else options.device
    if device == "cuda" and gpus < 2:
        raise ConfigError(f"--device cuda: the demo needs 2 GPUs, and {_lack_of_gpus(gpus)}, or use --device cpu")
    ranks = options.ranks or (max(n for n in (2, 4, HEADS) if n <= gpus) if device == "cuda" else 2)
    if device == "cuda" and ranks > gpus:
        raise ConfigError(
            f"--device cuda --ranks {ranks}: this machine has {gpus} usable GPUs; use --device cpu or fewer ranks"
        )
    return device, ranks


def _link(wanted: str, device: str) -> tuple[int | None, str]:
    """``(rate in Mbit/s or None, why CPU ranks have no link)``."""
    if wanted not in ("auto", "none") and not (wanted.isdecimal() and int(wanted) > 0):
        raise ConfigError(f"--link {wanted}: expected auto, none, or a rate in Mbit/s such as {MEGABITS}")
    if device != "cpu":
        if wanted not in ("auto", "none"):
            raise ConfigError(f"--link {wanted}: only CPU ranks can be joined by a slow link; use --device cpu")
        return None, ""
    if wanted == "none":
        return None, "--link none was given"
    reason = slow_link.why_not()
    if reason is None:
        return MEGABITS if wanted == "auto" else int(wanted), ""
    if wanted == "auto":
        return None, reason
    raise ConfigError(f"--link {wanted}: {reason}")
