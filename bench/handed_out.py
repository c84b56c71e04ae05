# SPDX-License-Identifier: Apache-2.0
"""Measure how much longer an op takes if it also returns the gathered tensor. A weight's gradient needs this tensor.

    torchrun --nproc-per-node 2 -m bench.handed_out [--tokens 2048 8192] --out bench/results/handed_out.jsonl

The gathered tensor ``[tokens, 8192]`` is multiplied by three weights of 4096 columns each (q, k and v). Each round
times each of these calls once::

    keep                   NCCL's all-gather, then three matmuls; the gathered tensor is always produced
    chunked                the op of chunked
    fused                  the op of fused
    chunked, handed out    the op of chunked; the gathered tensor is returned
    fused, handed out      the op of fused; the gathered tensor is returned
    copy                   only a copy of the gathered tensor

Results are first compared with those of ``keep``, gathered tensors bitwise. A call with a wrong result is not timed.
Figures are microseconds of device time with the host hidden: the median over samples, then the maximum over ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from bench.rows import environment
from bench.support.gpu_ranks import device
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from bench.timing import greatest
from bench.timing import timed
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.fused import parameters as fused_plan
from overlap_inductor.lowerings.registry import define_ops
from overlap_inductor.runtime.arena import Request
from overlap_inductor.runtime.workspace import workspace_of

define_ops()

INNER, COLUMNS, WEIGHTS = 8192, 4096, 3
LIMIT, REPEATS = 2**40, 40
PLANS: dict[str, ModuleType] = {"chunked": chunked_plan, "fused": fused_plan}
Call = Callable[[], list[torch.Tensor]]


def op_call(schedule: str, a: torch.Tensor, weights: list[torch.Tensor], used: bool) -> Call:
    """A call of the schedule's op, with its workspace prepared. ``used``: whether the op also returns the gathered
    tensor. All ranks call this together."""
    group, site = dist.group.WORLD, f"{schedule} {used} {len(a)}"
    assert group is not None
    place, plan = workspace_of(group, a.device), PLANS[schedule]
    need = plan.needed(
        "all_gather_matmul",
        group.size(),
        len(a),
        INNER,
        COLUMNS,
        a.element_size(),
        plan.parameters_of("{}", place.blocks),
    )
    place.prepare([Request(site, *need)], LIMIT)
    op = getattr(torch.ops.overlap_inductor, f"{schedule}_all_gather_matmul").default
    chain = torch.zeros(1, dtype=torch.uint8, device=a.device)
    return lambda: op(chain, a, weights, [None] * WEIGHTS, used, "{}", group.group_name, site)[0]


def keep_call(a: torch.Tensor, weights: list[torch.Tensor]) -> Call:
    def call() -> list[torch.Tensor]:
        gathered = a.new_empty(dist.get_world_size() * len(a), INNER)
        dist.all_gather_into_tensor(gathered, a)
        return [*(gathered @ w for w in weights), gathered]

    return call


def is_right(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    close = all(
        (x.float() - y.float()).norm() <= 1e-2 * y.float().norm()
        for x, y in zip(found[:WEIGHTS], expected, strict=False)
    )
    return close and all(torch.equal(x, expected[-1]) for x in found[WEIGHTS:])


def measure(tokens: int) -> list[dict[str, Any]]:
    generator = torch.Generator("cuda").manual_seed(1 + dist.get_rank())
    a = torch.randn(tokens // dist.get_world_size(), INNER, device="cuda", generator=generator).bfloat16()
    weights = [
        (torch.randn(COLUMNS, INNER, device="cuda", generator=generator) / 90).bfloat16().t() for _ in range(WEIGHTS)
    ]
    keep = keep_call(a, weights)
    calls: dict[str, Call] = {
        "keep": keep,
        **{f"{s}{', handed out' * used}": op_call(s, a, weights, used) for s in PLANS for used in (False, True)},
    }
    expected = keep()
    # All ranks must time the same calls, so they agree on which calls are right.
    right = {
        name: greatest(float(not all(is_right(call(), expected) for _ in range(4)))) == 0
        for name, call in calls.items()
    }
    able: dict[str, Callable[[], Any]] = {name: call for name, call in calls.items() if right[name]}
    samples = timed(able | {"copy": lambda: torch.empty_like(expected[-1]).copy_(expected[-1])}, REPEATS)
    times = {name: round(greatest(statistics.median(values)), 1) for name, values in samples.items()}
    return [
        {"tokens": tokens, "provider": name, "right": right.get(name, True), "us": times.get(name)}
        for name in (*calls, "copy")
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    rank, world_size = start_rank()
    where = {"world_size": world_size, "inner": INNER, "columns": [COLUMNS] * WEIGHTS, **environment(device())}
    bad = 0
    for tokens in arguments.tokens:
        for row in measure(tokens):
            bad += not row["right"]
            if rank == 0:
                print(json.dumps(row | where), flush=True)
                if arguments.out:
                    with open(arguments.out, "a") as file:
                        file.write(json.dumps(row | where) + "\n")
    finish_rank()
    return bad > 0


if __name__ == "__main__":
    raise SystemExit(main())
