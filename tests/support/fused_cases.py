# SPDX-License-Identifier: Apache-2.0
"""Small functions with sites whose sizes and layouts the kernels of ``fused`` and ``chunked`` support."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import all_to_all
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.ring_cases import evened
from tests.support.ulysses import to_heads
from tests.support.ulysses import to_tokens


def cases(w: int, factor: int = 1) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    """``name: (function, input shapes, number of sites that a fused kernel must serve)``. ``factor`` multiplies every
    size above 2."""
    return _larger(_cases(w), factor)


def _larger(
    found: dict[str, tuple[Any, list[tuple[int, ...]], int]], factor: int
) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    return {
        name: (function, [tuple(n * factor if n > 2 else n for n in shape) for shape in shapes], sites)
        for name, (function, shapes, sites) in found.items()
    }


def _cases(w: int) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    g, s = dist.group.WORLD, 24
    return {
        "gather rows": (lambda x, a: torch.relu(all_gather(x, 0, g) @ a), [(s, 16), (16, 24)], 1),
        "gather rows, two matmuls, one with bias, gathered tensor read": (
            lambda x, a, b, c: (lambda y: (y @ a.t(), torch.addmm(c, y, b), y + 1))(all_gather(x, 0, g)),
            [(s, 16), (24, 16), (16, 8), (8,)],
            1,
        ),
        "gather rows, six weights, five of one layout": (
            lambda x, a, b, c: (
                lambda y: (y @ a.t(), y @ b.t(), y @ (a + 1).t(), y @ (b + 1).t(), y @ (b + 2).t(), y @ c)
            )(all_gather(x, 0, g)),
            [(s, 16), (24, 16), (8, 16), (16, 40)],
            1,
        ),
        "gather rows, and a weight's gradient": (
            lambda x, a, h: (lambda y: (y @ a, y.t() @ h, torch.mm(h.t(), y)))(all_gather(x, 0, g)),
            [(s, 16), (16, 24), (s * w, 8)],
            1,
        ),
        "gather sequence, batch 2, and a weight's gradient": (
            lambda x, a, h: (lambda y: (torch.relu(y @ a), y.flatten(0, 1).t() @ h))(all_gather(x, 1, g)),
            [(2, s, 16), (16, 24), (2 * s * w, 8)],
            1,
        ),
        "gather sequence, batch 1": (lambda x, a: all_gather(x, 1, g) @ a, [(1, s, 16), (16, 24)], 1),
        "gather sequence, batch 2": (lambda x, a: all_gather(x, 1, g) @ a, [(2, s, 16), (16, 24)], 1),
        "gather an uneven sequence, batch 2": (
            lambda x, a: torch.relu(all_gather(x, 1, g)[:, :-3].flatten(0, 1) @ a),
            [(2, s, 16), (16, 24)],
            1,
        ),
        "gather columns on the right": (lambda x, a: (a * 2) @ all_gather(x * 3, 0, g).t(), [(s, 16), (8, 16)], 1),
        "scatter rows": (lambda x, a: reduce_scatter(x @ a, "sum", 0, g), [(s * w, 16), (16, 24)], 1),
        "scatter an average with bias": (
            lambda x, a, b: reduce_scatter(torch.addmm(b, x, a.t()), "avg", 0, g),
            [(s * w, 16), (24, 16), (24,)],
            1,
        ),
        "scatter sequence, batch 2": (lambda x, a: reduce_scatter(x @ a, "sum", 1, g), [(2, s * w, 16), (16, 8)], 1),
        "scatter the last dim": (lambda x, a: reduce_scatter(x @ a, "sum", 1, g), [(8, 16), (16, s * w)], 1),
        "scatter uneven rows": (
            lambda x, a: reduce_scatter(evened(x @ a, 0, w), "sum", 0, g),
            [(s * w - 1, 16), (16, 8)],
            1,
        ),
        "all-reduce": (lambda x, a: all_reduce(x @ a, "sum", g) + 1, [(s * w, 16), (16, 24)], 1),
        "all-reduce, batch 1, with bias": (
            lambda x, a, b: all_reduce(torch.nn.functional.linear(x, a, b), "sum", g),
            [(1, s * w, 16), (8, 16), (8,)],
            1,
        ),
        "all-reduce of rows whose number W does not divide": (
            lambda x, a: all_reduce(x @ a, "sum", g),
            [(s * w - 1, 16), (16, 24)],
            1,
        ),
        "operands that begin in the middle of 16 bytes": (
            lambda x, a: all_gather(x.view(-1)[4 : 4 - x.shape[1]].view(-1, x.shape[1]), 0, g) @ a[:, 4:-4],
            [(s + 1, 16), (16, 32)],
            1,
        ),
        "a strided bias, a bias of one element": (
            lambda x, a, b: (lambda y: (torch.addmm(b[::2], y, a), torch.addmm(b[1:2], y, a + 1)))(all_gather(x, 0, g)),
            [(s, 16), (16, 24), (48,)],
            1,
        ),
        "all-reduce with a row, a residual and an activation": (
            lambda x, a, b, r: torch.sigmoid(r + all_reduce(x @ a, "sum", g) * b),
            [(2, s, 16), (16, 24), (24,), (2, s, 24)],
            1,
        ),
        "an MLP, gathered and scattered": (
            lambda x, a, b: x + reduce_scatter(torch.relu(all_gather(x, 0, g) @ a.t()) @ b.t(), "sum", 0, g),
            [(s, 16), (24, 16), (16, 24)],
            2,
        ),
    }


def exchanges(w: int, factor: int = 1) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    """Functions with all-to-alls of equal slices, in the form of ``cases``. Of the schedules that
    write each site as one op, only ``chunked`` and ``fused`` compute these functions."""
    g, s = dist.group.WORLD, 24
    change_shards = torch.ops._dtensor.shard_dim_alltoall
    linear = torch.nn.functional.linear
    return _larger(
        {
            "exchange rows, with bias": (
                lambda x, a, b: all_to_all(linear(x, a, b), g),
                [(s * w, 16), (24, 16), (24,)],
                1,
            ),
            "exchange columns": (lambda x, a: change_shards(x @ a, 0, 1, g.group_name), [(s, 16), (16, 8 * w)], 1),
            "exchange heads, batch 2, with bias": (
                lambda x, a, b: to_heads(linear(x, a, b).unflatten(-1, (-1, 8)), g),
                [(2, s, 16), (16 * w, 16), (16 * w,)],
                1,
            ),
            "exchange rows before two matmuls, one with bias, what arrives is read": (
                lambda x, a, b, c: (lambda y: (y @ a.t(), torch.addmm(c, y, b), y + 1))(all_to_all(x, g)),
                [(s * w, 16), (24, 16), (16, 8), (8,)],
                1,
            ),
            "exchange a sequence before a matmul, batch 2": (
                lambda x, a: change_shards(x, 1, 0, g.group_name).flatten(0, 1) @ a,
                [(2 * w, s, 16), (16, 24)],
                1,
            ),
            "exchange rows that a second matmul reads as columns": (
                lambda x, a, b: (lambda y: (y @ a, b @ y.t()))(all_to_all(x, g)),
                [(s * w, 16), (16, 24), (8, 16)],
                1,
            ),
        },
        factor,
    )


def contractions(w: int, factor: int = 1) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    """Functions in which a matmul contracts the dim along which an all-to-all's slices arrive, in the form of
    ``cases``.

    Each rank's slice of the contracted dim has ``64 * factor`` elements, because ``fused`` takes only multiples of 64.
    Some inputs hold the slice as ``[2, 32 * factor]``: ``factor`` multiplies no size of 2.
    """
    g, s = dist.group.WORLD, 24
    change_shards = torch.ops._dtensor.shard_dim_alltoall
    linear = torch.nn.functional.linear

    def columns(x: torch.Tensor) -> torch.Tensor:
        """``[ranks * s, k] -> [s, ranks * k]``"""
        return change_shards(x, 1, 0, g.group_name)

    def in_two(x: torch.Tensor) -> torch.Tensor:
        """``[ranks * s, 2, k] -> [s, 2 * ranks * k]``: the contracted dim is ``[2, ranks, k]``."""
        return all_to_all(x, g).unflatten(0, (w, -1)).permute(1, 2, 0, 3).flatten(1)

    return _larger(
        {
            f"contract heads, batch {batch}, with bias": (
                lambda x, a, b: linear(to_tokens(x, g).flatten(2, 3), a, b),
                [(batch, s * w, 2, 32), (24, 64 * w), (24,)],
                1,
            )
            for batch in (1, 2)
        }
        | {
            "contract columns": (lambda x, a: columns(x) @ a, [(s * w, 64), (64 * w, 40)], 1),
            "contract two ranges of each rank's columns": (
                lambda x, a: in_two(x) @ a,
                [(s * w, 2, 32), (64 * w, 24)],
                1,
            ),
            "contract two ranges of each rank's columns that are also read": (
                lambda x, a: (lambda y: (y @ a, y + 1))(in_two(x)),
                [(s * w, 2, 32), (64 * w, 24)],
                1,
            ),
            "contract columns that are also read": (
                lambda x, a: (lambda y: (y @ a, y + 1))(columns(x)),
                [(s * w, 64), (64 * w, 24)],
                1,
            ),
            "contract columns, and a weight's gradient": (
                lambda x, a, h: (lambda y: (y @ a.t(), y.t() @ h))(columns(x)),
                [(s * w, 64), (24, 64 * w), (s, 8)],
                1,
            ),
            "contract columns in two matmuls": (
                lambda x, a, b: (lambda y: (y @ a, y @ b))(columns(x)),
                [(s * w, 64), (64 * w, 24), (64 * w, 8)],
                1,
            ),
            "contract columns in two matmuls, and a weight's gradient": (
                lambda x, a, b, h: (lambda y: (y @ a, y @ b, y.t() @ h))(columns(x)),
                [(s * w, 64), (64 * w, 24), (64 * w, 8), (s, 8)],
                1,
            ),
            "contract rows, as a weight's gradient": (
                lambda x, h: all_to_all(x, g).t() @ h,
                [(64 * w, 16), (64 * w, 24)],
                1,
            ),
        },
        factor,
    )


def sums(w: int, factor: int = 1) -> dict[str, tuple[Any, list[tuple[int, ...]], int]]:
    """Functions with sums of matmuls, in the form of ``cases``. ``chunked`` computes them, ``fused`` does not. Inductor
    writes a sum of two 2-D matmuls as an ``addmm`` whose bias is the other product."""
    g, s = dist.group.WORLD, 24
    linear = torch.nn.functional.linear
    pair = [(1, s * w, 16), (16, 24), (1, s * w, 40), (40, 24)]
    triple = [(1, s * w, 16), (16, 24), (1, s * w, 40), (24, 40), (1, s * w, 8), (8, 24)]
    return _larger(
        {
            "scatter a sum of two matrices": (
                lambda x, a, y, b: reduce_scatter(x @ a + y @ b, "sum", 0, g),
                [(s * w, 16), (16, 24), (s * w, 40), (40, 24)],
                1,
            ),
            "all-reduce a sum of three matrices, one with bias, row count not a multiple of W": (
                lambda x, a, y, b, z, c, d: all_reduce(x @ a + torch.addmm(d, y, b) + z @ c, "avg", g),
                [(s * w - 1, 16), (16, 24), (s * w - 1, 40), (40, 24), (s * w - 1, 8), (8, 24), (24,)],
                1,
            ),
            "scatter a sum of two": (lambda x, a, y, b: reduce_scatter(x @ a + y @ b, "sum", 1, g), pair, 1),
            "scatter an average of three, one with bias": (
                lambda x, a, y, b, z, c, d: reduce_scatter(x @ a + linear(y, b, d) + z @ c, "avg", 1, g),
                [*triple, (24,)],
                1,
            ),
            "scatter a sum along the sequence, batch 2": (
                lambda x, a, y, b: reduce_scatter(x @ a + y @ b, "sum", 1, g),
                [(2, s * w, 16), (16, 8), (2, s * w, 24), (24, 8)],
                1,
            ),
            "scatter the last dim of a sum": (
                lambda x, a, y, b: reduce_scatter(x @ a + y @ b, "sum", 2, g),
                [(2, 8, 16), (16, s * w), (2, 8, 24), (24, s * w)],
                1,
            ),
            "all-reduce a sum of three": (
                lambda x, a, y, b, z, c: all_reduce(x @ a + y @ b.t() + z @ c, "sum", g),
                triple,
                1,
            ),
            "all-reduces that are added": (
                lambda x, a, y, b: all_reduce(x @ a, "sum", g) + all_reduce(y @ b, "sum", g),
                pair,
                1,
            ),
            "all-reduce a sum of rows whose number W does not divide": (
                lambda x, a, y, b: all_reduce(x @ a + y @ b, "sum", g),
                [(1, s * w - 1, 16), (16, 24), (1, s * w - 1, 40), (40, 24)],
                1,
            ),
        },
        factor,
    )
