# SPDX-License-Identifier: Apache-2.0
"""Small functions with one site each. The ranks' functions or inputs differ: in the sizes of shards, in K, or by a bias
of one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter


def _padded(x: torch.Tensor, dim: int, size: int, value: float = 0.0) -> torch.Tensor:
    """Pad ``dim`` of ``x`` to ``size``. As in DTensor, a full shard is returned unchanged."""
    return x if x.shape[dim] == size else F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, size - x.shape[dim]], value=value)


def cases(rank: int, world_size: int) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    """``name: (function, input shapes, number of sites that must be overlapped)`` for ``rank``. ``total`` rows or
    columns are cut into shards of ``chunk``. The rank's own shard has ``mine``."""
    g, w = dist.group.WORLD, world_size
    chunk, total = 5, 5 * w - 2
    mine = total - chunk * (w - 1) if rank == w - 1 else chunk
    tokens = 2 * (w + 1)

    def gathered(x: torch.Tensor, dim: int, value: float = 0.0) -> torch.Tensor:
        return all_gather(_padded(x, dim, chunk, value), dim, g).narrow(dim, 0, total)

    def joined(y: torch.Tensor, dim: int) -> torch.Tensor:
        return gathered(y, dim)

    def scattered(y: torch.Tensor, dim: int, op: str = "sum") -> torch.Tensor:
        # The rank drops the padding of its own shard.
        pieces = [_padded(p, dim, chunk) for p in y.split(chunk, dim)]
        return reduce_scatter(torch.cat(pieces, dim), op, dim, g).narrow(dim, 0, mine)

    def biased(x: torch.Tensor, a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.addmm(c, x, a) if rank == 0 else x @ a

    return {
        "head": (lambda x, a: joined(x @ a, 1), [(tokens, 8), (8, mine)], 1),
        "head of a batch, with bias and activation": (
            lambda x, a, c: joined(F.gelu(F.linear(x, a, c)), 2) + 1,
            [(2, 3, 8), (mine, 8), (mine,)],
            1,
        ),
        "head of uneven rows": (lambda x, a: joined(x @ a, 0), [(mine, 8), (8, 6)], 1),
        "head of uneven rows of a batch": (lambda x, a: joined(x @ a, 1), [(2, mine, 8), (8, 6)], 1),
        "uneven K, a bias on one rank": (
            lambda x, a, c: funcol.all_reduce(biased(x, a, c), "sum", g),
            [(tokens + 1, mine), (mine, 6), (6,)],
            1,
        ),
        "uneven K, a bias of rows on one rank": (
            lambda x, a, c: funcol.all_reduce(biased(x, a, c), "sum", g),
            [(tokens, mine), (mine, 6), (tokens, 6)],
            1,
        ),
        "uneven K, a bias added on one rank": (
            lambda x, a, c: funcol.all_reduce(
                ((x @ a).view(2, -1, 6) + c if rank == 0 else (x @ a).view(2, -1, 6)), "sum", g
            ),
            [(tokens, mine), (mine, 6), (6,)],
            1,
        ),
        "uneven K, scattered": (
            lambda x, a, c: reduce_scatter(biased(x, a, c), "avg", 0, g),
            [(4 * w, mine), (mine, 6), (6,)],
            1,
        ),
        "uneven K into a column-wise gradient": (
            lambda x, y, a, b: funcol.all_reduce(x @ a + y @ b, "sum", g),
            [(tokens, mine), (tokens, mine), (mine, 6), (mine, 6)],
            1,
        ),
        "gather uneven rows, multiply and contract": (
            lambda x, y, a: (lambda z: (z @ a, z.t() @ y, y.t() @ z))(gathered(x, 0)),
            [(mine, 8), (total, 6), (8, 4 + rank)],
            1,
        ),
        "gather an uneven sequence, multiply and contract": (
            lambda x, y, a: (lambda z: (z @ a, z.t() @ y))(gathered(x, 1).reshape(-1, 8)),
            [(2, mine, 8), (2 * total, 6), (8, 4)],
            1,
        ),
        "gather uneven rows, padded with NaN": (
            lambda x, y, a: (lambda z: (z @ a, z.t() @ y))(gathered(x, 0, float("nan"))),
            [(mine, 8), (total, 6), (8, 4)],
            1,
        ),
        "gather uneven rows, a bias for each row": (
            lambda x, a, c: torch.addmm(c, gathered(x, 0), a),
            [(mine, 8), (8, 4), (total, 4)],
            1,
        ),
        "gather uneven columns and contract": (lambda x, a: gathered(x, 1) @ a, [(6, mine), (total, 4)], 1),
        "gather uneven columns of the right": (lambda x, a: a @ gathered(x * 3, 0).t(), [(mine, 8), (6, 8)], 1),
        "bmm of uneven batches": (lambda x, a: torch.bmm(gathered(x, 0), a), [(mine, 3, 8), (total, 8, 4)], 1),
        "bmm of uneven batches, padded with NaN": (
            lambda x, a, c: torch.baddbmm(c, gathered(x, 0, float("nan")), a),
            [(mine, 3, 8), (total, 8, 4), (total, 3, 4)],
            1,
        ),
        "scatter uneven batches": (
            lambda x, a: scattered(torch.bmm(x, a), 0),
            [(total, 3, 8), (total, 8, 4)],
            1,
        ),
        "bmm of uneven rows": (lambda x, a: torch.bmm(gathered(x, 1), a), [(3, mine, 8), (3, 8, 4)], 1),
        "bmm of an uneven contraction": (lambda x, a: torch.bmm(gathered(x, 2), a), [(3, 6, mine), (3, total, 4)], 1),
        "activation of uneven rows": (lambda x, a: F.silu(gathered(x, 1) + 1) @ a, [(2, mine, 8), (8, 4)], 1),
        "scatter a sum of matmuls to uneven rows": (
            lambda x, a, b: scattered(x @ a + (x * 2) @ b, 0),
            [(total, 8), (8, 6), (8, 6)],
            1,
        ),
        "scatter a sum of matmuls to an uneven sequence": (
            lambda x, a, b: scattered((x @ a + (x * 2) @ b).to(torch.float64), 1, "avg"),
            [(2, total, 8), (8, 6), (8, 6)],
            1,
        ),
    }
