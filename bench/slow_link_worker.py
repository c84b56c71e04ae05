# SPDX-License-Identifier: Apache-2.0
"""One rank of the slow-link benchmark: it times the plain graph, the ring, the matmul and the collective, in turn.

Times are in milliseconds: the median over calls of the maximum over ranks. A barrier precedes each call. Before a case
is timed, the ring's result on random data is compared with that of the plain graph.
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
import torch.distributed._functional_collectives as funcol
from torch.nn import functional

import overlap_inductor
from overlap_inductor.torch_compat.functional_collectives import all_to_all

all_gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)


def patterns(
    world_size: int, rows: int, inner: int, columns: int
) -> dict[str, tuple[Any, Any, Any, list[tuple[int, int]]]]:
    """``name: (whole, matmul alone, collective alone, input shapes)``. ``[rows, inner]`` is the shape of the tensor
    that the collective gathers, scatters or exchanges."""
    group = dist.group.WORLD

    def gather_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return all_gather(x, 0, group) @ w

    def matmul_scatter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(x @ w, "sum", 0, group)

    def matmul_exchange(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return all_to_all(x @ w, group)

    def exchange_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return all_to_all(x, group) @ w

    def lookup_exchange(*tables: torch.Tensor) -> torch.Tensor:
        return all_to_all(looked_up(*tables), group)

    def looked_up(*tables: torch.Tensor) -> torch.Tensor:
        return torch.cat([functional.embedding_bag(indices, table, mode="sum") for table in tables], 1)

    full = torch.randn(rows, inner)
    indices = torch.randint(10_000, (rows, columns // 16))
    return {
        "all_gather_matmul": (
            gather_matmul,
            lambda x, w: full @ w,
            lambda x, w: funcol.wait_tensor(all_gather(x, 0, group)),
            [(rows // world_size, inner), (inner, columns)],
        ),
        # The scattered tensor is [rows, inner], so that all patterns move the same number of bytes.
        "matmul_reduce_scatter": (
            matmul_scatter,
            lambda x, w: x @ w,
            lambda x, w: funcol.wait_tensor(reduce_scatter(full, "sum", 0, group)),
            [(rows, columns), (columns, inner)],
        ),
        "matmul_all_to_all": (
            matmul_exchange,
            lambda x, w: x @ w,
            lambda x, w: funcol.wait_tensor(all_to_all(full, group)),
            [(rows, columns), (columns, inner)],
        ),
        "all_to_all_matmul": (
            exchange_matmul,
            lambda x, w: full @ w,
            lambda x, w: funcol.wait_tensor(all_to_all(x, group)),
            [(rows, inner), (inner, columns)],
        ),
        # Tables of 64 columns, and bags of columns / 16 rows.
        "embedding_all_to_all": (
            lookup_exchange,
            looked_up,
            lambda *tables: funcol.wait_tensor(all_to_all(full, group)),
            [(10_000, 64)] * (inner // 64),
        ),
    }


def timed(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of each function: the median over calls of the maximum over ranks. The first call is not counted."""
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
    cores = sorted(os.sched_getaffinity(0))
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch._dynamo.config.cache_size_limit = 64
    for columns in options["columns"]:
        for name, (whole, matmul, collective, shapes) in patterns(
            world_size, options["rows"], options["inner"], columns
        ).items():
            generator = torch.Generator().manual_seed(rank)
            inputs = [torch.randn(s, generator=generator) / 16 for s in shapes]
            torch._dynamo.reset()
            plain = torch.compile(whole)
            expected = plain(*inputs)
            torch._dynamo.reset()
            with overlap_inductor.overlap(schedule="ring", sub_chunks=options["sub_chunks"]):
                ring = torch.compile(whole)
                found = ring(*inputs)
            error = ((found - expected).abs().max() / expected.abs().max()).item()
            report = overlap_inductor.last_report()
            if error > 1e-4 or report is None or report.counters()["sites_overlapped"] != 1:
                raise SystemExit(
                    f"{name}: relative error {error:.3g}, report {report.counters() if report else None}; nothing was"
                    " timed"
                )
            plain_code, ring_code = _callables(plain, ring, whole, inputs, options["sub_chunks"])
            times = timed(
                {
                    "serial": plain_code,
                    "ring": ring_code,
                    "matmul": lambda matmul=matmul, inputs=inputs: matmul(*inputs),
                    "collective": lambda collective=collective, inputs=inputs: collective(*inputs),
                },
                options["repeats"],
            )
            if rank == 0:
                row = {
                    "pattern": name,
                    "world_size": world_size,
                    "columns": columns,
                    **{k: options[k] for k in ("rows", "inner", "megabits", "sub_chunks")},
                }
                print(
                    "ROW "
                    + json.dumps(
                        {**row, **{f"{k}_ms": round(v, 2) for k, v in times.items()}, "relative_error": error}
                    ),
                    flush=True,
                )
    dist.barrier()
    dist.destroy_process_group()


def _callables(
    plain: Any, ring: Any, whole: Any, inputs: list[torch.Tensor], parts: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Calls of both compiled forms of one function. Dynamo caches by code object, so each form gets its own code
    object."""
    torch._dynamo.reset()
    namespaces = [{"f": whole}, {"f": whole}]
    for namespace in namespaces:
        exec(compile("def g(*inputs):\n    return f(*inputs)\n", "<slow link>", "exec"), namespace)
    first = torch.compile(namespaces[0]["g"])
    first(*inputs)
    with overlap_inductor.overlap(schedule="ring", sub_chunks=parts):
        second = torch.compile(namespaces[1]["g"])
        second(*inputs)
    return lambda: first(*inputs), lambda: second(*inputs)


if __name__ == "__main__":
    main()
