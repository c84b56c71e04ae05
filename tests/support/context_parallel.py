# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention as models write it: each rank has the queries, keys and values of its own tokens, and
gathers the keys and values of all ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

MASKS = ("none", "causal", "random", "heads", "one row", "nothing")


def gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
    return funcol.all_gather_tensor(x, dim, dist.group.WORLD)


def heads_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """``[batch, heads, own tokens, width]``. Keys and values may have fewer heads."""
    k, v = gathered(k, 2), gathered(v, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def tokens_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The same for ``[batch, own tokens, heads, width]``, as projections give them."""
    q, k, v = (x.transpose(1, 2) for x in (q, gathered(k, 1), gathered(v, 1)))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def mask_of(kind: str, rank: int, heads: int, own: int, keys: int) -> torch.Tensor | None:
    """The mask of a rank's own queries, bool or added to the scores; ``None`` for ``none``.

    ``causal``: the later ranks' keys are hidden from all queries. ``random``: hides all keys from some queries, and
    from others all keys of some ranks. ``heads``: a bias for each head, added and not only 0 or ``-inf``. ``one row``:
    the same for all queries. ``nothing``: hides nothing.
    """
    rows, columns = torch.arange(own) + rank * own, torch.arange(keys)
    if kind == "causal":
        return rows[:, None] >= columns[None]
    if kind == "random":
        seen = torch.rand(own, keys) > 0.5
        seen[0] = False
        seen[-1, keys // 2 :] = False
        return seen
    if kind == "heads":
        mask = torch.randn(1, heads, own, keys)
        mask[:, 0, own // 2 :, : keys // 2] = -math.inf
        return mask
    if kind == "one row":
        return (torch.rand(keys) > 0.5).expand(1, 1, own, keys)
    return torch.ones(own, keys, dtype=torch.bool) if kind == "nothing" else None


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention in fp64 to all keys, ``[batch, heads, tokens, width]``. A query that sees no key gets 0."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.double()
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v
