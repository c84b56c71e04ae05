# SPDX-License-Identifier: Apache-2.0
"""Calls the ops of schedule ``chunked`` as a rewritten graph does, on several processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import overlap_inductor.lowerings.chunked.ops
import overlap_inductor.lowerings.chunked.scaled_ops
import overlap_inductor.lowerings.chunked.sum_ops  # noqa: F401  (these define the ops)
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.runtime import workspace
from tests.support.gloo_ranks import run_ranks
from tests.support.shared_memory import use_shared_memory

ops = torch.ops.overlap_inductor
ROWS, K, N = 24, 16, 24


def _check(rank: int, world_size: int, folder: str) -> list[str]:
    """Call the ops with a workspace, with no rows, and without a workspace. Returns the problems on this rank."""
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
    calls |= {
        f"no rows, {pattern}": (pattern, 0, "{}", "no room") for pattern in ("all_gather_matmul", "matmul_all_reduce")
    }
    calls |= {
        f"no room, {pattern}": (pattern, ROWS, "{}", "no room")
        for pattern in ("all_gather_matmul", "matmul_reduce_scatter")
    }
    for name, (pattern, rows, settings, site) in calls.items():
        generator = torch.Generator().manual_seed(rank)
        gathers = pattern == "all_gather_matmul"
        # The shard's address is not aligned to 16 bytes. The weight is a parameter, as in a module.
        a = torch.randn((rows if gathers else rows * world_size) * K + 4, generator=generator).half()[4:].view(-1, K)
        b, bias = (
            torch.nn.Parameter(torch.randn(N, K, generator=generator).half()),
            torch.randn(1, generator=generator).half(),
        )
        chain, last = torch.zeros(1), (group.group_name, site)
        with torch.no_grad():
            product = (a.double() @ b.double().t()) + bias.double()
            if gathers:
                results, token = ops.chunked_all_gather_matmul(
                    chain, a, [b.t(), b.t() * 2], [bias, None], True, settings, *last
                )
                everyone = a.new_empty(world_size * rows, K)
                dist.all_gather_into_tensor(everyone, a.contiguous())
                plain = everyone.double() @ b.double().t()
                expected = [plain + bias.double(), 2 * plain, everyone.double()]
            else:
                result, token = getattr(ops, f"chunked_{pattern}")(chain, a, b.t(), bias, settings, "avg", *last)
                dist.all_reduce(product)
                own = slice(rank * rows, (rank + 1) * rows) if pattern == "matmul_reduce_scatter" else slice(None)
                results, expected = [result], [product[own] / world_size]
                summed, _ = getattr(ops, f"chunked_sum_{pattern}")(
                    chain, [a, a * 2], [b.t(), b.t()], bias, settings, "avg", *last
                )
                plain = a.double() @ b.double().t() * 3 + bias.double()
                dist.all_reduce(plain)
                results, expected = [*results, summed], [*expected, plain[own] / world_size]
        for found, exact in zip(results, expected, strict=True):
            if (
                token.shape != chain.shape
                or found.shape != exact.shape
                or not torch.allclose(found.double(), exact, rtol=2e-2, atol=5e-2)
            ):
                problems.append(
                    f"{name}: a wrong value, shape or token; the result has shape {tuple(found.shape)}, expected"
                    f" {tuple(exact.shape)}"
                )
    return problems


def _check_exchanges(rank: int, world_size: int, folder: str) -> list[str]:
    """Call the ops of all-to-alls with a workspace, without one, and with no rows. Returns the problems on this rank.
    The operands are small integers, so results must be equal bit for bit."""
    use_shared_memory(folder)
    group, problems = dist.group.WORLD, []
    settings = json.dumps({"transport": "copy_engine", "chunks": 3, "grain": 8})
    need = chunked_plan.needed(
        "matmul_all_to_all", world_size, ROWS, K, 8 * world_size, 2, chunked_plan.parameters_of(settings, 1)
    )
    workspace.prepare(group, torch.device("cpu"), json.dumps([["room", *need[:1], 4]]), 2**30)
    workspace.prepare(group, torch.device("cpu"), json.dumps([["no room", 2**40, 1]]), 2**30)
    for site, rows in (("room", ROWS), ("no room", ROWS), ("room", 0)):
        generator = torch.Generator().manual_seed(rank)
        a = torch.randint(-2, 3, (rows * world_size, K), generator=generator).half()
        b = torch.randint(-2, 3, (8 * world_size, K), generator=generator).half()
        bias, last = b[:, 0].contiguous(), (settings, group.group_name, site)
        product = a @ b.t() + bias
        columns = torch.cat(product.chunk(world_size, dim=1))
        expected = [torch.empty_like(x) for x in (product, columns, a)]
        for x, sent in zip(expected, (product, columns, a), strict=True):
            dist.all_to_all_single(x, sent)
        received = expected[2]
        sent = [
            ops.chunked_matmul_all_to_all(torch.zeros(1), a, b.t(), bias, by_columns, *last)[0]
            for by_columns in (False, True)
        ]
        found, _ = ops.chunked_all_to_all_matmul(torch.zeros(1), a, [b.t(), b.t()], [bias, None], True, *last)
        right = [*expected[:2], received @ b.t() + bias, received @ b.t(), received]
        tall, short = torch.cat([b.t(), b.t() + 1]), bias[:8]
        joined, _ = ops.chunked_contracted_all_to_all_matmul(
            torch.zeros(1), a, [tall, tall[:, :8]], [None, short], True, *last
        )
        operand = torch.cat(received.chunk(world_size), dim=1)
        right += [operand @ tall, operand @ tall[:, :8] + short, operand]
        for number, (x, y) in enumerate(zip([*sent, *found, *joined], right, strict=True)):
            if not torch.equal(x, y):
                problems.append(f"{site}, {rows} rows, result {number}: {tuple(x.shape)} differs")
    return problems


def test_ops_of_exchanges_are_exact_with_workspace_and_without(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check_exchanges, str(tmp_path), timeout=200)):
        assert not problems, f"rank {rank}: {problems}"


def _check_outputs(rank: int, world_size: int, folder: str) -> list[str]:
    """Call the op of a gathered output in both layouts: in slots of both protocols, without a slot, with too few rows,
    and with none. Returns the problems on this rank. Results must be equal bit for bit."""
    use_shared_memory(folder)
    group, problems = dist.group.WORLD, []
    calls = [("no room", ROWS, {}), ("read", 0, {"reads": True}), ("read", ROWS, {"reads": True, "min_rows": 100})]
    for name, own in (("read", {"reads": True}), ("sent", {}), ("pushed", {"transport": "sm_push"})):
        settings = {"transport": "copy_engine", "grain": 8, "bands": 2, **own}
        parameters = chunked_plan.parameters_of(json.dumps(settings), 1)
        need = chunked_plan.needed("matmul_all_gather", world_size, -(-ROWS // world_size), K, N, 2, parameters)
        workspace.prepare(group, torch.device("cpu"), json.dumps([[name, *need]]), 2**30)
        calls += [(name, ROWS, settings), (name, 17, settings)]
    workspace.prepare(group, torch.device("cpu"), json.dumps([["no room", 2**40, 1]]), 2**30)
    for site, rows, settings in calls:
        generator = torch.Generator().manual_seed(rank)
        a = torch.randint(-2, 3, (rows, K), generator=generator).half()
        b = torch.randint(-2, 3, (N, K), generator=generator).half()
        bias, last = b[:, 0].contiguous(), (json.dumps(settings), group.group_name, site)
        everyone = a.new_empty(world_size * rows, N)
        dist.all_gather_into_tensor(everyone, a @ b.t() + bias)
        for side_by_side in (False, True):
            found, _ = ops.chunked_matmul_all_gather(torch.zeros(1), a, b.t(), bias, side_by_side, *last)
            if not torch.equal(found, torch.cat(everyone.chunk(world_size), dim=1) if side_by_side else everyone):
                problems.append(f"{site}, {rows} rows, side by side {side_by_side}: {tuple(found.shape)} differs")
    return problems


def test_the_op_of_a_gathered_output_is_exact(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check_outputs, str(tmp_path), timeout=200)):
        assert not problems, f"rank {rank}: {problems}"


FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


def _check_scaled(rank: int, world_size: int, folder: str) -> list[str]:
    """Call the scaled ops with tensor-wise and row-wise scales, with a workspace and without one. Returns the problems
    on this rank."""
    use_shared_memory(folder)
    group, problems = dist.group.WORLD, []
    rows, inner, columns = 24, 32, 16
    all_rows = rows * world_size
    for transport, row_wise in (("copy_engine", True), ("sm_push", False), ("sm_push", True)):
        settings = json.dumps({"transport": transport, "chunks": 3, "grain": 8})
        generator = torch.Generator().manual_seed(rank)

        def scales(
            shape: tuple[int, ...], generator: torch.Generator = generator, row_wise: bool = row_wise
        ) -> torch.Tensor:
            return torch.rand(shape if row_wise else (), generator=generator) + 0.5

        for pattern in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            gathers = pattern == "all_gather_matmul"
            a = torch.randn(rows if gathers else all_rows, inner, generator=generator).to(FP8)
            b = torch.randn(columns, inner, generator=generator).to(FP8).t()
            bias = torch.randn(columns, generator=generator).to(BF16)
            # A row-wise ``scale_a`` is a transposed row, so it has other strides than a contiguous column.
            scale_a, scale_b = scales((1, all_rows)).t(), scales((1, columns))
            name = f"{pattern} {transport} {row_wise}"
            need = chunked_plan.needed(
                pattern, world_size, rows, inner, columns, 1 if gathers else 2, chunked_plan.parameters_of(settings, 1)
            )
            workspace.prepare(group, a.device, json.dumps([[name, *need]]), 2**30)
            workspace.prepare(group, a.device, json.dumps([[name + " without", 2**40, 1]]), 2**30)
            left = a.float()
            if gathers:
                left = a.new_empty(all_rows, inner, dtype=torch.float32)
                dist.all_gather_into_tensor(left, a.float())
            exact = left.double() @ b.double() * scale_a.double() * scale_b.double() + bias.double()
            if not gathers:
                dist.all_reduce(exact)
            exact = exact[rank * rows : (rank + 1) * rows] if pattern == "matmul_reduce_scatter" else exact
            for site in (name, name + " without"):
                last = (settings, group.group_name, site) if gathers else (settings, "sum", group.group_name, site)
                op = getattr(ops, f"chunked_scaled_{pattern}")
                if gathers:
                    (found, everyone), _ = op(
                        torch.zeros(1), a, [b], [bias], [scale_a], [scale_b], ["bfloat16"], [False], True, *last
                    )
                    if not torch.equal(everyone.float(), left):
                        problems.append(f"{site}: the gathered tensor is wrong")
                else:
                    found, _ = op(torch.zeros(1), a, b, bias, scale_a, scale_b, "bfloat16", False, *last)
                if (
                    found.dtype != BF16
                    or found.shape != exact.shape
                    or not torch.allclose(found.double(), exact, rtol=3e-2, atol=0.2)
                ):
                    problems.append(f"{site}: off by {(found.double() - exact).abs().max():.3g}")
    return problems


def test_scaled_ops_agree_with_fp64_with_workspace_and_without(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check_scaled, str(tmp_path), timeout=200)):
        assert not problems, f"rank {rank}: {problems}"


def test_ops_agree_with_fp64_with_workspace_and_without(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(3, _check, str(tmp_path), timeout=200)):
        assert not problems, f"rank {rank}: {problems}"
