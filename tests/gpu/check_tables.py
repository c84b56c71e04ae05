# SPDX-License-Identifier: Apache-2.0
"""Checks, on GPUs, the kernel of schedule ``fused`` that looks up tables and sends the results.

    torchrun --nproc-per-node N -m tests.gpu.check_tables [--calls 2000] [--replays 500] [--only stress graphs]
    torchrun --nproc-per-node 1 -m tests.gpu.check_tables --wrong-index     # a device-side assert must fail the script

Each rank has its own GPU. Each check prints one JSON row. Ranks other than 0 print only the rows of failed checks.

- ``results``: the results of every kind of lookup are close to fp64. Without ``per_sample_weights``, they are bitwise
  equal to torch's lookups.
- ``trained``: gradients of a DLRM's tables are close to those of the plain program.
- ``stress``: calls with late ranks repeat their first results.
- ``graphs``: replays of captured graphs, between eager calls, repeat the first results.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor
from bench.support.gpu_ranks import device
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from bench.support.lookups import TOLERANCE
from bench.support.lookups import LookupCase
from bench.support.lookups import LookupSite
from tests.gpu.repeated import Repeated
from tests.gpu.repeated import late_calls
from tests.gpu.repeated import replays
from tests.support.dlrm import DLRM
from tests.support.dlrm import batch_of

PATTERN = "embedding_all_to_all"
HEIGHT = 5000


def _cases(world_size: int) -> list[LookupCase]:
    batch = 77 * world_size
    return [
        LookupCase(3, batch, 64, 5, HEIGHT),
        LookupCase(70, batch, 128, 9, HEIGHT, "mean", torch.bfloat16, jagged=True),
        LookupCase(4, batch, 96, 33, HEIGHT, "weighted", torch.float16, jagged=True),
        LookupCase(5, batch, 256, 0, HEIGHT),
        LookupCase(2, 4096 * world_size, 64, 1, HEIGHT),
        LookupCase(2, batch, 1024, 100, HEIGHT, "sum", torch.float32, jagged=True),
    ]


def compiled(function: Callable[..., Any], **config: Any) -> Callable[..., Any]:
    namespace = {"function": function}
    exec("def overlapped(*args): return function(*args)", namespace)
    made = torch.compile(namespace["overlapped"], dynamic=False)

    def call(*args: Any) -> Any:
        with overlap_inductor.overlap(patterns=(PATTERN,), **config):
            return made(*args)

    return call


def results(world_size: int) -> list[str]:
    """Returns the problems. Without ``per_sample_weights``, the kernel sums in the order of torch's kernel, so results
    must be bitwise equal."""
    problems = []
    for case in _cases(world_size):
        torch._dynamo.reset()
        for seed in range(2):
            site = LookupSite(case, device(), seed)
            fused = compiled(site.plain, schedule="fused", mode="strict")
            found, plain, exact = fused(*site.operands), site.plain(*site.operands), site.expected()
            error = float((found.double() - exact).abs().max() / exact.abs().max())
            if not error <= TOLERANCE[case.dtype] or (case.mode != "weighted" and not torch.equal(found, plain)):
                problems.append(f"{case} seed {seed}: off by {error:.3g}, {int((found != plain).sum())} differ")
    return problems


def trained(rank: int) -> list[str]:
    """Compare the gradients with and without overlap. Returns the problems. The backward of ``embedding_bag`` reads
    values that the kernel stores, so wrong values show as wrong gradients."""
    problems = []
    for kind, joined in (("sum", "cat"), ("mean", "tables first"), ("embedding", "stack")):
        torch.manual_seed(rank)
        model = DLRM(6, HEIGHT, 64, 5, kind, joined).cuda()
        batch = batch_of(model, 33, 7, torch.Generator().manual_seed(rank))
        moved = torch.utils._pytree.tree_map(
            lambda t: t.cuda() if isinstance(t, torch.Tensor) else t, batch.arguments()
        )
        grads = []
        for config in ({"schedule": "fused", "mode": "on"}, {"mode": "off"}):
            torch._dynamo.reset()
            model.zero_grad()
            compiled(model, **config)(*moved).square().sum().backward()
            grads.append([t.weight.grad.clone() for t in model.tables])
        for i, (one, other) in enumerate(zip(*grads, strict=True)):
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max())):
                problems.append(f"{kind} {joined} table {i}: gradients differ by {(one - other).abs().max():.3g}")
    return problems


def _sites(world_size: int) -> list[Repeated]:
    found: list[Repeated] = []
    for case in _cases(world_size)[:4]:
        for seed in range(2):
            torch._dynamo.reset()
            site = LookupSite(case, device(), seed)
            call = functools.partial(compiled(site.plain, schedule="fused", mode="strict"), *site.operands)
            found.append((f"{case} {seed}", call, call()))
    return found


def wrong_index() -> None:
    """Look up an index that is out of range. CUDA's device-side assert must raise an error, as without overlap."""
    site = LookupSite(LookupCase(2, 64, 64, 3, HEIGHT), device())
    from overlap_inductor.lowerings.fused.table_calls import Lookups
    from overlap_inductor.lowerings.fused.table_calls import look_up
    from overlap_inductor.lowerings.fused.table_parameters import needed
    from overlap_inductor.lowerings.fused.table_parameters import parameters_of
    from overlap_inductor.runtime.arena import Request
    from overlap_inductor.runtime.workspace import workspace_of

    site.indices[1][7] = HEIGHT
    place, size = workspace_of(dist.group.WORLD, device()), needed(dist.get_world_size(), 2, 64, 64, 4)
    place.prepare([Request("tables", *size)], 2**40)
    launch = place.launch("tables", *size)
    assert launch is not None
    lookups = Lookups(site.tables, site.indices, site.offsets, [], [-1, -1], 64, False, True, True)
    look_up(lookups, launch, parameters_of("{}", place.blocks))
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--replays", type=int, default=500)
    parser.add_argument("--only", nargs="*", help="names of the checks to run; default: all")
    parser.add_argument("--wrong-index", action="store_true", help="look up an index that is out of range")
    arguments = parser.parse_args()
    rank, world_size = start_rank()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if arguments.wrong_index:
        wrong_index()
    failed = 0
    checks: list[tuple[str, Callable[[], Any]]] = [
        ("results", torch.no_grad()(lambda: results(world_size))),
        ("trained", lambda: trained(rank)),
        ("stress", torch.no_grad()(lambda: late_calls(_sites(world_size), arguments.calls, rank))),
        ("graphs", torch.no_grad()(lambda: replays(_sites(world_size), arguments.replays))),
    ]
    for name, check in checks:
        if arguments.only and name not in arguments.only:
            continue
        start = time.monotonic()
        found = check()
        bad = bool(found) if isinstance(found, list) else any(found.values())
        failed += bad
        if rank == 0 or bad:
            row = {"check": name, "rank": rank, "world_size": world_size, "found": found, "ok": not bad}
            print(json.dumps(row | {"s": round(time.monotonic() - start, 1)}), flush=True)
        dist.barrier()
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
