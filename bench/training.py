# SPDX-License-Identifier: Apache-2.0
"""Time training steps of sequence-parallel DTensor blocks, with overlap and without.

Steps under plain ``torch.compile``, ``auto`` and forced schedules take turns in one run.

    torchrun --nproc-per-node 2 -m bench.training [--hidden 8192] [--tokens 2048 8192] \\
        [--schedules auto chunked fused] --out bench/results/training.jsonl

A block has four linear layers of ``hidden x hidden`` in its attention, and an MLP of width ``2 * hidden``. In backward,
a gathered tensor feeds two matmuls, and a scattered tensor is a sum of matmuls.

A step is a forward and a backward. Before the timing, gradients are compared with those of plain ``torch.compile``. The
host is in the loop. A program with wrong gradients is not timed. The row of any other program gives the
time of one step in milliseconds: the median over samples, then the maximum over ranks.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from bench.models import milliseconds
from bench.rows import environment
from bench.support import dtensor_block
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from bench.timing import greatest
from overlap_inductor.report import publish as reporting
from overlap_inductor.switch.backend import overlap_inductor as overlap_backend

HEAD = 128
LIMIT = 0.02
"""The largest allowed norm of the difference between gradients, relative to the norm of the gradient under plain
``torch.compile``. In bf16, a sum depends on the order of its terms."""


def blocks(hidden: int, layers: int, mesh: Any) -> nn.Module:
    dtensor_block.HIDDEN, dtensor_block.HEAD = hidden, HEAD
    torch.manual_seed(5)
    variant = dtensor_block.Variant(1, 1, False, "none")
    with torch.device("cuda"):
        made = [dtensor_block.Block(variant).bfloat16() for _ in range(layers)]
    return nn.Sequential(*(dtensor_block.sharded(block, mesh, 1) for block in made))


def step_of(
    model: nn.Module, function: Callable[..., torch.Tensor], x: torch.Tensor, target: torch.Tensor
) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        (function(x) * target).sum().backward()

    return step


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {
        "input": x.grad,
        **{n: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()},
    }
    return {n: g.float().clone() for n, g in found.items() if g is not None}


def measure(model: nn.Module, tokens: int, hidden: int, schedules: list[str]) -> list[dict[str, Any]]:
    world_size = dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    x, target = (
        torch.randn(1, tokens // world_size, hidden, device="cuda", generator=generator).bfloat16() for _ in range(2)
    )
    x.requires_grad_()
    functions: dict[str, Any] = {"plain": torch.compile(model, dynamic=False)}
    for schedule in schedules:
        functions[schedule] = torch.compile(
            model, dynamic=False, backend=overlap_backend, options={"schedule": schedule}
        )
    rows: dict[str, dict[str, Any]] = {}
    plain: dict[str, torch.Tensor] = {}
    steps = {name: step_of(model, function, x, target) for name, function in functions.items()}
    for name, step in steps.items():
        reporting.forget_reports()
        for _ in range(3):
            step()
        found = gradients(model, x)
        plain = plain or found
        sites = collections.Counter(
            f"{r.phase}: {s.facts.pattern} {s.decision.moving.schedule}"
            for r in reporting.all_reports()
            for s in r.sites
        )
        off = (
            {n: float((found[n] - g).norm() / g.norm()) for n, g in plain.items()}
            if found.keys() == plain.keys()
            else {"names": float("inf")}
        )
        error = greatest(max(e if e == e else float("inf") for e in off.values()))
        rows[name] = {
            "provider": name,
            "tokens": tokens,
            "hidden": hidden,
            "error": round(error, 5),
            "right": error <= LIMIT,
            "sites": dict(sites),
        }
    del plain, found
    times = milliseconds({name: step for name, step in steps.items() if rows[name]["right"]})
    return [
        row | {"ms": round(times[name], 3), "speedup": round(times["plain"] / times[name], 3)} if name in times else row
        for name, row in rows.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--schedules", nargs="+", default=["auto", "chunked", "fused"])
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    rank, world_size = start_rank()
    torch._dynamo.config.recompile_limit = 64
    mesh = dist.init_device_mesh("cuda", (world_size,), mesh_dim_names=("tp",))
    model = blocks(arguments.hidden, arguments.layers, mesh)
    where = {
        "world_size": world_size,
        "layers": arguments.layers,
        **environment(torch.device("cuda", torch.cuda.current_device())),
    }
    bad = 0
    for tokens in arguments.tokens:
        for row in measure(model, tokens, arguments.hidden, arguments.schedules):
            bad += not row["right"]
            if rank == 0:
                print(json.dumps(row | where), flush=True)
                if arguments.out:
                    with open(arguments.out, "a") as file:
                        file.write(json.dumps(row | where) + "\n")
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    finish_rank()
    return bad > 0


if __name__ == "__main__":
    raise SystemExit(main())
