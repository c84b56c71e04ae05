# SPDX-License-Identifier: Apache-2.0
"""``all-to-all -> matmul`` in schedule ``chunked`` if the matmul contracts the exchanged dim (the output projection of
Ulysses attention).

The left operand's columns are the slices of all ranks, side by side. The rows are cut into bands::

    send band 0, 1, ... of the slice for each peer                 # beside the matmuls
    operand[:, own slice] = own slice
    for each band: wait; operand[band, other slices] = arrived; y[band] = operand[band] @ b + bias

So the vendor's matmul sums over all of K in fp32 and rounds once. Matmuls of one slice each would need a sum in memory,
in fp32. On one H100, in bf16, a matmul of 8192 x 4096 x 4096 took 470 us in four bands, and 600 us in two slices.

After the wait for credits, every send is launched before the first wait for a band. A vendor's matmul is loaded at its
first launch, and loading waits for all earlier work on this rank. ``gather_launch`` says why this wait cannot deadlock.
With copy engines, W ranks and B bands, a call has about ``2 * B * W + 4 * B + 4`` launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.layout import WAIT_PART
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked.checks import check_matmuls
from overlap_inductor.lowerings.chunked.checks import slice_size
from overlap_inductor.lowerings.chunked.gather_launch import End
from overlap_inductor.lowerings.chunked.gather_launch import multiplied
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.chunked.parameters import Range
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.runtime.side_stream import one_call
from overlap_inductor.runtime.side_stream import side_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.memory import rows_like
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.arrivals import wait_kernel
from overlap_inductor.transports.credits import credit_kernel
from overlap_inductor.transports.credits import spoiling_end
from overlap_inductor.transports.registry import transport_named
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import PeerCopies
from overlap_inductor.transports.transport import Send

PATTERN = "all_to_all_matmul"


@dataclass(frozen=True)
class _Band:
    """A prepared band. ``rows``: the band's range of rows. The range is the same in each slice, in the operand and in
    the result."""

    rows: Range
    send: Send
    wait: PreparedKernel


@dataclass(frozen=True)
class _Prepared:
    """A prepared call. ``workspace [world_size, rows, width]``: the memory in which the slices arrive."""

    bands: list[_Band]
    workspace: torch.Tensor
    end: End


def contracted_all_to_all_matmul(
    sent: torch.Tensor,
    matmuls: Sequence[VendorMatmul],
    launch: Launch,
    parameters: ChunkedParameters,
    operand_used: bool = False,
) -> list[torch.Tensor]:
    """``operand @ b + bias`` for each matmul. Columns ``r * width`` to ``(r + 1) * width - 1`` of ``operand`` are the
    slice that rank ``r`` sends.

    Args:
        sent: ``[world_size * rows, width]``, fp16 or bf16, contiguous and aligned to 16 bytes: a slice for each rank.
        matmuls: right operands ``[world_size * width, N]``.
        operand_used: also return the operand.

    Returns:
        ``[rows, N]`` for each matmul, then ``operand [rows, world_size * width]`` if it is used.

    Raises:
        UnsupportedError, TransferError: as ``gather_launch.all_gather_matmul``.
    """
    (all_rows, width), ranks = sent.shape, launch.world_size
    rows = slice_size(all_rows, "rows", ranks)
    operand = rows_like(sent, rows, ranks * width, sent.dtype)

    def start(outs: Sequence[torch.Tensor]) -> None:
        _multiplied_into(sent, matmuls, launch, parameters, operand, outs, operand_used)

    what = "contracted, operand used" if operand_used else "contracted"
    outs = multiplied(what, sent, rows, matmuls, [operand], launch, parameters, start)
    return [*outs, operand] if operand_used else outs


def _multiplied_into(
    sent: torch.Tensor,
    matmuls: Sequence[VendorMatmul],
    launch: Launch,
    parameters: ChunkedParameters,
    operand: torch.Tensor,
    outs: Sequence[torch.Tensor],
    operand_used: bool,
) -> None:
    rank, (rows, _) = launch.rank, operand.shape
    results = [*outs, operand] if operand_used else [*outs]
    shapes = tuple(m.b.shape for m in matmuls)
    key = ("chunked", "contracted", sent.shape, sent.dtype, shapes, parameters, operand_used)
    call = launch.prepared.get(key)
    if call is None:
        call = _prepare(sent, matmuls, launch, parameters, operand, results)
        launch.remember(key, call)
    credits, side = credit_kernel(launch), side_stream(sent.device)
    slices = operand.view(rows, launch.world_size, sent.shape[1])
    with one_call(launch, side):
        # The wait for credits ends before copies and matmuls begin, as in ``gather_launch``.
        credits()
        with side:
            for band in call.bands:
                band.send(sent)
        slices[:, rank].copy_(sent[rank * rows : (rank + 1) * rows])
        for band in call.bands:
            start, stop = band.rows
            band.wait()
            for others in (slice(0, rank), slice(rank + 1, launch.world_size)):
                if others.start < others.stop:
                    slices[start:stop, others].copy_(call.workspace[others, start:stop].transpose(0, 1))
            for matmul, out in zip(matmuls, outs, strict=True):
                matmul(operand[start:stop], start, stop, out)
    call.end(results)


def _prepare(
    sent: torch.Tensor,
    matmuls: Sequence[VendorMatmul],
    launch: Launch,
    parameters: ChunkedParameters,
    operand: torch.Tensor,
    results: Sequence[torch.Tensor],
) -> _Prepared:
    ranks, rows, width = launch.world_size, len(operand), sent.shape[1]
    check_matmuls(operand, matmuls)
    for matmul in matmuls:
        if (reason := chunked_plan.why_not(sent.dtype, width, matmul.columns)) is not None:
            raise UnsupportedError(reason)
    launch.check_room(
        *chunked_plan.needed(PATTERN, ranks, rows, width, matmuls[0].columns, sent.element_size(), parameters)
    )
    columns = sum(m.columns for m in matmuls)
    p = chunked_plan.fitted_bands(ranks, rows, columns, width * sent.element_size(), parameters)
    transport, bands = transport_named(PeerCopies, p.transport), []
    for number, (start, size) in enumerate(chunked_plan.bands_of(rows, p)):
        transfer = Transfer(
            size, width, size, scattered=True, origin=start, base=start, index=number, read_in_order=True, stride=rows
        )
        bands.append(
            _Band(
                (start, start + size),
                transport.prepare(launch, transfer, range(ranks - 1), sent, p.share),
                wait_kernel(launch, transfer, 0, ranks - 1, WAIT_PART),
            )
        )
    workspace = launch.slot.data.local[: sent.nbytes].view(sent.dtype).view(ranks, rows, width)
    return _Prepared(bands, workspace, spoiling_end(launch, results))
