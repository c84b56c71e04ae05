# SPDX-License-Identifier: Apache-2.0
"""The ops of schedule ``small_message`` on several processes, with a planned workspace, in Triton's interpreter. If the
kernels cannot run, the ops must compute their results without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.lowerings.small_message import ops as small_ops  # noqa: F401  (defines the ops)
from overlap_inductor.lowerings.small_message import parameters as small_plan
from overlap_inductor.runtime.workspace import prepare
from overlap_inductor.runtime.workspace import workspace_of
from tests.support.gloo_ranks import run_ranks
from tests.support.shared_memory import use_shared_memory

ops = torch.ops.overlap_inductor
INNER, COLUMNS, EPS = 24, 40, 1e-3
SETTINGS = {
    name: json.dumps({"two_shot": two_shot, "segment": 32, "warps": 4})
    for name, two_shot in (("one", False), ("two", True))
}


def _call(name: str, site: str, rows: int, seed: int, bias: bool, norm: bool, average: bool = False) -> list[str]:
    """Call one op and its fake function. Returns the problems: a wrong value, or a fake result with another shape or
    dtype."""
    group, rank = dist.group.WORLD, dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    lhs, rhs, bias_row, residual, weight = (
        torch.randn(*s, generator=generator).half()
        for s in (
            (group.size(), rows, INNER),
            (group.size(), COLUMNS, INNER),
            (COLUMNS,),
            (rows, COLUMNS),
            (COLUMNS + 1,),
        )
    )
    weight = weight[1:]  # not aligned to 16 bytes
    exact = sum(a.double() @ b.double().t() + bias * bias_row.double() for a, b in zip(lhs, rhs)) / (
        group.size() if average else 1
    )
    matmul = torch.zeros(1, dtype=torch.uint8), lhs[rank], rhs[rank].t(), bias_row if bias else None
    if norm:
        op, arguments = (
            ops.small_message_matmul_all_reduce_norm,
            (*matmul, residual, weight, EPS, SETTINGS[name], group.group_name, site),
        )
        added = exact + residual.double()
        wanted = [added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + EPS) * weight.double(), added]
    else:
        op, arguments = (
            ops.small_message_matmul_all_reduce,
            (*matmul, SETTINGS[name], "avg" if average else "sum", group.group_name, site),
        )
        wanted = [exact]
    found = op(*arguments)
    told = op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    problems = [
        f"{site}: {x.shape}, {x.dtype}; the fake function returns {y.shape}, {y.dtype}"
        for x, y in zip(found, told, strict=True)
        if (x.shape, x.dtype) != (y.shape, y.dtype)
    ]
    return problems + [
        f"{site} {name} call {seed}: off by {(f.double() - w).abs().max():.3g}"
        for f, w in zip(found, wanted)
        if not torch.allclose(f.double(), w, rtol=2e-2, atol=8e-2)
    ]


def _check(rank: int, world_size: int, folder: str) -> list[str]:
    use_shared_memory(folder)
    group, device = dist.group.WORLD, torch.device("cpu")
    requests: list[list[Any]] = []
    for name in SETTINGS:
        requests += [
            [f"{name} {i}", *small_plan.needed_up_to(SETTINGS[name], world_size, 6, COLUMNS, 2)] for i in range(2)
        ]
    prepare(group, device, json.dumps([["a fused site", 5000, 3], *requests]), 2**30)
    prepare(group, device, json.dumps([["no room", 2**40, 1, small_plan.HALVES]]), 2**30)
    problems = []
    for seed, rows in enumerate((6, 1, 4, 6)):
        for name in SETTINGS:
            problems += _call(name, f"{name} 0", rows, seed, bias=True, norm=True)
            problems += _call(name, f"{name} 1", rows, seed, bias=False, norm=seed % 2 == 0)
            problems += _call(name, f"{name} 1", rows, seed, bias=True, norm=False, average=True)
    slots = workspace_of(group, device).arena.slots
    # A slot is a part of the workspace. The small-message sites share two slots: sites ``... 0`` use one, and sites
    # ``... 1`` use the other. So each slot served one-shot and two-shot sites. The fused site has a slot of its own,
    # because credits keep its calls apart. Small-message calls use two halves of their slot in turn. No call used the
    # fused site's slot.
    counts = {s.protocol: sorted(int(t.calls) for t in slots if t.protocol == s.protocol) for s in slots}
    if counts != {"credits": [0], "halves": [8, 16]}:
        problems.append(f"calls of the slots: {counts}")
    # This call has more rows than planned. The next two calls are of a site that got no workspace.
    problems += _call("one", "one 0", 60, 9, bias=False, norm=True)
    problems += _call("one", "no room", 3, 7, bias=True, norm=True)
    problems += _call("one", "no room", 3, 7, bias=True, norm=False)
    empty = ops.small_message_matmul_all_reduce_norm(
        torch.zeros(1), torch.zeros(0, INNER).half(), torch.zeros(INNER, COLUMNS).half(), None,
        torch.zeros(0, COLUMNS).half(), torch.ones(COLUMNS).half(), EPS,
        SETTINGS["one"], group.group_name, "one 0",
    )  # fmt: skip
    return problems + [f"no rows: {t.shape}" for t in empty[:2] if t.shape != (0, COLUMNS)]


def test_ops_agree_with_fp64(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check, str(tmp_path), timeout=300)):
        assert not problems, f"rank {rank}: {problems}"
