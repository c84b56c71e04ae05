# SPDX-License-Identifier: Apache-2.0
"""Attention to keys and values that ranks pass on step by step: torch's ring attention, and a ring written by hand.

Each rank has the queries, keys and values of its own tokens: ``[batch, heads, own tokens, width]``. A ring returns the
attention of the rank's queries to the keys of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@contextmanager
def rotation(method: str, balanced: bool) -> Iterator[None]:
    """Inside the block, torch's ring passes keys and values on by ``method``: ``alltoall`` or ``allgather``. If
    ``balanced``, each rank has a piece of the sequence's first half and a piece of the second half. Causal attention
    then gives all ranks equal work."""
    before = theirs._cp_options.rotate_method, theirs._cp_options.enable_load_balance
    theirs.set_rotate_method(method)
    theirs._cp_options.enable_load_balance = balanced
    try:
        yield
    finally:
        theirs._cp_options.rotate_method, theirs._cp_options.enable_load_balance = before


def torch_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """The ring that torch's ``context_parallel`` runs in place of attention. ``context_parallel`` replaces only CUDA's
    ops, so the ring is called directly."""
    found: torch.Tensor = theirs._templated_ring_attention(dist.group.WORLD, 2, OP, q, k, v, is_causal=causal)[0]
    return found


def token_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """A ring without thought for overlap. Keys and values are sent in two exchanges. Each exchange is written after
    the attention that could hide the exchange."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    following = [*range(1, ranks), 0]
    out, log_sum_exp = OP(q, k, v, 0.0, causal)
    for step in range(1, ranks):
        k, v = (funcol.permute_tensor(x.flatten(), following, dist.group.WORLD).view(x.shape) for x in (k, v))
        if causal and step > rank:
            continue
        piece, its = OP(q, k, v)
        both = torch.logaddexp(log_sum_exp, its)
        out = out * (log_sum_exp - both).exp().unsqueeze(-1) + piece * (its - both).exp().unsqueeze(-1)
        log_sum_exp = both
    return out


def places(rank: int, ranks: int, own: int, balanced: bool) -> torch.Tensor:
    """The positions of a rank's tokens in the sequence."""
    if not balanced:
        return torch.arange(own) + rank * own
    half = own // 2
    return torch.cat([torch.arange(half) + first * half for first in (rank, 2 * ranks - 1 - rank)])
