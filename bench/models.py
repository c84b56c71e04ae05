# SPDX-License-Identifier: Apache-2.0
"""Time a whole model under plain ``torch.compile`` and with schedule ``auto``. Each round times both, in random order.

The model is an unchanged Hugging Face Llama with the layer shapes of llama3-70b.

    torchrun --nproc-per-node 4 -m bench.models [--layers 2] [--tokens 1024 4096] [--batches 1 16] \\
        --out bench/results/models.jsonl

- ``--tokens``: one sequence of each length runs (prefill), with the host in the loop.
- ``--batches``: that many sequences of one token run, as CUDA graphs (``triton.cudagraphs``).

Before a shape is timed, its logits are compared with those of the eager model. Each shape gives one row of output:

- ``ms``: for ``plain`` and for ``auto``, the time of a call in milliseconds. A sample is the mean of three calls. Each
  rank takes the median of its samples, and the row has the largest of the ranks' medians.
- ``graphs_made``: the number of CUDA graphs that were made for this shape from launches of sites (``runtime.replay``).
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

import overlap_inductor
from bench.layer_programs import Sizes
from bench.layer_programs import saved
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from bench.timing import greatest
from overlap_inductor.cli.demo_models import load_llama
from overlap_inductor.runtime.replay import recorder
from overlap_inductor.switch.backend import overlap_inductor as overlap_backend

VOCABULARY = 32000
ROUNDS = 15


def milliseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    samples = collections.defaultdict(list)
    order, chance = list(calls.items()), random.Random(0)
    for _ in range(ROUNDS):
        # All ranks draw the same order.
        chance.shuffle(order)
        for name, call in order:
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                call()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(begin.elapsed_time(end) / 3)
    return {name: greatest(statistics.median(values)) for name, values in samples.items()}


def measure(model: Any, shape: tuple[int, int], graphs: bool) -> dict[str, Any]:
    made = recorder(torch.device("cuda", torch.cuda.current_device())).made
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1)).cuda()
    options = {"triton.cudagraphs": graphs}
    compiled = {
        "plain": torch.compile(model, dynamic=False, options=options),
        "auto": torch.compile(model, dynamic=False, backend=overlap_backend, options=options),
    }
    eager = model(ids).logits.float()
    errors = {}
    for name, function in compiled.items():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            logits = function(ids).logits.float()
        errors[name] = greatest(float((logits - eager).abs().max() / eager.abs().max()))
    report = overlap_inductor.last_report()
    assert report is not None
    schedules = collections.Counter(f"{s.facts.pattern}: {s.decision.moving.schedule}" for s in report.sites)
    del eager, logits
    times = milliseconds({name: lambda f=f: f(ids) for name, f in compiled.items()})
    row = {
        "batch": shape[0],
        "tokens": shape[1],
        "cudagraphs": graphs,
        "ms": {n: round(t, 3) for n, t in times.items()},
        "speedup": round(times["plain"] / times["auto"], 3),
    }
    row["graphs_made"] = recorder(ids.device).made - made
    return row | {
        "error": {n: round(e, 5) for n, e in errors.items()},
        "right": math.isfinite(errors["plain"]) and errors["auto"] <= 1.5 * errors["plain"] + 2e-2,
        "sites": dict(schedules),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    rank, world_size = start_rank()
    torch._dynamo.config.recompile_limit = 64
    sizes = Sizes(arguments.layers, 8192, 28672, 64, 8, VOCABULARY)
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        model = load_llama(saved(Path(names[0]), sizes, torch.bfloat16, "cuda"), torch.bfloat16)
        dist.barrier()
    environment = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gpu": torch.cuda.get_device_name(),
        "world_size": world_size,
        "layers": arguments.layers,
    }
    for shape, graphs in [*(((1, t), False) for t in arguments.tokens), *(((b, 1), True) for b in arguments.batches)]:
        row = measure(model, shape, graphs) | environment
        if rank == 0:
            print(json.dumps(row), flush=True)
            if arguments.out:
                with open(arguments.out, "a") as file:
                    file.write(json.dumps(row) + "\n")
    # NCCL destroys a communicator only when no CUDA graph holds one of its calls, so the graphs are dropped first.
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    finish_rank()


if __name__ == "__main__":
    main()
