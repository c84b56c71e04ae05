# SPDX-License-Identifier: Apache-2.0
"""The looping ops of reductions and of gathered outputs: one op per site, which runs the ring in a loop.

A looping op keeps a graph small (for example with 80 layers and 1024 ranks), but Inductor cannot fuse other ops into
its matmuls. Below ``min_rows`` tokens, the op runs the plain collective and matmul. All ranks have the same token
count, so all make the same choice.

Shapes (W ranks, this rank's view): ``rhs [K, N]``; ``lhs [W*m, K]`` for a reduction and ``[m, K]`` for a gathered
output. ``lhs`` of an all-reduce may have up to W - 1 rows more. A bias is ``[N]`` or has the shape of ``lhs @ rhs``.
Partial sums are sent as ``dtype``, added in at least fp32 and rounded to ``dtype``. All ops return the chain's next
token last.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.library import define
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.target import on_gpu
from overlap_inductor.transports import exchange as exchanges
from overlap_inductor.transports import routes

Tensors = list[torch.Tensor]
Rows = Callable[[slice], torch.Tensor]
"""Returns a slice of the rows of the tensor that the ring moves. The result is contiguous and has this tensor's
dtype."""


def _cut(bias: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return bias[rows] if bias is not None and bias.dim() == 2 else bias


def sum_of_products(
    lhs: Sequence[torch.Tensor],
    rhs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    rows: slice,
    dtype: torch.dtype,
) -> torch.Tensor:
    total = reference.product(lhs[0][rows], rhs[0], _cut(biases[0], rows))
    for a, b, bias in zip(lhs[1:], rhs[1:], biases[1:], strict=True):
        total = total + reference.product(a[rows], b, _cut(bias, rows))
    return total.to(dtype)


def send_as_made(
    piece: Callable[[int, int], torch.Tensor],
    bands: Sequence[int],
    parts: int,
    exchange: exchanges.Exchange | None,
    group: dist.ProcessGroup,
) -> Tensors:
    """Compute the pieces for the other ranks, in the order of the routes ``owner`` and ``direct``
    (``transports.routes``). Each piece is sent before the next one is computed. Returns the pieces, which must live
    until their hops have ended.

    Args:
        piece: ``piece(slot, part)`` computes sub-chunk ``part`` of the slice for rank ``slot``.
        bands: the sub-chunks to compute, by index.
        parts: the number of sub-chunks of a slice.
        exchange: sends the pieces; ``None`` if they have no elements.
    """
    world_size, sent = group.size(), []
    for step in range(world_size - 1):
        for band in bands:
            sent.append(piece((group.rank() + 1 + step) % world_size, band))
            if exchange is not None:
                exchange.post(step * parts + band, sent[-1].view(-1))
    return sent


def wait_for_all(
    exchange: exchanges.Exchange | None, buffer: torch.Tensor, sent: Tensors, group: dist.ProcessGroup
) -> None:
    """Wait for every hop of ``exchange``, which receives into ``buffer``, and close it. The argument ``sent`` keeps the
    pieces alive until then."""
    if exchange is not None:
        for hop in range(exchange.hop_count):
            exchange.wait(hop)
        exchanges.close_exchange(buffer, group, exchange.site)


def _partials(
    compute: Rows,
    cuts: Sequence[int],
    bands: Sequence[int],
    exchange: exchanges.Exchange | None,
    group: dist.ProcessGroup,
) -> Tensors:
    """Compute the sub-chunks ``bands``: send those for other ranks, then compute this rank's own. Returns the sent
    pieces, then the own pieces."""
    rows = cuts[-1]

    def piece(slot: int, band: int) -> torch.Tensor:
        return compute(slice(slot * rows + cuts[band], slot * rows + cuts[band + 1]))

    sent = send_as_made(piece, bands, len(cuts) - 1, exchange, group)
    return [*sent, *(piece(group.rank(), band) for band in bands)]


def _reduce(own: torch.Tensor, received: torch.Tensor, reduce_op: str) -> torch.Tensor:
    wide = torch.promote_types(own.dtype, torch.float32)
    total = own.to(wide) + received.to(wide).sum(0)
    if reduce_op == "avg":
        total = total / (received.shape[0] + 1)
    return total.to(own.dtype)


def reduce_scatter_rows(
    compute: Rows,
    shape: tuple[int, int],
    like: torch.Tensor,
    parts: int,
    min_rows: int,
    dtype: torch.dtype,
    reduce_op: str,
    group_name: str,
    site: str,
    transport: str = "",
) -> torch.Tensor:
    """Reduce-scatter a tensor of ``shape (W*m, N)`` while ``compute`` computes its rows. Returns this rank's ``[m,
    N]``.

    Args:
        like: a tensor on the device of the result.
        parts: number of sub-chunks of each rank's rows.
        min_rows: with fewer rows, the plain collective runs after all rows are computed.
        dtype: of the rows and of the result.
        reduce_op: ``sum`` or ``avg``.

    Raises:
        TransferError: a transfer failed.
    """
    group = resolve_group(group_name)
    world_size, (total_rows, width) = group.size(), shape
    if total_rows < min_rows:
        return reference.reduced("matmul_reduce_scatter", compute(slice(None)), reduce_op, group)
    rows = total_rows // world_size
    cuts = routes.bounds(rows, parts)
    buffer = like.new_empty(world_size - 1, rows * width, dtype=dtype)
    exchange = exchanges.open_exchange(buffer, [c * width for c in cuts], "owner", group, site, transport)
    pieces = _partials(compute, cuts, range(parts), exchange, group)
    own = torch.cat(pieces[-parts:])
    wait_for_all(exchange, buffer, pieces, group)
    return _reduce(own, buffer.view(world_size - 1, rows, width), reduce_op)


def _op(reduce: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:

    def op(
        chain: torch.Tensor,
        lhs: Sequence[torch.Tensor],
        rhs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        parts: int,
        min_rows: int,
        dtype: torch.dtype,
        *where: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def compute(rows: slice) -> torch.Tensor:
            return sum_of_products(lhs, rhs, biases, rows, dtype)

        shape = lhs[0].shape[0], rhs[0].shape[1]
        return reduce(compute, shape, lhs[0], parts, min_rows, dtype, *where), chain.new_empty(1)

    return op


def _matmul_reduce_scatter_fake(
    chain: torch.Tensor,
    lhs: Tensors,
    rhs: Tensors,
    biases: object,
    parts: int,
    floor: int,
    dtype: torch.dtype,
    reduce_op: str,
    group_name: str,
    site: str,
    transport: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = lhs[0].shape[0] // resolve_group(group_name).size()
    return lhs[0].new_empty(rows, rhs[0].shape[1], dtype=dtype), chain.new_empty(1)


define(
    "matmul_reduce_scatter(Tensor chain, Tensor[] lhs, Tensor[] rhs, Tensor?[] biases, int parts, SymInt min_rows, "
    "ScalarType dtype, str reduce_op, str group_name, str site, str transport='') -> (Tensor, Tensor)",
    _op(reduce_scatter_rows),
    _matmul_reduce_scatter_fake,
)


def all_reduce_rows(
    compute: Rows,
    shape: tuple[int, int],
    like: torch.Tensor,
    parts: int,
    min_rows: int,
    dtype: torch.dtype,
    reduce_op: str,
    group_name: str,
    site: str,
    transport: str = "",
) -> torch.Tensor:
    """As ``reduce_scatter_rows``, for an all-reduce: returns all rows. If ``shape`` has more than ``W*m`` rows,
    the plain collective reduces the last ones, at most W - 1."""
    group = resolve_group(group_name)
    world_size, rank, (total_rows, width) = group.size(), group.rank(), shape
    if total_rows < min_rows:
        return reference.reduced("matmul_all_reduce", compute(slice(None)), reduce_op, group)
    rows = total_rows // world_size
    cuts = routes.bounds(rows, parts)
    bounds = [c * width for c in cuts]
    buffer = like.new_empty(world_size - 1, rows * width, dtype=dtype)
    result = like.new_empty(total_rows, width, dtype=dtype)
    scatter = exchanges.open_exchange(buffer, bounds, "owner", group, site, transport)
    back = exchanges.open_exchange(result, bounds, "broadcast", group, site, transport)
    alive: list[Tensors] = []

    def give_back(band: int, own: torch.Tensor) -> None:
        if scatter is None or back is None:
            return
        for step in range(world_size - 1):
            scatter.wait(step * parts + band)
        received = buffer[:, bounds[band] : bounds[band + 1]].reshape(world_size - 1, *own.shape)
        back.piece(rank, band).copy_(_reduce(own, received, reduce_op).view(-1))
        back.post(band)

    later = 1 if on_gpu(like.device) else 0  # as in ``unrolled_reduce``
    for band in range(parts):
        alive.append(_partials(compute, cuts, [band], scatter, group))
        if band >= later:
            give_back(band - later, alive[band - later][-1])
    for band in range(parts - later, parts):
        give_back(band, alive[band][-1])
    body = world_size * rows
    if body < total_rows:
        left = compute(slice(body, total_rows))
        dist.all_reduce(left, group=group)
        result[body:] = left / world_size if reduce_op == "avg" else left
    if scatter is not None and back is not None:
        for band in range(parts):
            back.wait(band)
        exchanges.close_exchange(buffer, group, site)
        exchanges.close_exchange(result, group, site)
    return result


def _full_fake(
    chain: torch.Tensor,
    lhs: Tensors,
    rhs: Tensors,
    biases: object,
    parts: int,
    floor: int,
    dtype: torch.dtype,
    *args: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    return lhs[0].new_empty(lhs[0].shape[0], rhs[0].shape[1], dtype=dtype), chain.new_empty(1)


define(
    "matmul_all_reduce(Tensor chain, Tensor[] lhs, Tensor[] rhs, Tensor?[] biases, int parts, SymInt min_rows,"
    " ScalarType dtype, str reduce_op, str group_name, str site, str transport='') -> (Tensor, Tensor)",
    _op(all_reduce_rows),
    _full_fake,
)


def _matmul_all_gather(
    chain: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    width: int,
    parts: int,
    min_rows: int,
    dtype: torch.dtype,
    group_name: str,
    site: str,
    transport: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    group = resolve_group(group_name)
    rows, columns = lhs.shape[0], rhs.shape[1]
    gathered = lhs.new_empty(group.size() * rows, width, dtype=dtype)
    if rows < min_rows:
        own = sum_of_products([lhs], [rhs], [bias], slice(None), dtype)
        dist.all_gather_into_tensor(gathered, torch.nn.functional.pad(own, (0, width - columns)), group=group)
        return gathered, chain.new_empty(1)
    cuts = routes.bounds(rows, parts)
    exchange = exchanges.open_exchange(gathered, [c * width for c in cuts], "broadcast", group, site, transport)
    for band in range(parts):
        piece = sum_of_products([lhs], [rhs], [bias], slice(cuts[band], cuts[band + 1]), dtype)
        if exchange is not None:
            place = exchange.piece(group.rank(), band).view(-1, width)
            place[:, :columns].copy_(piece)
            place[:, columns:].zero_()
            exchange.post(band)
    if exchange is not None:
        for band in range(parts):
            exchange.wait(band)
        exchanges.close_exchange(gathered, group, site)
    return gathered, chain.new_empty(1)


def _matmul_all_gather_fake(
    chain: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: object,
    width: int,
    parts: int,
    floor: int,
    dtype: torch.dtype,
    group_name: str,
    site: str,
    transport: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    return lhs.new_empty(resolve_group(group_name).size() * lhs.shape[0], width, dtype=dtype), chain.new_empty(1)


# ``width``: columns of the gathered tensor. If ``rhs`` has fewer, this rank appends columns of zeros to its rows.
define(
    "matmul_all_gather(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, SymInt width, int parts, SymInt min_rows, "
    "ScalarType dtype, str group_name, str site, str transport='') -> (Tensor, Tensor)",
    _matmul_all_gather,
    _matmul_all_gather_fake,
)
