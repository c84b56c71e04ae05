# SPDX-License-Identifier: Apache-2.0
"""Gathers and all-to-alls before matmuls in schedule ``chunked``. The vendor's matmul multiplies runs of rows on the
current stream, while a transport moves rows on the side stream. A replayed call is one CUDA graph (``runtime.replay``).

Loading. The first call with operands of a shape prepares every Triton kernel. A vendor's matmul is loaded at its first
launch, and loading waits for all earlier work on this rank. This wait cannot deadlock, because all ranks launch the
steps in one order (``kernels.transfer``). The earlier work waits only for work that each rank launches before this
matmul.

Order of rows. This rank's own rows come first, then the other ranks' rows in rank order, from the next rank on. This is
the order in which they arrive. A chunk is a run of the other ranks' rows (``chunked.sizes``). If a chunk wraps around
the end of the tensor, it takes two matmuls.

With copy engines, W ranks and C chunks, a call has about ``2 * W + 2 * C + 3`` launches.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from overlap_inductor.kernels.layout import WAIT_PART
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked.checks import check
from overlap_inductor.lowerings.chunked.checks import check_sent
from overlap_inductor.lowerings.chunked.checks import slice_size
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
from overlap_inductor.transports.arrivals import wait_kernel
from overlap_inductor.transports.credits import credit_kernel
from overlap_inductor.transports.credits import spoiling_end
from overlap_inductor.transports.registry import transport_named
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import PeerCopies
from overlap_inductor.transports.transport import Send

End = Callable[[Sequence[torch.Tensor]], None]
"""``end(results)`` ends a call. If the group was aborted, ``results`` are set to NaN, because vendor matmuls and copies
run even if rows have not arrived."""


@dataclass(frozen=True)
class _Gather:
    """A prepared call.

    Attributes:
        chunks: for each chunk, its ranges of rows and the kernel that waits for them.
        workspace: ``[world_size * rows, K]``.
    """

    send: Send
    chunks: list[tuple[list[Range], PreparedKernel]]
    workspace: torch.Tensor
    end: End


def all_gather_matmul(
    shard: torch.Tensor,
    matmuls: Sequence[VendorMatmul],
    launch: Launch,
    parameters: ChunkedParameters,
    gathered_used: bool = False,
) -> list[torch.Tensor]:
    """``all_gather(shard) @ b + bias`` for each matmul.

    Args:
        shard: ``[rows, K]``, fp16 or bf16 (fp8 with scales), contiguous and aligned to 16 bytes.
        gathered_used: also return the gathered tensor.

    Returns:
        ``[world_size * rows, N]`` for each matmul, then the gathered tensor if it is used.

    Raises:
        UnsupportedError: the schedule does not support a dtype or layout, or ``launch.slot`` is too small. The slot is
            the part of the workspace that the call uses.
        TransferError: an earlier call of the group gave up waiting, or was aborted.
    """
    return _gather("all_gather_matmul", shard, len(shard), matmuls, launch, parameters, gathered_used)


def all_to_all_matmul(
    sent: torch.Tensor,
    matmuls: Sequence[VendorMatmul],
    launch: Launch,
    parameters: ChunkedParameters,
    received_used: bool = False,
) -> list[torch.Tensor]:
    """``all_to_all(sent) @ b + bias`` for each matmul: as ``all_gather_matmul``, but ``sent [world_size * rows, K]``
    has a slice for each rank."""
    rows = slice_size(len(sent), "rows", launch.world_size)
    return _gather("all_to_all_matmul", sent, rows, matmuls, launch, parameters, received_used)


def _gather(
    pattern: str,
    source: torch.Tensor,
    rows: int,
    matmuls: Sequence[VendorMatmul],
    launch: Launch,
    parameters: ChunkedParameters,
    gathered_used: bool,
) -> list[torch.Tensor]:
    all_rows = launch.world_size * rows
    gathered = rows_like(source, all_rows, source.shape[1], source.dtype) if gathered_used else None

    def start(outs: Sequence[torch.Tensor]) -> None:
        _gather_into(pattern, source, rows, matmuls, launch, parameters, outs, gathered)

    outs = multiplied(pattern, source, all_rows, matmuls, [gathered], launch, parameters, start)
    return outs if gathered is None else [*outs, gathered]


def multiplied(
    what: str,
    sent: torch.Tensor,
    rows: int,
    matmuls: Sequence[VendorMatmul],
    others: Sequence[torch.Tensor | None],
    launch: Launch,
    parameters: ChunkedParameters,
    start: Callable[[Sequence[torch.Tensor]], None],
) -> list[torch.Tensor]:
    """Run a call whose matmuls follow a transfer, or replay its launches.

    Args:
        what: the kind of call. Launches are replayed only for a call of the same kind.
        sent: what is sent to the peers.
        rows: rows of each matmul's result.
        others: other tensors that the launches write, or ``None``.
        start: ``start(outs)`` queues the launches. They write the results ``outs``.

    Returns:
        ``outs``: ``[rows, N]`` for each matmul.

    Raises:
        UnsupportedError: ``sent`` cannot be read in place, or ``start`` raises this error.
        TransferError: an earlier call of the group gave up waiting, or was aborted.
    """
    launch.faults.check()
    check_sent(sent)
    outs = [rows_like(sent, rows, m.columns, m.dtype(sent)) for m in matmuls]
    tensors = [sent, *others, *outs, *(t for m in matmuls for t in m.operands)]
    key = ("chunked", what, parameters, blas.switches(), *(m.fast for m in matmuls))
    launched(launch, key, tensors, lambda: start(outs), parameters.replays, tensors)
    return outs


def _gather_into(
    pattern: str,
    source: torch.Tensor,
    rows: int,
    matmuls: Sequence[VendorMatmul],
    launch: Launch,
    parameters: ChunkedParameters,
    outs: Sequence[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    start, stop = launch.rank * rows, (launch.rank + 1) * rows
    own = source if pattern == "all_gather_matmul" else source[start:stop]
    results = [*outs] if gathered is None else [*outs, gathered]
    key = (
        "chunked",
        pattern,
        source.shape,
        source.dtype,
        tuple((m.b.shape, m.dtype(source)) for m in matmuls),
        parameters,
        gathered is None,
    )
    call = launch.prepared.get(key)
    if call is None:
        check(source, matmuls, pattern, rows, launch, parameters)
        # A chunk's matmuls count as one matmul with all their columns.
        columns, itemsize = sum(m.columns for m in matmuls), source.element_size()
        fitted = chunked_plan.fitted(
            pattern, launch.world_size, rows, source.shape[1], columns, itemsize, itemsize, parameters
        )
        call = _prepare_gather(pattern, source, rows, launch, fitted, results)
        launch.remember(key, call)
    credits, side = credit_kernel(launch), side_stream(source.device)
    with one_call(launch, side):
        # The wait for credits ends before the matmul begins. Beside the matmul, the wait could keep a block of the
        # matmul from beginning.
        credits()
        with side:
            call.send(source)
            if gathered is not None:
                gathered[start:stop].copy_(own)
        for matmul, out in zip(matmuls, outs, strict=True):
            matmul(own, start, stop, out)
        for number, (ranges, wait) in enumerate(call.chunks):
            wait()
            if gathered is not None and number + 1 == len(call.chunks):
                with side:
                    _hand_out(call.workspace, gathered, start, stop)
            for first, end in ranges:
                for matmul, out in zip(matmuls, outs, strict=True):
                    matmul(call.workspace[first:end], first, end, out)
    call.end(results)


def _hand_out(workspace: torch.Tensor, gathered: torch.Tensor, start: int, stop: int) -> None:
    """Copy all rows but this rank's own (``start`` to ``stop - 1``) from the workspace to ``gathered``. On 2 H200s, the
    last chunk's matmuls hid 53 % of the copy at 2048 tokens, and 32 % at 8192 tokens
    (``bench/results/handed_out.jsonl``)."""
    gathered[:start].copy_(workspace[:start])
    gathered[stop:].copy_(workspace[stop:])


def _prepare_gather(
    pattern: str,
    source: torch.Tensor,
    rows: int,
    launch: Launch,
    p: ChunkedParameters,
    results: Sequence[torch.Tensor],
) -> _Gather:
    world_size, width = launch.world_size, source.shape[1]
    exchanged, part_rows = pattern == "all_to_all_matmul", chunked_plan.part_rows_of(rows, world_size, p)
    transfer = Transfer(rows, width, part_rows, scattered=exchanged, read_in_order=exchanged)
    bounds = chunked_plan.chunk_bounds(transfer.parts, world_size, p)
    chunks = [
        (
            chunked_plan.chunk_rows(first, last, launch.rank, world_size, rows, transfer.part_rows),
            wait_kernel(launch, transfer, first, last, WAIT_PART),
        )
        for first, last in pairwise(bounds)
    ]
    nbytes = world_size * rows * width * source.element_size()
    workspace = launch.slot.data.local[:nbytes].view(source.dtype).view(world_size * rows, width)
    send = transport_named(PeerCopies, p.transport).prepare(launch, transfer, range(bounds[-1]), source, p.share)
    return _Gather(send, chunks, workspace, spoiling_end(launch, results))
