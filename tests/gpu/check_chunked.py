# SPDX-License-Identifier: Apache-2.0
"""Checks the ops of schedule ``chunked`` on GPUs, eagerly and in CUDA graphs.

    torchrun --nproc-per-node 2 -m tests.gpu.check_chunked [--calls 60] [--tokens 2048]
    torchrun --nproc-per-node 8 -m tests.gpu.check_chunked --patterns matmul_all_to_all all_to_all_matmul

The ops are called as in a rewritten graph. They run with the transports ``copy_engine`` and ``sm_push``, and with
several numbers of chunks and bands. Rank 0 prints one JSON row for each setting, and other ranks print those of theirs
that are wrong:

- the largest error against fp32, relative to the largest element;
- ``wrong_calls``: the number of result tensors of eager calls that differ from those of the first call;
- ``wrong_replays``: the same number for replays of a CUDA graph;
- ``host_us``: the host time of a call in microseconds.

The exit status is 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor.lowerings.chunked.ops  # noqa: F401  (it defines the ops)
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked.schedule import CHUNKED
from overlap_inductor.runtime import workspace
from overlap_inductor.torch_compat import symmetric
from tests.gpu.repeated import host_us

HIDDEN, WIDE = 2048, 1024
PATIENCE_SECONDS = 20.0
CONTRACTED = "contracted all_to_all_matmul"
OUTPUT = "matmul_all_gather"
PATTERNS = [*CHUNKED.patterns, CONTRACTED]
ops = torch.ops.overlap_inductor


def settings(pattern: str, world_size: int) -> list[dict[str, Any]]:
    chunks: list[dict[str, Any]] = [
        {},
        {"chunks": 1},
        {"chunks": 3},
        {"chunks": world_size - 1},
        {"chunks": 2 * (world_size - 1)},
    ]
    if pattern == CONTRACTED:
        chunks = [{"bands": bands} for bands in (0, 1, 2, 4)]
    if pattern == OUTPUT:
        chunks = [{"bands": bands} for bands in (0, 1, 3, 8)]
    if pattern == "matmul_all_reduce":
        chunks += [{"bands": 2}, {"chunks": 0, "bands": 4}, {"chunks": 1, "bands": 2}, {"chunks": 3, "bands": 3}]
    found = [{"transport": transport, **some} for transport in ("copy_engine", "sm_push") for some in chunks]
    if pattern == OUTPUT:
        found += [{"transport": "copy_engine", "reads": True, **some} for some in chunks]
    return found + [{"transport": "copy_engine", "turns_from": 0, **some} for some in chunks[:2] + chunks[-2:]]


def site(
    pattern: str, tokens: int, some: dict[str, Any], rank: int, world_size: int
) -> tuple[Callable[[], list[torch.Tensor]], list[torch.Tensor]]:
    """``(function that calls the op, the right results in fp32)``."""
    group, name = dist.group.WORLD, f"{pattern} {tokens} {some}"
    chosen = json.dumps(some, sort_keys=True)
    generator = torch.Generator("cuda").manual_seed(rank)
    if pattern == CONTRACTED:
        return _contracted(name, chosen, tokens, generator, world_size)
    gathers, rows = pattern in chunked_plan.GATHERS, tokens // world_size
    inner, columns = (HIDDEN, WIDE) if gathers else (WIDE, HIDDEN)
    own_rows = rows if pattern == "all_gather_matmul" else tokens
    a = torch.randn(own_rows, inner, device="cuda", generator=generator).bfloat16()
    b = torch.randn(columns, inner, device="cuda", generator=generator).bfloat16().t() / 32
    bias = torch.randn(columns, device="cuda", generator=generator).bfloat16()
    parameters = chunked_plan.parameters_of(chosen, symmetric.multiprocessors(a.device))
    need = chunked_plan.needed(pattern, world_size, rows, inner, columns, 2, parameters)
    reason = workspace.prepare(group, a.device, json.dumps([[name, *need]]), 2**33)
    assert reason is None, reason
    last = (chosen, group.group_name, name)
    chain = torch.zeros(1, dtype=torch.uint8, device="cuda")
    if gathers:
        second = b[:, : columns // 2].contiguous()
        everyone = torch.empty(tokens, inner, device="cuda", dtype=a.dtype)
        collective = dist.all_to_all_single if pattern == "all_to_all_matmul" else dist.all_gather_into_tensor
        collective(everyone, a)
        expected = [everyone.float() @ b.float() + bias.float(), everyone.float() @ second.float(), everyone.float()]
        op = getattr(ops, f"chunked_{pattern}")
        return lambda: op(chain, a, [b, second], [bias, None], True, *last)[0], expected
    product = a.float() @ b.float() + bias.float()
    if pattern == "matmul_all_to_all":
        columns_too = product.view(tokens, world_size, -1).transpose(0, 1).contiguous().view(tokens * world_size, -1)
        received = [torch.empty_like(product), torch.empty_like(columns_too)]
        for found, sent in zip(received, (product, columns_too), strict=True):
            dist.all_to_all_single(found, sent)
        op = ops.chunked_matmul_all_to_all
        return lambda: [op(chain, a, b, bias, by_columns, *last)[0] for by_columns in (False, True)], received
    if pattern == OUTPUT:
        everyone = torch.empty(world_size * tokens, columns, device="cuda")
        dist.all_gather_into_tensor(everyone, product)
        op = ops.chunked_matmul_all_gather
        beside = torch.cat(everyone.chunk(world_size), dim=1)
        return lambda: [op(chain, a, b, bias, wide, *last)[0] for wide in (False, True)], [everyone, beside]
    dist.all_reduce(product)
    op = getattr(ops, f"chunked_{pattern}")
    average = product / world_size
    return lambda: [op(chain, a, b, bias, chosen, "avg", *last[1:])[0]], [
        average if pattern == "matmul_all_reduce" else average[rank * rows : (rank + 1) * rows]
    ]


def _contracted(
    name: str, chosen: str, tokens: int, generator: torch.Generator, world_size: int
) -> tuple[Callable[[], list[torch.Tensor]], list[torch.Tensor]]:
    """``site`` for an all-to-all before matmuls that contract the exchanged dim."""
    group, rows, width = dist.group.WORLD, tokens // world_size, HIDDEN // world_size
    a = torch.randn(tokens, width, device="cuda", generator=generator).bfloat16()
    b = torch.randn(WIDE, HIDDEN, device="cuda", generator=generator).bfloat16().t() / 32
    bias = torch.randn(WIDE, device="cuda", generator=generator).bfloat16()
    parameters = chunked_plan.parameters_of(chosen, symmetric.multiprocessors(a.device))
    need = chunked_plan.needed("all_to_all_matmul", world_size, rows, width, WIDE, 2, parameters)
    reason = workspace.prepare(group, a.device, json.dumps([[name, *need]]), 2**33)
    assert reason is None, reason
    received = torch.empty_like(a)
    dist.all_to_all_single(received, a)
    operand = torch.cat(received.chunk(world_size), dim=1)
    expected = [operand.float() @ b.float() + bias.float(), operand.float()]
    chain = torch.zeros(1, dtype=torch.uint8, device="cuda")
    op = ops.chunked_contracted_all_to_all_matmul
    return lambda: op(chain, a, [b], [bias], True, chosen, group.group_name, name)[0], expected


def check(
    call: Callable[[], list[torch.Tensor]], expected: list[torch.Tensor], calls: int, chance: random.Random
) -> dict[str, float]:
    first = call()
    error = max(float((f.float() - e).abs().max() / e.abs().max()) for f, e in zip(first, expected, strict=True))
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call() for _ in range(2)]
    for i in range(calls):
        if chance.random() < 0.2:
            torch.cuda._sleep(chance.randrange(200_000))
        if i % 3:
            for output in captured:
                for tensor in output:
                    tensor.fill_(float("nan"))
            graph.replay()
            found = captured
        else:
            found = [call()]
        for output in found:
            for f, g in zip(output, first, strict=True):
                wrong[int(i % 3 == 0)] += (f != g).any()
    torch.cuda.synchronize()
    return {"error": round(error, 5), "wrong_replays": int(wrong[0]), "wrong_calls": int(wrong[1])}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--patterns", nargs="+", default=PATTERNS, choices=PATTERNS)
    arguments = parser.parse_args()
    # The patience is short: a wait must time out and be reported before whoever started this program ends it.
    rank, world_size = start_rank(PATIENCE_SECONDS)
    chance, failed = random.Random(rank), 0
    for pattern in arguments.patterns:
        # The largest of ``--tokens`` comes first, so that the smaller ones fit into its part of the workspace.
        for tokens in [*sorted(arguments.tokens, reverse=True), 333 * world_size]:
            for some in settings(pattern, world_size):
                call, expected = site(pattern, tokens, some, rank, world_size)
                found = check(call, expected, arguments.calls, chance)
                bad = found["error"] > 2e-2 or found["wrong_calls"] or found["wrong_replays"]
                failed += bool(bad)
                found["host_us"] = host_us(call)
                if rank == 0 or bad:
                    print(
                        json.dumps(
                            {
                                "pattern": pattern,
                                "tokens": tokens,
                                **some,
                                "rank": rank,
                                "world_size": world_size,
                                "ok": not bad,
                                **found,
                            }
                        ),
                        flush=True,
                    )
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
