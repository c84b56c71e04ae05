# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatters and all-reduces after matmuls in schedule ``chunked``. The vendor's matmul multiplies runs of rows on
the current stream, while a transport moves partial sums on the side stream. A replayed call is one CUDA graph
(``runtime.replay``). Loading a vendor's matmul waits for earlier work on this rank. ``gather_launch`` says why this
cannot deadlock.

Order of rows. The other ranks' rows come first, in rank order from the next rank on, so that their transfers begin
early. The own shard comes last. (With ``chunks=0``, one matmul multiplies all rows of a band.)

With copy engines, W ranks, and C chunks in each of B bands, a call has about this many launches: ``2 * W + 2 * C + 3``
(scatter), ``B * (4 * W + C + 5)`` (all-reduce).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.layout import WAIT_PARTIALS
from overlap_inductor.kernels.partial_sums import sum_partials
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked.checks import check
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.chunked.parameters import Range
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.runtime.replay import launched
from overlap_inductor.runtime.side_stream import one_call
from overlap_inductor.runtime.side_stream import side_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import blas
from overlap_inductor.torch_compat.memory import rows_like
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.arrivals import receive_kernel
from overlap_inductor.transports.arrivals import wait_kernel
from overlap_inductor.transports.call_arguments import call_arguments
from overlap_inductor.transports.credits import credit_kernel
from overlap_inductor.transports.credits import spoiling_end
from overlap_inductor.transports.registry import transport_named
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import PeerCopies
from overlap_inductor.transports.transport import Send

BLOCK = 2048
"""Elements that a block of the summing kernel adds up at once."""
BLOCKS_AN_SM = 4
"""Blocks per SM of the summing kernel. No matmul runs beside it."""


@dataclass(frozen=True)
class _Band:
    """A prepared band of a reduction.

    Attributes:
        chunks: for each chunk, the ranges of rows to multiply, and the function that sends the rows of other ranks.
        own: range of this rank's own rows among all rows.
        own_last: the own rows are in no chunk and are multiplied last.
        finished: rows of the result that ``add`` writes.
        everyone: rows of the result that belong to the band (all-reduce).
        wait: waits for the peers' partial sums of the own rows.
        add: ``add(own, finished)`` adds the peers' partial sums to ``own``, rows of the product. It writes the sums to
            ``finished``, rows of the result.
        receive: copies the peers' finished rows into ``everyone`` when they have arrived (all-reduce).
        hand_round: sends the finished rows to all peers (all-reduce). ``None`` in a reduce-scatter, or if ``add`` sends
            these rows.
    """

    chunks: list[tuple[list[Range], Send]]
    own: Range
    own_last: bool
    finished: Range
    everyone: Range
    wait: PreparedKernel
    add: PreparedKernel
    receive: Callable[[torch.Tensor], None] | None
    hand_round: Send | None


def matmul_reduce_scatter(
    a: torch.Tensor, matmul: VendorMatmul, launch: Launch, parameters: ChunkedParameters, average: bool = False
) -> torch.Tensor:
    """``reduce_scatter(a @ b + bias)`` of rows. The sum includes the further products in ``matmul.added``.

    Args:
        a: ``[world_size * rows, K]``, fp16 or bf16 (fp8 with scales).
        matmul: the right operand ``[K, N]``, with its bias and scales, and further products (``matmul.added``).
        average: divide the sum by the number of ranks.

    Returns:
        ``[rows, N]``, summed over ranks in fp32 and rounded once.

    Raises:
        UnsupportedError, TransferError: as ``gather_launch.all_gather_matmul``.
    """
    return _reduce("matmul_reduce_scatter", a, matmul, launch, parameters, average)


def matmul_all_reduce(
    a: torch.Tensor, matmul: VendorMatmul, launch: Launch, parameters: ChunkedParameters, average: bool = False
) -> torch.Tensor:
    """``all_reduce(a @ b + bias)``: as ``matmul_reduce_scatter``, but ``a [M, K]`` may have any number of rows. Returns
    ``[M, N]``."""
    return _reduce("matmul_all_reduce", a, matmul, launch, parameters, average)


def _reduce(
    pattern: str, a: torch.Tensor, matmul: VendorMatmul, launch: Launch, parameters: ChunkedParameters, average: bool
) -> torch.Tensor:
    launch.faults.check()
    columns, dtype = matmul.b.shape[1], matmul.dtype(a)
    all_rows, shard_rows = a.shape[0], -(-a.shape[0] // launch.world_size)
    # The last shards of an all-reduce may have rows beyond the operand's. These are sums of uninitialised memory, and
    # are cut off.
    product = rows_like(a, shard_rows * launch.world_size, columns, dtype)
    reduces_all = pattern == "matmul_all_reduce"
    # An all-reduce writes its result into the product. A peer's finished rows overwrite this rank's partial rows only
    # after the peer has received the partial rows. This rank sums its own rows in place.
    out = product if reduces_all else rows_like(a, shard_rows, columns, dtype)
    what, tensors = (
        ("chunked", pattern, parameters, average, blas.switches(), matmul.fast),
        [a, product, out, *matmul.operands],
    )
    launched(
        launch,
        what,
        tensors,
        lambda: _reduce_into(pattern, a, matmul, launch, parameters, average, product, out),
        parameters.replays,
        tensors,
    )
    return out[:all_rows] if reduces_all and all_rows < len(out) else out


def _reduce_into(
    pattern: str,
    a: torch.Tensor,
    matmul: VendorMatmul,
    launch: Launch,
    parameters: ChunkedParameters,
    average: bool,
    product: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Queue all launches of a call.

    Band ``i - 1`` is summed on the matmuls' stream, between the first and the second chunk of band ``i``. The sums of
    band ``i - 1`` are sent to all peers under the next matmuls. After the chunks of band ``i``, the peers' sums of band
    ``i - 2`` are received.

    Writes ``product [world_size * rows, N]`` and ``out`` (a shard's rows, or ``product``). Raises ``UnsupportedError``.
    """
    key = (
        "chunked",
        pattern,
        a.shape,
        a.dtype,
        *(b.shape for _, b in matmul.added),
        out.shape[1],
        out.dtype,
        parameters,
        average,
    )
    prepared = launch.prepared.get(key)
    if prepared is None:
        prepared = (
            _prepare_reduce(pattern, a, matmul, product, out, launch, parameters, average),
            spoiling_end(launch, [out]),
        )
        launch.remember(key, prepared)
    bands, end = prepared
    credits, side = credit_kernel(launch), side_stream(a.device)

    def multiply(start: int, stop: int) -> None:
        stop = min(stop, len(a))
        if start < stop:
            matmul(a[start:stop], start, stop, product)

    def receive(band: _Band) -> None:
        if band.receive is not None:
            band.receive(out[slice(*band.everyone)])

    def add_up(band: _Band) -> None:
        band.wait()
        band.add(product[slice(*band.own)], out[slice(*band.finished)])
        if band.hand_round is not None:
            with side:
                band.hand_round(out)

    with one_call(launch, side):
        for i, band in enumerate(bands):
            for number, (ranges, send) in enumerate(band.chunks):
                for rows in ranges:
                    multiply(*rows)
                if i == number == 0:
                    # After the first matmul, the peers have usually ended their previous call.
                    credits()
                with side:
                    send(product)
                if i and number == 0:
                    add_up(bands[i - 1])
            if band.own_last:
                multiply(*band.own)
            if i > 1:
                receive(bands[i - 2])
        if len(bands) > 1:
            receive(bands[-2])
        add_up(bands[-1])
        receive(bands[-1])
    end([out])


def _prepare_reduce(
    pattern: str,
    a: torch.Tensor,
    matmul: VendorMatmul,
    product: torch.Tensor,
    out: torch.Tensor,
    launch: Launch,
    p: ChunkedParameters,
    average: bool,
) -> list[_Band]:
    world_size, rows = launch.world_size, len(product) // launch.world_size
    reduces_all = pattern == "matmul_all_reduce"
    if len(a) % world_size and not reduces_all:
        raise UnsupportedError(f"{len(a)} rows cannot be cut into {world_size} equal shards")
    check(a, [matmul], pattern, rows, launch, p)
    p = chunked_plan.fitted(
        pattern, world_size, rows, matmul.inner, out.shape[1], out.element_size(), a.element_size(), p
    )
    bands = chunked_plan.bands_of(rows, p) if reduces_all else [(0, rows)]
    made: list[_Band] = []
    index, results = 0, chunked_plan.result_signals(world_size, p)
    for number, (start, size) in enumerate(bands):
        last = reduces_all and number + 1 == len(bands)
        part_rows = chunked_plan.part_rows_of(size, world_size, p)
        transfer = Transfer(size, out.shape[1], part_rows, True, world_size * start, world_size * start, index)
        index += transfer.parts
        made.append(
            _prepare_band(product, out, launch, p, transfer, average, results + number if reduces_all else None, last)
        )
    return made


def sent_chunks(
    launch: Launch, transfer: Transfer, p: ChunkedParameters, product: torch.Tensor
) -> list[tuple[list[Range], Send]]:
    """The ``chunks`` of a ``_Band`` whose rows ``transfer`` sends."""
    world_size, transport = launch.world_size, transport_named(PeerCopies, p.transport)
    chunks: list[tuple[list[Range], Send]] = []
    for first, end in pairwise(chunked_plan.chunk_bounds(transfer.parts, world_size, p)):
        ranges = (
            [(0, world_size * transfer.rows)]
            if p.chunks == 0
            else chunked_plan.chunk_rows(first, end, launch.rank, world_size, transfer.rows, transfer.part_rows)
        )
        send = transport.prepare(launch, transfer, range(first, end), product, p.share)
        chunks.append(([(transfer.origin + start, transfer.origin + stop) for start, stop in ranges], send))
    return chunks


def _prepare_band(
    product: torch.Tensor,
    out: torch.Tensor,
    launch: Launch,
    p: ChunkedParameters,
    transfer: Transfer,
    average: bool,
    result_index: int | None,
    last: bool,
) -> _Band:
    """Prepare a band's kernels and transfers.

    Args:
        result_index: index of the flag for the band's second leg in an all-reduce; ``None`` for a reduce-scatter. In
            the workspace, the second leg's rows follow those of the first leg.
        last: this is the last band of an all-reduce, and ``add`` also sends its finished rows to all peers.
    """
    world_size, rank, slot, rows, width = launch.world_size, launch.rank, launch.slot, transfer.rows, transfer.width
    transport, first_row, all_rows = transport_named(PeerCopies, p.transport), transfer.origin, len(product)
    vector = 16 // out.element_size()
    row_vectors = width // vector
    workspace = slot.data.local.view(out.dtype)
    chunks = sent_chunks(launch, transfer, p, product)
    own = first_row + rank * rows, first_row + (rank + 1) * rows
    own_last = p.chunks != 0
    wait = wait_kernel(launch, transfer, 0, transfer.parts * (world_size - 1), WAIT_PARTIALS)
    everyone, behind = (first_row, first_row + world_size * rows), all_rows + first_row
    finished = own if result_index is not None else (0, rows)
    back = Transfer(rows, width, rows, False, own[0], behind, result_index or 0)
    fixed = {
        **call_arguments(sum_partials, launch),
        "staging": workspace[first_row * width :],
        "index": back.index,
        "vectors": rows * row_vectors,
        "gathered": behind * row_vectors,
        "scale": 1.0 / world_size if average else 1.0,
        "VECTOR": vector,
        "BROADCAST": last,
        "BLOCK": BLOCK,
    }
    varying = {"own": product[slice(*own)], "out": out[slice(*finished)]}
    add = PreparedKernel(sum_partials, p.sms * BLOCKS_AN_SM, varying, fixed, num_warps=8)
    if result_index is None:
        return _Band(chunks, own, own_last, finished, everyone, wait, add, None, None)
    hand_round = None if last else transport.prepare(launch, back, range(world_size - 1), out, p.share, guarded=True)
    receive = receive_kernel(launch, out[slice(*everyone)], workspace[behind * width :], back, p.sms)
    return _Band(chunks, own, own_last, finished, everyone, wait, add, receive, hand_round)
