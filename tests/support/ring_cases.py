# SPDX-License-Identifier: Apache-2.0
"""Small functions with one or two sites each, for groups of any size. A site is a gather before or after matmuls, or a
reduce-scatter or all-reduce after matmuls. The cases cut different dims of a matmul."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter


def evened(x: torch.Tensor, dim: int, world_size: int) -> torch.Tensor:
    """Split ``dim`` of ``x`` into ``world_size`` chunks and pad each short chunk with zeros, as DTensor does. Returns
    the equal chunks, joined."""
    chunk = -(-x.shape[dim] // world_size)
    if x.shape[dim] == world_size * chunk:
        return x
    pieces = list(x.split(chunk, dim))
    pieces += [x.narrow(dim, 0, 0)] * (world_size - len(pieces))
    behind = [0, 0] * (x.dim() - 1 - dim)
    return torch.cat(
        [torch.nn.functional.pad(p, [*behind, 0, chunk - p.shape[dim]]) if p.shape[dim] < chunk else p for p in pieces],
        dim,
    )


def cases(world_size: int, size: int) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    """``name: (function, input shapes, number of sites that must be overlapped)``. Most shards have
    ``size`` rows or columns."""
    g = dist.group.WORLD
    w, s = world_size, size
    return {
        "gather rows": (lambda x, a: torch.relu(all_gather(x, 0, g) @ a), [(s, 16), (16, 12)], 1),
        "gather rows, two matmuls, one with bias, gathered tensor read": (
            lambda x, a, b, c: (lambda y: (y @ a, torch.addmm(c, y, b), y + 1))(all_gather(x, 0, g)),
            [(s, 16), (16, 12), (16, 6), (6,)],
            1,
        ),
        "gather sequence, batch 1": (lambda x, a: all_gather(x, 1, g) @ a, [(1, s, 16), (16, 12)], 1),
        "gather sequence, batch 2": (lambda x, a: all_gather(x, 1, g) @ a, [(2, s, 16), (16, 12)], 1),
        "gather the contracted dim": (lambda x, a: all_gather(x, 1, g) @ a, [(s, 8), (8 * w, 12)], 1),
        "dgrad and wgrad on one gather": (
            lambda x, y, a: (lambda z: (z @ a, z.t() @ y))(all_gather(x, 0, g)),
            [(s, 8), (s * w, 9), (8, 4)],
            1,
        ),
        "dgrad and wgrads of either side, batch 2": (
            lambda x, y, a: (lambda z: (z @ a, z.t() @ y, y.t() @ z))(all_gather(x, 1, g).reshape(-1, 8)),
            [(2, s, 8), (2 * s * w, 9), (8, 4)],
            1,
        ),
        "the contracted dim of either side, with bias": (
            lambda x, a, b, c: (lambda z: (torch.addmm(c, z, a), b @ z.t()))(all_gather(x * 3, 1, g)),
            [(s, 8), (8 * w, 12), (5, 8 * w), (12,)],
            1,
        ),
        "gathered columns as rows, and contracted": (
            lambda x, y, a: (lambda z: (z.t() @ y, z @ a))(all_gather(x, 1, g)),
            [(s, 8), (s, 9), (8 * w, 5)],
            1,
        ),
        "a gathered column on the left, and contracted": (
            lambda x, a, b: (lambda z: (a @ z, z @ b))(all_gather(x * 3, 0, g)),
            [(s, 1), (5, s * w), (1, 40)],
            1,
        ),
        "a gather of a gathered tensor, and its shards side by side": (
            lambda x, a, b: (lambda p, c: (p, c @ b, c.relu()))(
                *(lambda z: (a @ all_gather(z, 0, g), torch.cat(z.chunk(w), 1)))(all_gather(x, 0, g))
            ),
            [(s, 3), (5, s * w * w), (3 * w, 6)],
            2,
        ),
        "gather columns on the right": (lambda x, a: (a * 2) @ all_gather(x * 3, 0, g).t(), [(s, 8), (5, 8)], 1),
        "cast and activation behind the gather": (
            lambda x, a: torch.nn.functional.silu(all_gather(x, 0, g) * 2) @ a,
            [(s, 8), (8, 5)],
            1,
        ),
        "bmm": (lambda x, a: torch.bmm(all_gather(x, 1, g), a), [(3, s, 8), (3, 8, 5)], 1),
        "baddbmm of gathered rows": (
            lambda x, a, c: torch.baddbmm(c, all_gather(x, 1, g), a),
            [(3, s, 8), (3, 8, 5), (3, 1, 5)],
            1,
        ),
        "baddbmm of a gathered contracted dim": (
            lambda x, a, c: torch.baddbmm(c, all_gather(x, 2, g), a),
            [(3, s, 8), (3, 8 * w, 5), (3, s, 5)],
            1,
        ),
        "gated MLP, piece by piece": (
            lambda x, a, b, c: (lambda z: torch.nn.functional.silu(torch.addmm(c, z, a)) * (z @ b))(
                all_gather(x, 0, g)
            ),
            [(s, 8), (8, 5), (8, 5), (5,)],
            1,
        ),
        "gated MLP of a sequence, its halves kept": (
            lambda x, a, b: (lambda p, q: (p, q.double(), torch.nn.functional.gelu(p) * q))(
                *(lambda z: (z @ a, z @ b))(all_gather(x, 1, g))
            ),
            [(2, s, 8), (8, 5), (8, 5)],
            1,
        ),
        "scatter rows": (lambda x, a: reduce_scatter(x @ a, "sum", 0, g), [(s * w, 8), (8, 5)], 1),
        "scatter sequence, batch 2": (lambda x, a: reduce_scatter(x @ a, "sum", 1, g), [(2, s * w, 8), (8, 5)], 1),
        "scatter a sum of matmuls with bias": (
            lambda x, a, b, c: reduce_scatter(torch.addmm(c, x, a) + x @ b, "sum", 0, g),
            [(s * w, 8), (8, 5), (8, 5), (5,)],
            1,
        ),
        "scatter a sum of matmuls over a sequence, in fp64": (
            lambda x, a, b: reduce_scatter((x @ a + x @ b).double(), "sum", 1, g),
            [(2, s * w, 8), (8, 5), (8, 5)],
            1,
        ),
        "scatter a sum of four matmuls over a sequence, in pairs": (
            lambda x, a, b: reduce_scatter(x @ b + (x.relu() @ a + ((x + 1) @ b + (x * 2) @ a)), "sum", 1, g),
            [(2, s * w, 8), (8, 5), (8, 5)],
            1,
        ),
        "all-reduce in fp64 of rows that are no multiple of the ranks": (
            lambda x, a: all_reduce((x @ a).double(), "avg", g),
            [(s * w + 1, 8), (8, 5)],
            1,
        ),
        "all-reduce a sum of three matmuls, rows no multiple of the ranks": (
            lambda x, a, b, c: all_reduce(torch.addmm(c, x, a) + (x * 2) @ b + x.relu() @ a, "avg", g),
            [(s * w + 1, 8), (8, 5), (8, 5), (5,)],
            1,
        ),
        "scatter columns of a sum of matmuls": (
            lambda x, a, b: reduce_scatter(x @ a + x.relu() @ b, "sum", 1, g),
            [(7, 8), (8, s * w), (8, s * w)],
            1,
        ),
        "scatter the last dim": (lambda x, a: reduce_scatter(x @ a, "sum", 1, g), [(7, 8), (8, s * w)], 1),
        "all-reduce": (lambda x, a: all_reduce(x @ a, "sum", g) + 1, [(s * w, 8), (8, 5)], 1),
        "all-reduce of a result plus one": (lambda x, a: all_reduce(x @ a + 1, "sum", g), [(s * w, 8), (8, 5)], 1),
        "scatter a baddbmm's rows": (
            lambda x, a, c: reduce_scatter(torch.baddbmm(c, x, a), "sum", 1, g),
            [(3, s * w, 8), (3, 8, 5), (3, s * w, 5)],
            1,
        ),
        "all-reduce of a baddbmm": (
            lambda x, a, c: all_reduce(torch.baddbmm(c, x, a), "sum", g),
            [(3, s * w, 8), (3, 8, 5), (3, 1, 5)],
            1,
        ),
        "scatter an average over a sequence": (
            lambda x, a: reduce_scatter(x @ a, "avg", 1, g),
            [(2, s * w, 8), (8, 5)],
            1,
        ),
        "all-reduce, rows no multiple of the ranks": (
            lambda x, a: all_reduce(x @ a, "sum", g) + 1,
            [(1, s * w + 1, 8), (8, 5)],
            1,
        ),
        "two all-reduces added": (
            lambda x, a, b: all_reduce(x @ a, "sum", g) + all_reduce(x @ b, "sum", g),
            [(s, 8), (8, 5), (8, 5)],
            1,
        ),
        "three all-reduces added": (
            lambda x, a, b: (
                all_reduce(x @ a, "sum", g) + all_reduce(x @ b, "sum", g) + all_reduce(x @ (a * b), "sum", g)
            ),
            [(s, 8), (8, 5), (8, 5)],
            1,
        ),
        "scatter uneven rows": (
            lambda x, a: reduce_scatter(evened(x @ a, 0, w), "sum", 0, g),
            [(max(s * w - 1, 2), 8), (8, 5)],
            1,
        ),
        "scatter an uneven sequence, batch 2, shards empty": (
            lambda x, a: reduce_scatter(evened(x @ a, 1, w), "avg", 1, g),
            [(2, w + 1, 8), (8, 5)],
            1,
        ),
        "scatter uneven columns": (
            lambda x, a: reduce_scatter(evened(x @ a, 1, w), "sum", 1, g),
            [(7, 8), (8, max(s * w - 1, 2))],
            1,
        ),
        "scatter uneven blocks of rows": (
            lambda x, a: reduce_scatter(evened((x @ a).view(-1, 3, 5), 0, w), "sum", 0, g),
            [(3 * max(s * w - 1, 2), 8), (8, 5)],
            1,
        ),
        "gathered output": (lambda x, a: all_gather(x @ a, 1, g), [(s, 8), (8, 5)], 1),
    }


STATIC_ONLY = {
    "scatter uneven rows",
    "scatter an uneven sequence, batch 2, shards empty",
    "scatter uneven columns",
    "scatter uneven blocks of rows",
}


WITHOUT_LOOPING_OP = {
    "bmm",
    "baddbmm of gathered rows",
    "baddbmm of a gathered contracted dim",
    "scatter a baddbmm's rows",
    "all-reduce of a baddbmm",
    "all-reduce of a result plus one",
}


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
