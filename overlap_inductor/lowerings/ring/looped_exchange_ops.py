# SPDX-License-Identifier: Apache-2.0
"""The looping ops of all-to-alls, which run the steps of ``unrolled_exchange`` in a loop.

Below ``min_rows`` tokens, an op runs the plain collective and the whole matmul. All ranks have the same token count, so
all ranks make the same choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.ring.looped_gather_ops import Form
from overlap_inductor.lowerings.ring.looped_gather_ops import as_it_stood
from overlap_inductor.lowerings.ring.looped_gather_ops import forms_from
from overlap_inductor.lowerings.ring.looped_gather_ops import multiply_arrivals
from overlap_inductor.lowerings.ring.looped_reduce_ops import send_as_made
from overlap_inductor.lowerings.ring.looped_reduce_ops import sum_of_products
from overlap_inductor.lowerings.ring.looped_reduce_ops import wait_for_all
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.transports import exchange as exchanges
from overlap_inductor.transports import routes

Tensors = list[torch.Tensor]


def _matmul_all_to_all(
    chain: torch.Tensor,
    lhs: Sequence[torch.Tensor],
    rhs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    columns: bool,
    lead: int,
    parts: int,
    min_rows: int,
    dtype: torch.dtype,
    group_name: str,
    site: str,
    transport: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    group = resolve_group(group_name)
    world_size, rank = group.size(), group.rank()
    rows, width = _slice_shape(lhs, rhs, columns, world_size)

    def piece(slot: int, start: int, stop: int) -> torch.Tensor:
        if not columns:
            return sum_of_products(lhs, rhs, biases, slice(slot * rows + start, slot * rows + stop), dtype)
        part = slice(slot * width, (slot + 1) * width)
        theirs = [None if b is None else b[..., part] for b in biases]
        return sum_of_products(lhs, [b[:, part] for b in rhs], theirs, slice(start, stop), dtype)

    if lhs[0].shape[0] < min_rows:
        whole = sum_of_products(lhs, rhs, biases, slice(None), dtype)
        return reference.exchanged(whole, columns, group).view(world_size, rows, width), chain.new_empty(1)
    buffer = lhs[0].new_empty(world_size, rows, width, dtype=dtype)
    cuts = [c * (rows // lead) if lead else 0 for c in routes.bounds(lead, parts)]
    bounds = [c * width for c in cuts]
    exchange = exchanges.open_exchange(buffer, bounds, "direct", group, site, transport)
    sent = send_as_made(
        lambda slot, part: piece(slot, cuts[part], cuts[part + 1]), range(parts), parts, exchange, group
    )
    buffer[rank].copy_(piece(rank, 0, rows))
    wait_for_all(exchange, buffer, sent, group)
    return buffer, chain.new_empty(1)


def _slice_shape(
    lhs: Sequence[torch.Tensor], rhs: Sequence[torch.Tensor], columns: bool, world_size: int
) -> tuple[int, int]:
    rows, width = lhs[0].shape[0], rhs[0].shape[1]
    return (rows, width // world_size) if columns else (rows // world_size, width)


def _matmul_all_to_all_fake(
    chain: torch.Tensor,
    lhs: Tensors,
    rhs: Tensors,
    biases: object,
    columns: bool,
    lead: int,
    parts: int,
    min_rows: int,
    dtype: torch.dtype,
    group_name: str,
    site: str,
    transport: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    world_size = resolve_group(group_name).size()
    shape = (world_size, *_slice_shape(lhs, rhs, columns, world_size))
    return lhs[0].new_empty(shape, dtype=dtype), chain.new_empty(1)


# Returns ``(received [W, rows, width], next token of the chain)``. The product has an equal slice for each of W ranks:
# a slice of its columns if ``columns``, else of its rows. The rows of a slice are ``lead`` blocks of equal size. A
# slice is cut into ``parts`` sub-chunks, and no block is cut.
define(
    "matmul_all_to_all(Tensor chain, Tensor[] lhs, Tensor[] rhs, Tensor?[] biases, bool columns, SymInt lead,"
    " int parts, SymInt min_rows, ScalarType dtype, str group_name, str site, str transport='') -> (Tensor, Tensor)",
    _matmul_all_to_all,
    _matmul_all_to_all_fake,
)


def _all_to_all_matmul(
    chain: torch.Tensor,
    sent: torch.Tensor,
    others: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    forms: str,
    parts: int,
    min_rows: int,
    group_name: str,
    site: str,
    transport: str = "",
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    group = resolve_group(group_name)
    world_size, rank, width = group.size(), group.rank(), sent.shape[1]
    rows = sent.shape[0] // world_size
    parsed = forms_from(forms, parts, site)
    if sent.shape[0] < min_rows:
        received = reference.exchanged(sent, False, group)
        return as_it_stood(parsed, received, others, biases, world_size), received, chain.new_empty(1)
    slices, received = sent.view(world_size, rows, width), torch.empty_like(sent)
    received[rank * rows : (rank + 1) * rows].copy_(slices[rank])
    cuts = routes.bounds(rows, parts)
    exchange = exchanges.open_exchange(received, [c * width for c in cuts], "direct", group, site, transport)

    def piece(hop: int) -> torch.Tensor:
        step, part = divmod(hop, parts)
        return slices[(rank + 1 + step) % world_size, cuts[part] : cuts[part + 1]].view(-1)

    places = routes.places([rows] * world_size, parts)
    outs = multiply_arrivals(received, parsed, others, biases, places, "direct", exchange, group, piece)
    return outs, received, chain.new_empty(1)


def _all_to_all_matmul_fake(
    chain: torch.Tensor, sent: torch.Tensor, others: Tensors, biases: object, forms: str, *args: object
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    world_size = resolve_group(str(args[2])).size()
    shard = sent[: sent.shape[0] // world_size]
    parsed = [Form.parse(text) for text in forms.split(", ")]
    outs = [sent.new_empty(f.result_shape(shard, o, world_size)) for f, o in zip(parsed, others, strict=True)]
    return outs, torch.empty_like(sent), chain.new_empty(1)


# Like op ``all_gather_matmul`` of ``looped_gather_ops``, but ``sent [W * m, k]`` has a slice for each rank. Returns
# ``(results, received [W * m, k], next token of the chain)``.
define(
    "all_to_all_matmul(Tensor chain, Tensor sent, Tensor[] others, Tensor?[] biases, str forms, int parts, SymInt"
    " min_rows, str group_name, str site, str transport='') -> (Tensor[], Tensor, Tensor)",
    _all_to_all_matmul,
    _all_to_all_matmul_fake,
)
