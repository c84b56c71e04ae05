# SPDX-License-Identifier: Apache-2.0
"""The looping ops of all-to-alls whose parts may have different numbers of rows.

``sent`` and ``received``: the numbers of rows to and from each rank, as ``all_to_all_single`` takes them. A *part* is
all rows that a sender has for one receiver. A part may be empty. Sender and receiver cut each part into pieces at the
same rows. The op's argument ``parts`` is the number of pieces of each part. Pieces without rows are not sent.

Other looping ops run the plain collective for few rows. These ops never do, because one rank could have few rows and
another many. Then one of the two ranks would run the plain collective, and the other would not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.ring.looped_gather_ops import Form
from overlap_inductor.lowerings.ring.looped_gather_ops import forms_from
from overlap_inductor.lowerings.ring.looped_gather_ops import multiply_arrivals
from overlap_inductor.lowerings.ring.looped_reduce_ops import send_as_made
from overlap_inductor.lowerings.ring.looped_reduce_ops import sum_of_products
from overlap_inductor.lowerings.ring.looped_reduce_ops import wait_for_all
from overlap_inductor.lowerings.uneven_parts import check_parts
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.transports import exchange as exchanges
from overlap_inductor.transports import routes

Tensors = list[torch.Tensor]


def in_elements(places: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    return [[row * width for row in place] for place in places]


def _matmul_all_to_all_uneven(
    chain: torch.Tensor,
    lhs: Sequence[torch.Tensor],
    rhs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    sent: Sequence[int],
    received: Sequence[int],
    parts: int,
    dtype: torch.dtype,
    group_name: str,
    site: str,
    transport: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    group = resolve_group(group_name)
    rank, width = group.rank(), rhs[0].shape[1]
    check_parts(lhs[0].shape[0], sent, received, rank, site)
    cuts, places = routes.places(sent, parts), routes.places(received, parts)
    buffer = lhs[0].new_empty(places[-1][-1], width, dtype=dtype)
    exchange = exchanges.open_uneven(buffer, in_elements(places, width), "direct", group, site, transport)

    def rows(start: int, stop: int) -> torch.Tensor:
        return sum_of_products(lhs, rhs, biases, slice(start, stop), dtype)

    pieces = send_as_made(lambda slot, part: rows(*cuts[slot][part : part + 2]), range(parts), parts, exchange, group)
    buffer[places[rank][0] : places[rank][-1]].copy_(rows(cuts[rank][0], cuts[rank][-1]))
    wait_for_all(exchange, buffer, pieces, group)
    return buffer, chain.new_empty(1)


def _matmul_all_to_all_uneven_fake(
    chain: torch.Tensor,
    lhs: Tensors,
    rhs: Tensors,
    biases: object,
    sent: object,
    received: Sequence[int],
    parts: int,
    dtype: torch.dtype,
    *args: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    return lhs[0].new_empty(sum(received), rhs[0].shape[1], dtype=dtype), chain.new_empty(1)


# Returns ``(received rows, next token of the chain)``.
define(
    "matmul_all_to_all_uneven(Tensor chain, Tensor[] lhs, Tensor[] rhs, Tensor?[] biases, SymInt[] sent, SymInt[]"
    " received, int parts, ScalarType dtype, str group_name, str site, str transport='') -> (Tensor, Tensor)",
    _matmul_all_to_all_uneven,
    _matmul_all_to_all_uneven_fake,
)


def _all_to_all_uneven_matmul(
    chain: torch.Tensor,
    x: torch.Tensor,
    others: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    forms: str,
    sent: Sequence[int],
    received: Sequence[int],
    parts: int,
    group_name: str,
    site: str,
    transport: str = "",
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    group = resolve_group(group_name)
    world_size, rank, width = group.size(), group.rank(), x.shape[1]
    check_parts(x.shape[0], sent, received, rank, site)
    cuts, places = routes.places(sent, parts), routes.places(received, parts)
    x = x.contiguous()
    buffer = x.new_empty(places[-1][-1], width)
    buffer[places[rank][0] : places[rank][-1]].copy_(x[cuts[rank][0] : cuts[rank][-1]])
    exchange = exchanges.open_uneven(buffer, in_elements(places, width), "direct", group, site, transport)

    def piece(hop: int) -> torch.Tensor:
        step, part = divmod(hop, parts)
        to = cuts[(rank + 1 + step) % world_size]
        return x[to[part] : to[part + 1]].view(-1)

    parsed = forms_from(forms, parts, site)
    outs = multiply_arrivals(buffer, parsed, others, biases, places, "direct", exchange, group, piece)
    return outs, buffer, chain.new_empty(1)


def _all_to_all_uneven_matmul_fake(
    chain: torch.Tensor,
    x: torch.Tensor,
    others: Tensors,
    biases: object,
    forms: str,
    sent: object,
    received: Sequence[int],
    *args: object,
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    buffer = x.new_empty(sum(received), x.shape[1])
    parsed = [Form.parse(text) for text in forms.split(", ")]
    outs = [x.new_empty(f.result_shape(buffer, other, 1)) for f, other in zip(parsed, others, strict=True)]
    return outs, buffer, chain.new_empty(1)


# Returns ``(results, received rows, next token of the chain)``.
define(
    "all_to_all_uneven_matmul(Tensor chain, Tensor x, Tensor[] others, Tensor?[] biases, str forms, SymInt[] sent,"
    " SymInt[] received, int parts, str group_name, str site, str transport='') -> (Tensor[], Tensor, Tensor)",
    _all_to_all_uneven_matmul,
    _all_to_all_uneven_matmul_fake,
)
