# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention as models write it. Each rank has the queries, keys and values of its tokens, and gathers
the keys and values of all ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from overlap_inductor.torch_compat.functional_collectives import all_gather

MASKS = ("none", "causal", "random", "heads", "one row", "nothing", "is_causal")


def gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
    return all_gather(x, dim, dist.group.WORLD)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | bool | None) -> torch.Tensor:
    """Attention ``[batch, heads, tokens, width]``. Keys and values may have fewer heads than queries. If ``mask`` is
    ``True``, attention is causal."""
    given = {"is_causal": True} if mask is True else {"attn_mask": mask}
    return F.scaled_dot_product_attention(q, k, v, **given, enable_gqa=q.shape[1] != k.shape[1])


def heads_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | bool | None = None
) -> torch.Tensor:
    """Attention on tensors ``[batch, heads, own tokens, width]``."""
    return attend(q, gathered(k, 2), gathered(v, 2), mask)


def tokens_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | bool | None = None
) -> torch.Tensor:
    """``heads_first`` on tensors ``[batch, own tokens, heads, width]``, the layout of projections."""
    return attend(*(x.transpose(1, 2) for x in (q, gathered(k, 1), gathered(v, 1))), mask).transpose(1, 2)


def columns(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | bool | None = None) -> torch.Tensor:
    """Keys are transposed before the gather, and transposed back and made contiguous after it."""
    k = gathered(k.transpose(2, 3).contiguous(), 3).transpose(2, 3).contiguous()
    return attend(q, k, gathered(v, 2), mask)


def all_queries(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | bool | None = None
) -> torch.Tensor:
    """The queries are gathered, too. Each rank returns the results for the queries of all ranks."""
    return attend(gathered(q, 2), gathered(k, 2), gathered(v, 2), mask)


def stacked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | bool | None = None) -> torch.Tensor:
    """Keys and values are stacked on a new dim, and gathered at once."""
    k, v = gathered(torch.stack([k, v]), 3).unbind()
    return attend(q, k, v, mask)


def wider(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | bool | None = None) -> torch.Tensor:
    """Values and keys are joined into rows ``[value, key]``, and gathered at once."""
    v, k = gathered(torch.cat([v, k], -1), 2).chunk(2, -1)
    return attend(q, k, v, mask)


def flat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | bool | None = None) -> torch.Tensor:
    """Each rank flattens its keys and values into one 1-D buffer. After the gather, keys and values are cut out of all
    buffers and concatenated."""
    buffers = gathered(torch.cat([k.flatten(), v.flatten()]), 0).chunk(dist.get_world_size())
    keys = torch.cat([b[: k.numel()].view(k.shape) for b in buffers], 2)
    return attend(q, keys, torch.cat([b[k.numel() :].view(v.shape) for b in buffers], 2), mask)


def projected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | bool | None = None
) -> torch.Tensor:
    """Keys and values are gathered as one projection returns them: ``[batch, own tokens, columns]``. The columns are
    ``[2, heads, width]``."""
    batch, heads, _, width = k.shape
    both = torch.stack([k, v], 2).permute(0, 3, 2, 1, 4).flatten(2)
    k, v = gathered(both, 1).view(batch, -1, 2, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, v, mask)


LAYERS = (heads_first, tokens_first, columns, all_queries, stacked, wider, flat, projected)


def mask_of(kind: str, rank: int, heads: int, own: int, keys: int) -> torch.Tensor | bool | None:
    """The mask of a rank's own queries. The first two kinds give no tensor. The other kinds give a bool tensor or a
    tensor that is added to the scores:

    - ``none``: ``None``;
    - ``is_causal``: ``True``;
    - ``causal``: each query sees its own token's key and the keys of earlier tokens;
    - ``random``: each query sees random keys, but the first query sees no key, and the last query sees no key of the
      second half;
    - ``heads``: a random bias for each head. In the first head, the bias hides the first half of the keys from the
      second half of the queries;
    - ``one row``: all queries see the same keys;
    - ``nothing``: hides nothing.
    """
    if kind == "is_causal":
        return True
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


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | bool | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention in fp64 to all keys, ``[batch, heads, tokens, width]``. A query that sees no key gets 0."""
    if mask is True:
        rows, columns = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        mask = rows[:, None] >= columns
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.double()
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v
