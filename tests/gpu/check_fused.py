# SPDX-License-Identifier: Apache-2.0
"""Checks schedule ``fused``, or another schedule that turns each site into one op, on one GPU per rank.

    torchrun --nproc-per-node 4 -m tests.gpu.check_fused [--schedule chunked] [--calls 2000] [--only stress graphs]
    torchrun --nproc-per-node 4 -m tests.gpu.check_fused --only epilogues kernels "epilogue us" "weights us"

Each check prints one JSON row. Check ``fp8`` runs only with schedule ``chunked``. For sites whose matmul is
``_scaled_mm``, it compares the results with those of fp64 matmuls of the dequantised operands.
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
import torch.distributed._functional_collectives as funcol

import overlap_inductor
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_to_all
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.gpu import fused_epilogues
from tests.gpu import fused_exchanges
from tests.gpu.repeated import host_us
from tests.gpu.repeated import late_calls
from tests.gpu.repeated import replays
from tests.support import scaled_sites
from tests.support.fused_cases import cases
from tests.support.fused_cases import contractions
from tests.support.fused_cases import exchanges
from tests.support.fused_cases import sums
from tests.support.ring_cases import as_tuple

FACTOR = 17
"""The factor by which the sizes of ``cases`` are multiplied. A shard then has 24 * 17 rows. Nearly all
sizes are multiples of 8, and none is a multiple of a tile's size."""
MEASURED = ("host", "kernels", "epilogue us", "weights us", "exchange us")
"""Checks whose row is a measurement. Three of them also assert:

- ``kernels``: a site has no more kernels than max-autotune makes for its matmul and pointwise ops alone;
- ``weights us``: two ways give nearly equal results: one launch for all weights, and one launch for the widest weight
  with vendor matmuls for the others;
- ``exchange us``: each schedule's results are close to those of ``keep``.
"""


def compiled_as(schedule: str, function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """Compile ``function`` in mode ``strict`` with ``schedule`` forced. A call raises ``StrictError`` if a site cannot
    use the schedule. Dynamo has one cache for each code object. So each compiled function gets a code object of its
    own, which calls ``function``."""
    namespace = {"function": function}
    exec("def overlapped(*args): return function(*args)", namespace)
    made = torch.compile(namespace["overlapped"], dynamic=False, **keywords)

    def call(*args: Any) -> Any:
        with overlap_inductor.overlap(schedule=schedule, mode="strict"):
            return made(*args)

    return call


def patterns(schedule: str, rank: int, world_size: int) -> list[str]:
    sites = cases(world_size, FACTOR)
    if schedule in ("chunked", "fused"):
        sites |= exchanges(world_size, FACTOR) | contractions(world_size, FACTOR)
    if schedule == "chunked":
        sites |= sums(world_size, FACTOR)
    return against_fp64(
        schedule,
        rank,
        sites,
        lambda shapes, generator: [torch.randn(s, generator=generator).bfloat16() for s in shapes],
    )


def fp8(schedule: str, rank: int, world_size: int, calls: int, count: int) -> list[str]:
    """Compare all fp8 patterns with fp64. Then stress and replay three of them. All results of one pattern must then be
    bitwise equal. Returns the problems."""
    sites = scaled_sites.cases(world_size, FACTOR)
    problems = against_fp64(schedule, rank, sites, scaled_sites.made)
    torch._dynamo.reset()
    repeated = []
    for name in ("gather rows and scales, row-wise", "scatter rows, row-wise", "all-reduce, tensor-wise"):
        function, inputs, _ = sites[name]
        tensors = [t.cuda() for t in scaled_sites.made(inputs, torch.Generator().manual_seed(rank))]
        call = functools.partial(compiled_as(schedule, function), *tensors)
        repeated.append((name, call, call()))
    wrong = late_calls(repeated, calls, rank) | replays(repeated, count)
    return [*problems, *(f"{name}: {number} wrong" for name, number in wrong.items() if number)]


def against_fp64(
    schedule: str,
    rank: int,
    sites: dict[str, tuple[Any, Any, int]],
    make: Callable[[Any, torch.Generator], list[torch.Tensor]],
) -> list[str]:
    """Compile each of ``sites`` and call it three times with inputs from ``make``. Returns a text for each problem.

    An error may be up to 2 % of the largest element of the fp64 result, or twice the uncompiled function's error. The
    larger limit counts. The second limit is for activations that magnify the rounding of their input.
    """
    problems = []
    for name, (function, shapes, expected) in sites.items():
        torch._dynamo.reset()
        compiled = compiled_as(schedule, function)
        for call in range(3):
            generator = torch.Generator().manual_seed(7 + rank + 100 * call)
            inputs = [tensor.cuda() for tensor in make(shapes, generator)]
            exact = as_tuple(function(*(i.double() for i in inputs)))
            for e, f, plain in zip(exact, as_tuple(compiled(*inputs)), as_tuple(function(*inputs)), strict=True):
                bound = max(2e-2 * e.abs().max(), 2 * (plain.double() - e).abs().max())
                if f.shape != e.shape or not (f.double() - e).abs().max() <= bound:
                    problems.append(
                        f"{name} call {call}: {tuple(f.shape)} off by {(f.double() - e).abs().max():.3g} of"
                        f" {e.abs().max():.3g}"
                    )
        report = overlap_inductor.last_report()
        schedules = [p.schedule for s in report.sites for p in s.decision.plan] if report else []
        if schedules != [schedule] * expected:
            problems.append(f"{name}: {schedules}")
    return problems


ALL_PATTERNS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
EXCHANGES = ("matmul_all_to_all", "all_to_all_matmul", "contracted_all_to_all_matmul")
PATTERNS_OF = {
    "wave_groups": ALL_PATTERNS[1:],
    "small_message": ALL_PATTERNS[2:],
    "chunked": (*ALL_PATTERNS, *EXCHANGES),
    "fused": (*ALL_PATTERNS, *EXCHANGES),
}
"""Patterns by schedule. Other schedules have ``ALL_PATTERNS``. ``contracted_all_to_all_matmul`` is
``all_to_all_matmul`` with matmuls that contract the exchanged dim. It has an op of its own."""


def patterns_of(
    schedule: str, world_size: int, tokens: int
) -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    """``{pattern: (function, inputs)}`` for the parts of an MLP of hidden size 2048 that ``schedule`` serves."""
    g, rows = dist.group.WORLD, tokens // world_size
    up, down = (torch.randn(1024, 2048, device="cuda").bfloat16() / 32 for _ in range(2))
    x, y = torch.randn(rows, 2048, device="cuda").bfloat16(), torch.randn(tokens, 1024, device="cuda").bfloat16()
    made = {
        "all_gather_matmul": (lambda x, a: all_gather(x, 0, g) @ a.t(), [x, up]),
        "matmul_reduce_scatter": (lambda y, a: reduce_scatter(y @ a, "sum", 0, g), [y, down]),
        "matmul_all_reduce": (lambda y, a: funcol.all_reduce(y @ a, "sum", g), [y, down]),
        "matmul_all_to_all": (lambda y, a: all_to_all(y @ a, g), [y, down]),
        "all_to_all_matmul": (lambda y, a: all_to_all(y, g) @ a, [y, down]),
        "contracted_all_to_all_matmul": (
            lambda y, a: all_to_all(y, g).unflatten(0, (world_size, rows)).transpose(0, 1).flatten(1) @ a,
            [y, torch.cat([down] * world_size)],
        ),
    }
    return {name: made[name] for name in PATTERNS_OF.get(schedule, ALL_PATTERNS)}


def stress(schedule: str, rank: int, world_size: int, calls: int) -> dict[str, int]:
    """Call each pattern with each of two token counts, again and again in one fixed order. Each rank delays some calls
    at random. Every result must be bitwise equal to the first one with the same inputs. Returns the number of wrong
    results by name."""
    sites = []
    for tokens in (512, 1000 // world_size * world_size):
        torch._dynamo.reset()
        for name, (function, inputs) in patterns_of(schedule, world_size, tokens).items():
            compiled = compiled_as(schedule, function)
            first = compiled(*inputs)
            assert (first.float() - function(*inputs).float()).abs().max() < 2e-2 * first.float().abs().max(), (
                f"{name} {tokens}"
            )
            sites.append((f"{name} {tokens}", functools.partial(compiled, *inputs), first))
    return late_calls(sites, calls, rank)


def graphs(schedule: str, world_size: int, count: int) -> dict[str, int]:
    """Capture one call of each pattern in each of two CUDA graphs. Replay the graphs alternately, mixed with eager
    calls. Returns the number of wrong results."""
    torch._dynamo.reset()
    calls = {
        name: functools.partial(compiled_as(schedule, function), *inputs)
        for name, (function, inputs) in patterns_of(schedule, world_size, 512).items()
    }
    return replays([(name, call, call()) for name, call in calls.items()], count)


def reduce_overhead(schedule: str, world_size: int) -> dict[str, int]:
    """Compile with ``mode="reduce-overhead"``, so that Inductor captures CUDA graphs. Returns the number of wrong
    results."""
    wrong = 0
    for function, inputs in patterns_of(schedule, world_size, 512).values():
        torch._dynamo.reset()
        compiled = compiled_as(schedule, function, mode="reduce-overhead")
        expected = function(*inputs).float()
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            wrong += int(not (compiled(*inputs).float() - expected).abs().max() <= 2e-2 * expected.abs().max())
    return {"wrong": wrong}


def host_cost(schedule: str, world_size: int) -> dict[str, dict[str, float]]:
    """Microseconds of host time by pattern, while the GPU is busy. The times are those of the op alone, of the compiled
    function with and without overlap, and of one allocation. The last one shows how fast the host is."""
    return {
        name: _host_cost(schedule, name, function, inputs)
        for name, (function, inputs) in patterns_of(schedule, world_size, 512).items()
    }


def _host_cost(schedule: str, name: str, function: Callable[..., Any], inputs: list[torch.Tensor]) -> dict[str, float]:
    torch._dynamo.reset()
    overlapped, keep = (
        torch.compile(function, dynamic=False),
        torch.compile(lambda *args: function(*args), dynamic=False),
    )
    with overlap_inductor.overlap(schedule=schedule, mode="strict"):
        overlapped(*inputs)
        report = overlap_inductor.last_report()
        assert report is not None
        with overlap_inductor.overlap(mode="off"):
            keep(*inputs)
        site, settings = report.sites[0].facts, report.sites[0].decision.plan[0].parameters["settings"]
        op = getattr(torch.ops.overlap_inductor, f"{schedule}_{name}").default
        chain, last = torch.zeros(1, dtype=torch.uint8, device="cuda"), (site.collective.group_name, site.id)
        a, b = inputs
        arguments = {
            "all_gather_matmul": (chain, a, [b.t()], [None], False, settings, *last),
            "all_to_all_matmul": (chain, a, [b], [None], False, settings, *last),
            "matmul_all_to_all": (chain, a, b, None, False, settings, *last),
            "contracted_all_to_all_matmul": (chain, a, [b], [None], False, settings, *last),
        }.get(name, (chain, a, b, None, settings, "sum", *last))
        return {
            "op": host_us(lambda: op(*arguments)),
            schedule: host_us(lambda: overlapped(*inputs)),
            "keep": host_us(lambda: keep(*inputs)),
            "torch.empty": host_us(lambda: torch.empty_like(a)),
        }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="fused", help="a schedule that turns each site into one op")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--only", nargs="*", help="names of the checks to run; default: all")
    arguments = parser.parse_args()
    rank, world_size = start_rank()
    # Beyond its recompile limit, Dynamo would run a function uncompiled.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = 64
    failed, schedule = 0, arguments.schedule
    checks: list[tuple[str, Callable[[], Any]]] = [
        ("patterns", lambda: patterns(schedule, rank, world_size)),
        ("stress", lambda: stress(schedule, rank, world_size, arguments.calls)),
        ("graphs", lambda: graphs(schedule, world_size, arguments.replays)),
        ("reduce-overhead", lambda: reduce_overhead(schedule, world_size)),
        ("host", lambda: host_cost(schedule, world_size)),
    ]
    if schedule == "fused":
        checks += [
            ("epilogues", lambda: fused_epilogues.epilogues(compiled_as, rank, world_size)),
            ("kernels", lambda: fused_epilogues.kernel_counts(compiled_as, rank, world_size)),
            ("epilogue us", lambda: fused_epilogues.epilogue_times(compiled_as, world_size)),
            ("weights us", lambda: fused_epilogues.weight_times(compiled_as, world_size)),
            ("exchange us", lambda: fused_exchanges.exchange_times(world_size)),
        ]
    if schedule == "chunked":
        checks.insert(1, ("fp8", lambda: fp8(schedule, rank, world_size, arguments.calls // 4, arguments.replays // 4)))
    for name, check in checks:
        if arguments.only and name not in arguments.only:
            continue
        start = time.monotonic()
        found = check()
        bad = bool(found) if isinstance(found, list) else name not in MEASURED and any(found.values())
        failed += bad
        if rank == 0 or bad:
            print(
                json.dumps(
                    {
                        "check": name,
                        "schedule": schedule,
                        "rank": rank,
                        "world_size": world_size,
                        "found": found,
                        "ok": not bad,
                        "s": round(time.monotonic() - start, 1),
                    }
                ),
                flush=True,
            )
        dist.barrier()
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
