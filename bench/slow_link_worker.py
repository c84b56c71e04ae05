# SPDX-License-Identifier: Apache-2.0
"""One rank of the slow-link benchmark: it times the plain program, the ring, the computation and the transfers.

Each round times one call of each of these four, with a barrier before each call. A time is in milliseconds: the maximum
over ranks, then the median over calls. Before the timing, the ring's results on random data are compared with those of
the plain program.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor
from bench.slow_link_cases import CASES
from bench.slow_link_cases import ROWS
from bench.slow_link_cases import SUB_CHUNKS
from bench.slow_link_cases import Case
from bench.slow_link_cases import Sizes
from bench.slow_link_cases import results
from bench.support import cores


def timed(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of each function: the maximum over ranks for each call, then the median over calls. The first call
    is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            dist.barrier()
            start = time.perf_counter()
            function()
            elapsed = torch.tensor([(time.perf_counter() - start) * 1e3], dtype=torch.float64)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            if repeat:
                samples[name].append(elapsed.item())
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.sched_setaffinity(0, {cores.own_core(rank, world_size, cores.allowed_cores())})
    # The cases with uneven parts read the parts' sizes. Without this setting, Dynamo would break the graph there.
    torch._dynamo.config.capture_scalar_outputs = True
    for columns in options["columns"]:
        for name in options["cases"]:
            rows, sub_chunks = options["rows"] * ROWS[name], options["sub_chunks"] or SUB_CHUNKS[name]
            case = CASES[name](Sizes(rank, world_size, rows, options["inner"], columns))
            times, error = _measured(name, case, sub_chunks, options["repeats"])
            row = {
                "pattern": name,
                "world_size": world_size,
                "columns": columns,
                "rows": rows,
                "inner": options["inner"],
                "megabits": options["megabits"],
                "sub_chunks": sub_chunks,
                **{f"{k}_ms": round(v, 2) for k, v in times.items()},
                "relative_error": error,
            }
            if rank == 0:
                print("ROW " + json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _measured(name: str, case: Case, sub_chunks: int, repeats: int) -> tuple[dict[str, float], float]:
    """The times of a case, and the error of the ring relative to the plain program.

    Raises:
        SystemExit: the results differ too much, or ``case.sites`` is not the number of overlapped sites.
    """
    torch._dynamo.reset()
    plain, ring, compute = (_compiled(f) for f in (case.whole, case.whole, case.compute))
    expected = results(case, plain, case.whole)
    sites_before = _overlapped()
    with overlap_inductor.overlap(schedule="ring", sub_chunks=sub_chunks):
        found = results(case, ring, case.whole)
    sites = _overlapped() - sites_before
    errors = [(f - e).abs().max() / e.abs().max().clamp(min=1e-6) for f, e in zip(found, expected, strict=True)]
    error = float(torch.stack(errors).max())  # keeps a NaN
    if not error <= case.tolerance or sites != case.sites:
        raise SystemExit(
            f"{name}: nothing was timed: relative error {error:.3g} (at most {case.tolerance:g} is allowed), {sites}"
            f" sites overlapped (expected: {case.sites})"
        )
    times = timed(
        {
            "serial": lambda: results(case, plain, case.whole),
            "ring": lambda: results(case, ring, case.whole),
            "matmul": lambda: results(case, compute, case.compute),
            "collective": case.transfer,
        },
        repeats,
    )
    return times, error


def _overlapped() -> int:
    return torch._dynamo.utils.counters["overlap_inductor"]["sites_overlapped"]


def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``function``, compiled with a code object of its own, because Dynamo caches by code object."""
    namespace = {"f": function}
    exec(compile("def g(*inputs):\n    return f(*inputs)\n", "<slow link>", "exec"), namespace)
    return torch.compile(namespace["g"])  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
