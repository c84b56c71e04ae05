# SPDX-License-Identifier: Apache-2.0
"""Reads, from profiles of GPUs, where the time of one decoder layer goes.

``bench.layers --device cuda --trace FOLDER`` profiles some steps of each variant, except ``no collectives``. A layer is
taken from the start of its attention to the start of the next layer's attention. The layer in the middle of the model
is taken. Work of its streams is divided between two lanes: kernels that compute, and transfers. The rows are drawn by
``bench.trace_plot``.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from torch.profiler import profile

from bench.layer_programs import Program
from bench.layer_trace import Span

KINDS = (
    ("collective", re.compile("nccl")),
    ("send", re.compile("PtoP")),
    ("wait", re.compile("wait_for|end_call")),
    ("attention", re.compile("sdpa|flash|fmha")),
    ("matmul", re.compile("nvjet|gemm|cutlass|matmul|multiply")),
)
"""The kind of work, by the first pattern that its name matches. Any other work has kind ``pointwise``."""
TRANSFERS = ("collective", "send")
SHORTEST_GAP = 0.003
"""Milliseconds. A shorter gap between two bars of one kind is not drawn."""
Bar = tuple[str, float, float]


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "pointwise")


def middle_layer(spans: Iterable[Span]) -> tuple[float, float]:
    """``(begin, end)`` of the layer in the middle, in microseconds.

    Raises:
        ValueError: there are fewer than two attentions.
    """
    starts = sorted(span.begin for span in spans if kind_of(span.name) == "attention")
    if len(starts) < 2:
        raise ValueError(f"a layer ends at the next attention, but the trace has {len(starts)} attentions")
    middle = (len(starts) - 1) // 2
    return starts[middle], starts[middle + 1]


def lanes(spans: Iterable[Span], begin: float, end: float) -> dict[str, list[Bar]]:
    """``{lane: bars}``: the work between ``begin`` and ``end``, in milliseconds from ``begin``. Bars of a lane may
    overlap, because several streams work at a time."""
    found: dict[str, list[Bar]] = {"kernels": [], "transfers": []}
    for span in sorted(spans, key=lambda s: s.begin):
        if span.begin >= end or span.end <= begin:
            continue
        kind = kind_of(span.name)
        first, last = ((t - begin) / 1e3 for t in (max(span.begin, begin), min(span.end, end)))
        bars = found["transfers" if kind in TRANSFERS else "kernels"]
        if bars and bars[-1][0] == kind and first - bars[-1][2] < SHORTEST_GAP:
            bars[-1] = kind, bars[-1][1], max(last, bars[-1][2])
        else:
            bars.append((kind, first, last))
    return {lane: [(k, round(b, 4), round(e, 4)) for k, b, e in bars] for lane, bars in found.items()}


def traced(folder: Path, program: Program, functions: Mapping[str, Callable[..., Any]], steps: int) -> None:
    """Profile ``steps`` steps of each function. All ranks call this together.

    Each rank adds rows to ``FOLDER/<phase>_<tokens>_<n>_gpus_rank_<r>.jsonl``: for each step and variant, the time of a
    layer and the bars of its lanes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{program.phase}_{program.tokens}_{dist.get_world_size()}_gpus_rank_{dist.get_rank()}.jsonl"
    with (folder / name).open("a") as file:
        for number in range(steps):
            for variant, function in functions.items():
                spans = _profiled(program, function)
                begin, end = middle_layer(spans)
                layer = round((end - begin) / 1e3, 4)
                for lane, bars in lanes(spans, begin, end).items():
                    row = {"variant": f"{variant}: {lane}", "number": number, "step": layer, "bars": bars}
                    file.write(json.dumps(row) + "\n")


def _profiled(program: Program, function: Callable[..., Any]) -> list[Span]:
    """The kernels and copies of a step. Another step runs before it, so that the host is ahead of the GPU."""
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        program.step(function)
        program.step(function)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = [
        Span(e["name"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e
    ]
    spans.sort(key=lambda span: span.begin)
    return spans[len(spans) // 2 :]
