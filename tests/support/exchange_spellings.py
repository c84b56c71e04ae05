# SPDX-License-Identifier: Apache-2.0
"""Spellings K and L of ``tests.support.spellings``: all-to-alls before and after matmuls.

``SPELLINGS`` has the form of ``spellings.SPELLINGS``: ``{name: (function, makers of its inputs, (pattern, sharded dim,
texts))}``. A text such as ``mm N`` names a matmul of the site, and the role (B, M, N or K) of the dim that is cut.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlap_inductor.torch_compat.functional_collectives import all_to_all
from tests.support.spellings import Function
from tests.support.spellings import Make
from tests.support.spellings import bias
from tests.support.spellings import second_weight
from tests.support.spellings import weight
from tests.support.spellings import world
from tests.support.spellings import x2
from tests.support.ulysses import to_heads
from tests.support.ulysses import to_tokens

SENT, RECEIVED = "matmul_all_to_all", "all_to_all_matmul"


def exchange(x: torch.Tensor) -> torch.Tensor:
    return all_to_all(x, world())


def change_shards(x: torch.Tensor, gathered: int, scattered: int) -> torch.Tensor:
    """DTensor's change from ``Shard(gathered)`` to ``Shard(scattered)``."""
    return torch.ops._dtensor.shard_dim_alltoall(x, gathered, scattered, world().group_name)


def experts(ranks: int = 2) -> torch.Tensor:
    return torch.randn(2 * ranks, 16, 5)


def tokens_of_experts(ranks: int = 2) -> torch.Tensor:
    return torch.randn(2 * ranks, 3, 16)


def sequence(batch: int) -> Make:
    return lambda ranks=2: torch.randn(batch, 3, 16)


def heads(batch: int) -> Make:
    return lambda ranks=2: torch.randn(batch, 3 * ranks, 2, 8)


def head_weight(ranks: int = 2) -> torch.Tensor:
    return torch.randn(16, 16 * ranks)


def head_bias(ranks: int = 2) -> torch.Tensor:
    return torch.randn(16 * ranks)


def out_weight(ranks: int = 2) -> torch.Tensor:
    return torch.randn(16 * ranks, 8)


def to_own_heads(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return to_heads(torch.nn.functional.linear(x, w.t(), b).unflatten(-1, (-1, 8)), dist.group.WORLD)


def from_own_heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return to_tokens(x, dist.group.WORLD).flatten(2, 3) @ w


def activated(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return exchange(torch.nn.functional.silu(x @ w) * 2 + 1) @ v


def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    arrived = exchange(x)
    return (arrived * torch.rsqrt(arrived.pow(2).mean(-1, keepdim=True) + 1e-6)) @ w


WITHOUT_LOOPING_OP = {"L after experts", "L before experts", "L between matmuls", "L before a norm and a matmul"}
"""Spellings that no looping op computes: batched matmuls, or an activation or norm between matmul and exchange."""
SPELLINGS: dict[str, tuple[Function, tuple[Make, ...], tuple[str, int | None, list[str]]]] = {
    "K": (lambda x, w: change_shards(x @ w, 0, 1), (x2, weight), (SENT, 1, ["mm N"])),
    "K before a matmul": (
        lambda x, w: change_shards(x, 0, 1) @ w,
        (weight, lambda ranks=2: torch.randn(4, 8)),
        (RECEIVED, 0, ["mm M"]),
    ),
    "L after a matmul": (lambda x, w: exchange(x @ w), (x2, weight), (SENT, 0, ["mm M"])),
    "L after addmm": (lambda x, w, b: exchange(torch.addmm(b, x, w)), (x2, weight, bias), (SENT, 0, ["addmm M"])),
    "L after experts": (
        lambda x, w: exchange(torch.bmm(x, w)),
        (tokens_of_experts, experts),
        (SENT, 0, ["bmm B"]),
    ),
    "L before a matmul": (lambda x, w: exchange(x) @ w, (x2, weight), (RECEIVED, 0, ["mm M"])),
    "L before a matmul and an activation": (
        lambda x, w, v, b: torch.nn.functional.silu(torch.addmm(b, exchange(x), w) * 2) @ v,
        (x2, weight, second_weight, bias),
        (RECEIVED, 0, ["addmm M"]),
    ),
    "L before a norm and a matmul": (normed, (x2, weight), (RECEIVED, 0, ["mm M"])),
    "L before experts": (
        lambda x, w: torch.bmm(exchange(x), w),
        (tokens_of_experts, experts),
        (RECEIVED, 0, ["bmm B"]),
    ),
    "L between matmuls": (activated, (x2, weight, second_weight), (SENT, 0, ["mm M"])),
    "L to heads": (to_own_heads, (sequence(2), head_weight, head_bias), (SENT, 1, ["addmm N"])),
    "L to heads, batch 1": (to_own_heads, (sequence(1), head_weight, head_bias), (SENT, 1, ["addmm N"])),
    "L from heads": (from_own_heads, (heads(2), out_weight), (RECEIVED, 0, ["mm K"])),
    "L from heads, batch 1": (from_own_heads, (heads(1), out_weight), (RECEIVED, 0, ["mm K"])),
}
