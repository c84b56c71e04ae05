# SPDX-License-Identifier: Apache-2.0
"""Time layers whose experts are divided among the ranks, with each schedule and as the plain graph (``keep``).

    torchrun --nproc-per-node 2 -m bench.experts
    torchrun --nproc-per-node 8 -m bench.experts --layers mixtral --tokens 32768 --forms dispatched
    torchrun --nproc-per-node 2 -m bench.experts --train --forms dispatched    # forward and backward

Forms of a layer (``bench.support.experts``), with equally many rows for every expert:

- ``all-reduce``: the layer of ``transformers`` at inference. All ranks have all tokens. Each rank sums the results of
  its own experts for each token. An all-reduce adds these sums over the ranks.
- ``dispatched``: the layer of torchtitan. Each rank has its part of the tokens. Two all-to-alls move rows to their
  experts and back.

Before and after the timing, each result is compared with that of the uncompiled layer. With ``--train``, the gradients
are compared too. A wrong result ends the
benchmark. The collectives that move tokens are also timed without the rest of the layer (``transfers``). The JSON row
of a case has the times of each schedule, of ``keep`` and of ``transfers``. Each is timed with the host hidden and with
the host in the loop (``bench.timing``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import overlap_inductor
from bench import rows
from bench.support.experts import DispatchedExperts
from bench.support.experts import Experts
from bench.support.experts import ExpertSizes
from bench.support.gpu_ranks import device as gpu
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from bench.timing import Clock
from bench.timing import greatest
from bench.timing import in_turn

LAYERS = {
    "mixtral": ExpertSizes(experts=8, chosen=2, hidden=4096, inner=14336),
    "64-experts": ExpertSizes(experts=64, chosen=8, hidden=2048, inner=1024),
}
FORMS = ("all-reduce", "dispatched")
TOLERANCE = 4e-2
"""The largest error that is allowed, relative to the largest element. The layers compute in bf16."""


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.experts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[8192, 16384, 32768],
        help="tokens of the layer; in form dispatched, the ranks divide the tokens",
    )
    parser.add_argument("--schedules", nargs="*", default=["chunked", "auto"], choices=["ring", "chunked", "auto"])
    parser.add_argument("--train", action="store_true", help="time forward and backward of form dispatched")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--case-seconds", type=float, default=3.0)
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=540.0,
        help="leave out the first case that would probably end after this time, and all cases behind it",
    )
    parser.add_argument("--out", type=Path, help="default: experts.jsonl or experts_training.jsonl in bench/results")
    options = parser.parse_args(arguments)
    if options.train and options.forms != ["dispatched"]:
        parser.error("--train needs --forms dispatched: the other form is that of inference")
    options.out = options.out or rows.RESULTS / ("experts_training.jsonl" if options.train else "experts.jsonl")
    return options


def made(
    form: str, sizes: ExpertSizes, tokens: int, device: torch.device
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Callable[[], Any]]:
    """This rank's layer, the layer's inputs, and a function that runs only the layer's transfers."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dispatched = form == "dispatched"
    own = tokens // world_size if dispatched else tokens
    drawn = torch.Generator(device).manual_seed(rank if dispatched else 0)
    x = torch.randn(own, sizes.hidden, generator=drawn, device=device).bfloat16()
    ids = torch.randperm(own * sizes.chosen, generator=drawn, device=device) % sizes.experts
    weights = torch.rand(own, sizes.chosen, generator=drawn, device=device)
    if not dispatched:
        experts = Experts(rank, world_size, sizes=sizes)
        experts.up, experts.down = (w.to(device, torch.bfloat16) for w in (experts.up, experts.down))
        return (
            experts,
            (x, ids.view(own, -1), weights.bfloat16()),
            lambda: funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD)),
        )
    layer = DispatchedExperts(rank, world_size, sizes=sizes).to(device, torch.bfloat16)
    sent = x.repeat_interleave(sizes.chosen, 0)
    even = [len(sent) // world_size] * world_size

    def transfers() -> None:
        for _ in range(2):
            funcol.wait_tensor(funcol.all_to_all_single(sent, even, even, dist.group.WORLD))

    return layer, (x, ids.view(own, -1), weights), transfers


def compiled(layer: torch.nn.Module, inductor_mode: str = "default", **config: Any) -> Callable[..., torch.Tensor]:
    """``layer``, compiled under ``config``. ``inductor_mode``: the ``mode`` of ``torch.compile``. Dynamo caches by code
    object, so each call of this function makes a new code object."""
    namespace = {"layer": layer}
    exec("def call(*args): return layer(*args)", namespace)
    function = torch.compile(namespace["call"], dynamic=False, mode=inductor_mode)

    def call(*inputs: Any) -> torch.Tensor:
        with overlap_inductor.overlap(**config):
            return function(*inputs)  # type: ignore[no-any-return]

    call.function = function  # type: ignore[attr-defined]
    return call


def run(
    layer: torch.nn.Module, call: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The output of ``call``, and, if gradients are enabled, the gradients of tokens, scores and weights."""
    out = call(*inputs)
    if not torch.is_grad_enabled():
        return [out]
    tensors = [x for x in (*inputs, *layer.parameters()) if x.requires_grad]
    for tensor in tensors:
        tensor.grad = None
    out.backward(out.detach())
    return [out.detach(), *(tensor.grad for tensor in tensors if tensor.grad is not None)]


def measured(name: str, form: str, tokens: int, options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """The row of one case. All ranks call this together. Raises ``SystemExit`` on all ranks if a result is wrong."""
    torch._dynamo.reset()
    layer, inputs, transfers = made(form, LAYERS[name], tokens, clock.device)
    if options.train:
        inputs = tuple(x.requires_grad_() if x.is_floating_point() else x for x in inputs)
    expected = [each.double() for each in run(layer, layer, inputs)]
    calls = {"keep": compiled(layer, mode="off")}
    calls |= {s: compiled(layer, schedule=s, mode="on" if s == "auto" else "strict") for s in options.schedules}

    def error(call: Callable[..., torch.Tensor]) -> float:
        found = run(layer, call, inputs)
        off = [(f.double() - e).abs().max() / e.abs().max() for f, e in zip(found, expected, strict=True)]
        return greatest(float(torch.stack(off).max()))

    errors = {call_name: error(call) for call_name, call in calls.items()}
    # The graphs are compiled now. Entering ``overlap`` takes the host 0.4 to 0.8 ms, so timed calls do not enter it.
    every: dict[str, Callable[[], Any]] = {n: lambda c=c: run(layer, c.function, inputs) for n, c in calls.items()}
    every["transfers"] = (lambda: (transfers(), transfers())) if options.train else transfers
    times = {}
    with torch.compiler.set_stance("fail_on_recompile"):
        for setting in ("hidden", "compiled"):
            found = in_turn(clock, every, setting == "hidden", options.repeats, options.case_seconds)
            times[setting] = {call_name: asdict(timing) for call_name, timing in found.items()}
    errors = {call_name: max(errors[call_name], error(call)) for call_name, call in calls.items()}
    if not max(errors.values()) <= TOLERANCE:
        raise SystemExit(f"wrong results of {name}, {form}, {tokens} tokens: {errors}")
    return {
        "benchmark": "experts",
        "layer": name,
        "form": form,
        "tokens": tokens,
        "train": options.train,
        **asdict(LAYERS[name]),
        "world_size": dist.get_world_size(),
        "us": times,
        "errors": errors,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    start, options = time.monotonic(), parsed(arguments)
    with torch.set_grad_enabled(options.train):
        return measure(start, options)


def measure(start: float, options: argparse.Namespace) -> int:
    """Measure the cases that ``options`` request. Returns the exit status."""
    rank, _ = start_rank(120.0)
    torch._dynamo.config.capture_scalar_outputs = True
    clock, where, longest = Clock(gpu()), rows.environment(gpu()), 0.0
    for name, form, tokens in itertools.product(options.layers, options.forms, options.tokens):
        before = greatest(time.monotonic() - start)
        if longest and before + longest > options.budget_seconds:
            break
        row = measured(name, form, tokens, options, clock) | where
        longest = max(longest, greatest(time.monotonic() - start) - before)
        if rank == 0:
            rows.append(options.out, [row])
            medians = {s: {n: round(t["median"], 1) for n, t in found.items()} for s, found in row["us"].items()}
            print(json.dumps({"case": f"{name}, {form}, {tokens} tokens", "us": medians}), flush=True)
        torch.cuda.empty_cache()
    finish_rank()
    return 0


if __name__ == "__main__":
    sys.exit(main())
