# SPDX-License-Identifier: Apache-2.0
"""Checks, on GPUs, layers of experts between two exchanges in schedule ``chunked``. Outputs and gradients are compared
with fp64, with every load of the experts. Calls are repeated with late ranks, on two streams, and with
``mode="reduce-overhead"``, in which the site must be kept, because the host tells the numbers of rows.

    torchrun --nproc-per-node 2 -m tests.gpu.check_experts [--rounds 3] [--seed 0]

A result may be 1.5 times as far from fp64 as that of the uncompiled layer, plus ``SLACK``. (The plain compiled layer
fails if a rank gets no rows: torch 2.11 raises ``ZeroDivisionError``.) Each check prints one JSON row. A row with
problems ends the script with status 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench.experts import compiled
from bench.support.experts import SMALL
from bench.support.experts import DispatchedExperts
from bench.support.experts import ExpertSizes
from bench.support.gpu_ranks import device
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.report import publish as reporting
from tests.support.expert_layers import LOADS

SIZES = (ExpertSizes(experts=8, chosen=2, hidden=256, inner=384), ExpertSizes(64, 8, 512, 256))
TOKENS = (64, 300, 1000)
EVERY_RANK_HAS_ROWS = ("random", "an empty expert on each rank", "uneven")
SLACK = 0.02
"""A difference relative to the largest element of the exact tensor, or to 1 if this element is smaller."""
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _given(sizes: ExpertSizes, tokens: int, loads: str, rank: int, seed: int) -> Given:
    drawn = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(tokens, sizes.hidden, generator=drawn).to(torch.bfloat16)
    # ``LOADS`` are those of ``SMALL``. Of more experts, each gets the load of one in ``SMALL``.
    ids = LOADS[loads](tokens, drawn).repeat_interleave(sizes.chosen // SMALL.chosen, 1)
    alike = sizes.experts // SMALL.experts
    ids = ids * alike + torch.randint(0, alike, ids.shape, generator=drawn)
    scores = torch.rand(tokens, sizes.chosen, generator=drawn)
    return x.to(device()), ids.to(device()), scores.to(device())


def _results(layer: DispatchedExperts, call: Callable[..., torch.Tensor], given: Given) -> dict[str, torch.Tensor]:
    """The output, and the gradients of the tokens, of the scores and of the experts' weights."""
    layer.zero_grad()
    torch.compiler.cudagraph_mark_step_begin()
    x, ids, scores = given[0].clone().requires_grad_(), given[1], given[2].clone().requires_grad_()
    out = call(x, ids, scores)
    out.float().square().sum().backward()
    weights = {name: p.grad for name, p in layer.named_parameters() if name in ("w1", "w2", "w3")}
    return {"output": out.detach(), "x": x.grad, "scores": scores.grad, **weights}  # type: ignore[dict-item]


def _exact(layer: DispatchedExperts, given: list[Given], rank: int) -> dict[str, torch.Tensor]:
    """``_results`` in fp64. A weight's gradient is the sum over the tokens of all ranks (``given``)."""
    weights = [w.to(device(), torch.bfloat16).double().requires_grad_() for w in layer.all_weights]
    found: dict[str, torch.Tensor] = {}
    for other, (x, ids, scores) in enumerate(given):
        x, scores = x.double().requires_grad_(), scores.double().requires_grad_()
        out = layer.whole(x, ids, scores, weights)
        out.square().sum().backward()
        if other == rank:
            found = {"output": out.detach(), "x": x.grad, "scores": scores.grad}  # type: ignore[dict-item]
    return found | {name: w.grad[layer.own] for name, w in zip(("w1", "w2", "w3"), weights)}  # type: ignore[index]


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1))


def problems_of(layer: DispatchedExperts, calls: dict[str, Any], tokens: int, loads: str, seed: int) -> list[str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    given = [_given(layer.sizes, tokens, loads, r, seed) for r in range(world_size)]
    exact = _exact(layer, given, rank)
    found = {name: _results(layer, call, given[rank]) for name, call in calls.items()}
    problems = []
    for name, wanted in exact.items():
        chunked, eager = (_off(found[how][name], wanted) for how in ("chunked", "uncompiled"))
        if not chunked <= 1.5 * eager + SLACK:
            problems.append(f"{name} off by {chunked:.3g}, uncompiled by {eager:.3g}")
    return problems


def late(layer: DispatchedExperts, call: Callable[..., torch.Tensor], rounds: int) -> list[str]:
    """Repeat calls while one rank after the other is late. Returns the problems. The results of experts are added to
    tokens in any order, so repeated results are close, not equal."""
    problems, rank = [], dist.get_rank()
    with torch.no_grad():
        for number in range(rounds * 20):
            given = _given(layer.sizes, TOKENS[number % len(TOKENS)], "uneven", rank, number % 5)
            first = call(*given)
            if number % dist.get_world_size() == rank:
                torch.cuda._sleep(2_000_000)
            again = call(*given)
            if not (off := _off(again, first.double())) <= 0.05:
                problems.append(f"call {number}: off by {off:.3g}")
    return problems


def two_streams(layer: DispatchedExperts, call: Callable[..., torch.Tensor], rounds: int) -> list[str]:
    """Call from two streams in turn, without a wait in between. Returns the problems."""
    problems, rank = [], dist.get_rank()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with torch.no_grad():
        given = [_given(layer.sizes, tokens, "uneven", rank, tokens) for tokens in TOKENS[-2:]]
        wanted = [call(*one).double() for one in given]
        torch.cuda.synchronize()
        for number in range(rounds * 20):
            found = []
            for stream, one in zip(streams, given, strict=True):
                with torch.cuda.stream(stream):
                    found.append(call(*one))
            torch.cuda.synchronize()
            for of, (again, first) in enumerate(zip(found, wanted, strict=True)):
                if not (off := _off(again, first)) <= 0.05:
                    problems.append(f"round {number}, stream {of}: off by {off:.3g}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu.check_experts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rank, _ = start_rank(120.0)
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.recompile_limit = 64
    wrong = 0
    for sizes in SIZES:
        layer = DispatchedExperts(rank, dist.get_world_size(), shared=True, sizes=sizes, blocking=True)
        layer = layer.to(device(), torch.bfloat16)
        calls = {"chunked": compiled(layer, schedule="chunked", mode="strict"), "uncompiled": layer}
        captured = compiled(layer, "reduce-overhead", schedule="chunked", mode="on")
        row: dict[str, Any] = {"rank": rank, "experts": sizes.experts}
        for number, loads in itertools.product(range(options.rounds), LOADS):
            tokens = TOKENS[number % len(TOKENS)]
            found = problems_of(layer, calls, tokens, loads, options.seed + number)
            wrong += len(found)
            print(json.dumps({**row, "loads": loads, "tokens": tokens, "problems": found}), flush=True)
        for loads in EVERY_RANK_HAS_ROWS:
            found = problems_of(layer, {**calls, "chunked": captured}, TOKENS[1], loads, options.seed)
            wrong += len(found)
            print(json.dumps({**row, "loads": loads, "mode": "reduce-overhead", "problems": found}), flush=True)
        latest = reporting.all_reports()[-1]
        if any(site.decision.status == "overlapped" for site in latest.sites):
            wrong += 1
            print(json.dumps({**row, "mode": "reduce-overhead", "problems": ["the site is overlapped"]}), flush=True)
        for check in (late, two_streams):
            found = check(layer, calls["chunked"], options.rounds)
            wrong += len(found)
            print(json.dumps({**row, "check": check.__name__, "problems": found}), flush=True)
    finish_rank()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
