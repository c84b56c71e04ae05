# SPDX-License-Identifier: Apache-2.0
"""A Ulysses attention block as diffusers writes it (``TemplatedUlyssesAttention``).

Every rank has a shard of the sequence, with all heads. Before attention, an exchange gives each rank the whole
sequence, with some heads. After attention, a second exchange gives each rank its shard, with all heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn


def exchanged(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    shape = x.shape
    x = funcol.all_to_all_single(x.flatten(), None, None, group=group)
    x = x.reshape(shape)
    return funcol.wait_tensor(x) if isinstance(x, funcol.AsyncCollectiveTensor) else x


def to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[batch, own tokens, heads, width] -> [batch, tokens, own heads, width]``."""
    batch, own, heads, width = x.shape
    ranks = group.size()
    x = x.reshape(batch, own, ranks, heads // ranks, width).permute(2, 1, 0, 3, 4).contiguous()
    return exchanged(x, group).flatten(0, 1).permute(1, 0, 2, 3).contiguous()


def to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[batch, tokens, own heads, width] -> [batch, own tokens, heads, width]``."""
    batch, tokens, own_heads, width = x.shape
    ranks = group.size()
    x = x.reshape(batch, ranks, tokens // ranks, own_heads, width).permute(1, 3, 0, 2, 4).contiguous()
    return exchanged(x, group).flatten(0, 1).permute(1, 2, 0, 3).contiguous()


class UlyssesAttention(nn.Module):
    """Self-attention over ``[batch, own tokens, hidden]``.

    Args:
        plain: attention is written as two matmuls and a softmax.
        norm: how q and k are normed. ``heads``: each head by itself (Flux, Qwen-Image). ``rows``: all heads of a token
            together (Wan). Empty: not at all.
        rotary: which two numbers of a head are rotated together. ``halves``: a number of the head's first half and
            the number at the same place in the second half (Hugging Face). ``pairs``: two neighbours (Flux). Empty:
            q and k are not rotated.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        group: dist.ProcessGroup,
        bias: bool = True,
        plain: bool = False,
        norm: str = "",
        rotary: str = "",
    ) -> None:
        super().__init__()
        self.heads, self.group, self.plain, self.norm, self.rotary = heads, group, plain, norm, rotary
        if norm:
            width = hidden if norm == "rows" else hidden // heads
            self.norm_q, self.norm_k = nn.RMSNorm(width), nn.RMSNorm(width)
        self.to_q, self.to_k, self.to_v = (nn.Linear(hidden, hidden, bias) for _ in range(3))
        self.to_out = nn.Linear(hidden, hidden, bias)

    def projected(self, hidden_states: torch.Tensor, places: torch.Tensor | None) -> list[torch.Tensor]:
        """q, k and v, each ``[batch, tokens, heads, width]``."""
        query, key, value = (layer(hidden_states) for layer in (self.to_q, self.to_k, self.to_v))
        if self.norm == "rows":
            query, key = self.norm_q(query), self.norm_k(key)
        query, key, value = (x.unflatten(-1, (self.heads, -1)) for x in (query, key, value))
        if self.norm == "heads":
            query, key = self.norm_q(query), self.norm_k(key)
        if self.rotary:
            query, key = (rotated(x, places, self.rotary) for x in (query, key))
        return [query, key, value]

    def forward(self, hidden_states: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        """``places [own tokens]``: the tokens' places in the sequence, for rotary embeddings."""
        query, key, value = (to_heads(x, self.group) for x in self.projected(hidden_states, places))
        query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
        if self.plain:
            weights = torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, dim=-1)
            out = weights @ value
        else:
            out = F.scaled_dot_product_attention(query, key, value)
        out = to_tokens(out.permute(0, 2, 1, 3), self.group)
        return self.to_out(out.flatten(2, 3))


def rotated(x: torch.Tensor, places: torch.Tensor | None, rotary: str) -> torch.Tensor:
    """``x [batch, tokens, heads, width]``, rotated by the tokens' ``places``."""
    assert places is not None
    angles = places[:, None] * torch.arange(1, x.shape[-1] // 2 + 1, device=x.device).to(x.dtype).reciprocal()
    cos, sin = angles.cos()[None, :, None, :], angles.sin()[None, :, None, :]
    if rotary == "halves":
        first, second = x.chunk(2, -1)
        return x * torch.cat([cos, cos], -1) + torch.cat([-second, first], -1) * torch.cat([sin, sin], -1)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-second, first], -1).flatten(-2)
    return x * cos.repeat_interleave(2, -1) + turned * sin.repeat_interleave(2, -1)


def whole(block: UlyssesAttention, hidden_states: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
    """The result of all ranks and their exchanges, computed on one rank from ``[batch, tokens, hidden]``."""
    query, key, value = (x.transpose(1, 2) for x in block.projected(hidden_states, places))
    out = F.scaled_dot_product_attention(query, key, value)
    return block.to_out(out.transpose(1, 2).flatten(2, 3))
