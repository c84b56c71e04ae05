# SPDX-License-Identifier: Apache-2.0
"""Runs training steps of a model with several schedules, and compares outputs and gradients with fp32.

    torchrun --nproc-per-node 2 -m tests.gpu.check_training [--schedules fused chunked wave_groups ring auto] \\
        [--modes default reduce-overhead]

The model has three blocks and three variants:

- sequence-parallel by DTensor, with gathers and scatters in forward and backward;
- the first variant with full checkpointing;
- tensor-parallel, with all-reduces.

Two inputs take turns. If a schedule sums in a fixed order, equal inputs must give equal bits. Before one step, the
program returns cached memory to the GPU, so later tensors may get other addresses. Before another step, it runs a step
of another model. Each rank has its own GPU. Prints one JSON row per variant, mode and schedule, and per variant and
mode one row without overlap. Ranks other than 0 print only the rows that are not right. The exit status is 1 if a row
is not right.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module

import overlap_inductor
from bench.support import dtensor_block
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.report import publish as reporting

BLOCKS, TOKENS, HIDDEN, HEAD = 3, 2048, 2048, 64
STEPS = 10
LIMIT = 0.03
"""The largest permitted error in bf16, relative to the norm of the fp32 result. A schedule's error must also not exceed
1.5 times that of the plain compile, plus 0.002."""
GIVE_BACK_AT, OTHER_AT = 4, 6
SCHEDULES = ("fused", "chunked", "wave_groups", "ring", "auto")
MODELS = ("sequence parallel", "sequence parallel, checkpointed", "tensor parallel")


def whole(name: str) -> nn.Module:
    """The whole model in fp32. Weights are equal on all ranks."""
    dtensor_block.HIDDEN, dtensor_block.HEAD = HIDDEN, HEAD
    torch.manual_seed(5)
    variant = dtensor_block.Variant(1, 1, False, "full" if name.endswith("checkpointed") else "none")
    return nn.Sequential(*(dtensor_block.Block(variant) for _ in range(BLOCKS))).cuda()


def sharded(name: str, mesh: DeviceMesh) -> nn.Module:
    model = whole(name).bfloat16()
    for block in model:
        if name.startswith("sequence"):
            dtensor_block.sharded(block, mesh, 1)  # type: ignore[arg-type]
        else:
            plan: dict[str, Any] = {f"attention.{n}": ColwiseParallel() for n in ("wq", "wk", "wv")} | {
                "attention.wo": RowwiseParallel()
            }
            parallelize_module(
                block,
                mesh,
                {**plan, "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()},
            )
    return model


def step(model: nn.Module, compiled: Any, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run one training step. Returns the output and the gradients by name. Gradients of parameters are whole. The
    gradient of the input has the shape of ``x``."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    torch.compiler.cudagraph_mark_step_begin()
    out = compiled(x)
    (out * target).sum().backward()
    found = {"output": out.detach().clone(), "gradient of the input": x.grad}
    for name, p in model.named_parameters():
        found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return {name: value.detach().clone() for name, value in found.items()}


def largest_error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> tuple[float, str]:
    errors = {
        n: ((found[n].float() - e).norm() / e.norm()).item() if found[n].shape == e.shape else float("inf")
        for n, e in exact.items()
    }
    errors = {n: e if e == e else float("inf") for n, e in errors.items()}
    where = max(errors, key=errors.__getitem__)
    return errors[where], where


def data(name: str, mesh: DeviceMesh, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """``([input, target], [input, target] of this rank)``, the first two in fp32 and the others in bf16."""
    generator = torch.Generator("cuda").manual_seed(number)
    both = [torch.randn(1, TOKENS, HIDDEN, device="cuda", generator=generator) for _ in range(2)]
    mine = [t.chunk(mesh.size(), 1)[mesh.get_local_rank()] if name.startswith("sequence") else t for t in both]
    return both, [t.bfloat16().contiguous() for t in mine]


def exact_results(name: str, mesh: DeviceMesh, number: int) -> dict[str, torch.Tensor]:
    model = whole(name)
    both, _ = data(name, mesh, number)
    found = step(model, model, *both)
    for key in ("output", "gradient of the input"):
        if name.startswith("sequence"):
            found[key] = found[key].chunk(mesh.size(), 1)[mesh.get_local_rank()]
    return found


def run(
    name: str, schedule: str, mode: str, mesh: DeviceMesh, exact: list[dict[str, torch.Tensor]], other: Any
) -> dict[str, Any]:
    """Run ``STEPS`` steps with one schedule (``off``: without overlap). Returns a row."""
    torch._dynamo.reset()
    reporting.forget_reports()
    model, inputs = sharded(name, mesh), [data(name, mesh, i)[1] for i in range(len(exact))]
    first: list[dict[str, torch.Tensor]] = []
    changed: Counter[str] = Counter()
    fields: dict[str, Any] = {"mode": "off"} if schedule == "off" else {"schedule": schedule}
    begin = time.monotonic()
    with overlap_inductor.overlap(**fields):
        compiled = torch.compile(model, mode=None if mode == "default" else mode)
        for i in range(STEPS):
            if i == GIVE_BACK_AT:
                torch.cuda.empty_cache()
            if i == OTHER_AT:
                other()
            found = step(model, compiled, *inputs[i % len(inputs)])
            if i < len(inputs):
                first.append(found)
            else:
                changed.update(n for n, value in found.items() if not torch.equal(value, first[i % len(inputs)][n]))
    error, where = max(largest_error(f, e) for f, e in zip(first, exact, strict=True))
    sites = Counter(
        f"{r.phase}: {s.facts.pattern} {s.decision.moving.schedule}" for r in reporting.all_reports() for s in r.sites
    )
    return {
        "model": name, "schedule": schedule, "mode": mode, "world_size": mesh.size(),
        "error": round(error, 4), "where": where, "changed": dict(changed),
        "sites": dict(sites), "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--modes", nargs="+", choices=("default", "reduce-overhead"), default=("default",))
    arguments = parser.parse_args()
    rank, world_size = start_rank()
    mesh = dist.init_device_mesh("cuda", (world_size,), mesh_dim_names=("tp",))
    for allowed in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
    ):
        # In backward, these kernels do not add in a fixed order.
        allowed(False)
    linear = nn.Linear(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)
    beside = torch.randn(512, HIDDEN, device="cuda", dtype=torch.bfloat16)
    bad = 0
    for name in arguments.models:
        exact = [exact_results(name, mesh, number) for number in range(2)]
        for mode in arguments.modes:
            plain = run(name, "off", mode, mesh, exact, lambda: linear(beside).sum().backward())
            for schedule in ("off", *arguments.schedules):
                row = (
                    copy.copy(plain)
                    if schedule == "off"
                    else run(name, schedule, mode, mesh, exact, lambda: linear(beside).sum().backward())
                )
                moves = any(not s.endswith(" keep") for s in row["sites"])
                # Without overlap and in ``wave_groups``, NCCL chooses the order of the sums.
                row["right"] = (
                    row["error"] <= min(1.5 * plain["error"] + 2e-3, LIMIT)
                    and (not row["changed"] or schedule in ("off", "wave_groups"))
                    and (moves or schedule in ("off", "auto"))
                )
                bad += not row["right"]
                if rank == 0 or not row["right"]:
                    print(json.dumps({"rank": rank, **row}), flush=True)
    # destroy_process_group never returns while a CUDA graph holds an NCCL kernel.
    torch._dynamo.reset()
    gc.collect()
    finish_rank()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
