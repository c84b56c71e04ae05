# SPDX-License-Identifier: Apache-2.0
"""A Ulysses attention block, written as diffusers writes it (``TemplatedUlyssesAttention``): every rank has a shard of
the sequence. It exchanges that shard of all heads for the whole sequence of some heads, and back after attention."""

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
    """Self-attention over ``[batch, own tokens, hidden]``. ``plain``: attention is written as two matmuls and a
    softmax."""

    def __init__(
        self, hidden: int, heads: int, group: dist.ProcessGroup, bias: bool = True, plain: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.group, self.plain = heads, group, plain
        self.to_q, self.to_k, self.to_v = (nn.Linear(hidden, hidden, bias) for _ in range(3))
        self.to_out = nn.Linear(hidden, hidden, bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            to_heads(layer(hidden_states).unflatten(-1, (self.heads, -1)), self.group)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
        if self.plain:
            weights = torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, dim=-1)
            out = weights @ value
        else:
            out = F.scaled_dot_product_attention(query, key, value)
        out = to_tokens(out.permute(0, 2, 1, 3), self.group)
        return self.to_out(out.flatten(2, 3))


def whole(block: UlyssesAttention, hidden_states: torch.Tensor) -> torch.Tensor:
    """What all ranks together compute from ``[batch, tokens, hidden]``, without an exchange."""
    query, key, value = (
        layer(hidden_states).unflatten(-1, (block.heads, -1)).transpose(1, 2)
        for layer in (block.to_q, block.to_k, block.to_v)
    )
    out = F.scaled_dot_product_attention(query, key, value)
    return block.to_out(out.transpose(1, 2).flatten(2, 3))
