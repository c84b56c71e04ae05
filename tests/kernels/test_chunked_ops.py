"""The ops of schedule ``chunked`` as a rewritten graph calls them: between processes, with the group's own workspace, and what they do where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor.lowerings.chunked_ops  # noqa: F401  (defines the ops)
from overlap_inductor.lowerings import chunked_plan
from overlap_inductor.transports import workspace
from tests.kernels.shared_memory import use_shared_memory
from tests.numerics.ranks import run_ranks

ops = torch.ops.overlap_inductor
ROWS, K, N = 24, 16, 24


def _check(rank: int, world_size: int, folder: str) -> list[str]:
    """Problems found on this rank."""
    use_shared_memory(folder)
    group, cpu, problems = dist.group.WORLD, torch.device("cpu"), []
    calls: dict[str, Any] = {}
    for transport in ("copy_engine", "sm_push"):
        for pattern in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            settings = json.dumps({"transport": transport, "chunks": 3, "grain": 8, "bands": 2})
            need = chunked_plan.needed(pattern, world_size, ROWS, K, N, 2, chunked_plan.parameters_of(settings, 1))
            name = f"{pattern} {transport}"
            workspace.prepare(group, cpu, json.dumps([[name, *need]]), 2**30)
            calls[name] = pattern, ROWS, settings, name
    workspace.prepare(group, cpu, json.dumps([["no room", 2**40, 1]]), 2**30)
    calls |= {f"no rows, {pattern}": (pattern, 0, "{}", "no room") for pattern in ("all_gather_matmul", "matmul_all_reduce")}
    calls |= {f"no room, {pattern}": (pattern, ROWS, "{}", "no room") for pattern in ("all_gather_matmul", "matmul_reduce_scatter")}
    for name, (pattern, rows, settings, site) in calls.items():
        generator = torch.Generator().manual_seed(rank)
        gathers = pattern == "all_gather_matmul"
        # A shard that begins in the middle of 16 bytes, and weights as a module holds them.
        a = torch.randn((rows if gathers else rows * world_size) * K + 4, generator=generator).half()[4:].view(-1, K)
        b, bias = torch.nn.Parameter(torch.randn(N, K, generator=generator).half()), torch.randn(1, generator=generator).half()
        chain, last = torch.zeros(1), (group.group_name, site)
        with torch.no_grad():
            product = (a.double() @ b.double().t()) + bias.double()
            if gathers:
                results, token = ops.chunked_all_gather_matmul(chain, a, [b.t(), b.t() * 2], [bias, None], True, settings, *last)
                everyone = a.new_empty(world_size * rows, K)
                dist.all_gather_into_tensor(everyone, a.contiguous())
                plain = everyone.double() @ b.double().t()
                expected = [plain + bias.double(), 2 * plain, everyone.double()]
            else:
                result, token = getattr(ops, f"chunked_{pattern}")(chain, a, b.t(), bias, settings, "avg", *last)
                dist.all_reduce(product)
                own = slice(rank * rows, (rank + 1) * rows) if pattern == "matmul_reduce_scatter" else slice(None)
                results, expected = [result], [product[own] / world_size]
        for found, exact in zip(results, expected, strict=True):
            if token.shape != chain.shape or found.shape != exact.shape or not torch.allclose(found.double(), exact, rtol=2e-2, atol=5e-2):
                problems.append(f"{name}: {tuple(found.shape)} is not {tuple(exact.shape)}, or off")
    return problems


def test_ops_agree_with_fp64_with_workspace_and_without(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(3, _check, str(tmp_path), timeout=200)):
        assert not problems, f"rank {rank}: {problems}"
