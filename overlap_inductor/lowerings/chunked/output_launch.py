# SPDX-License-Identifier: Apache-2.0
"""``matmul -> all-gather`` of the matmul's result in schedule ``chunked`` (the sharded head of a language model). The
rows are cut into bands (``output_sizes``), and each band is moved under the matmul of the next one. The vendor's matmul
sums over all of K, so bands change no number as long as the library multiplies them with the same kernel.

The result has the ranks' slices one below the other, as the collective gives them, or side by side, as the program's
``cat`` after the collective arranges them.

By default (``ChunkedParameters.reads``), the product is in this rank's part of the workspace, and copy engines read the
peers' bands into their places in the result. So nothing is copied twice, and the ``cat`` costs nothing::

    wait for credits                                                    # the peers have read the previous product
    for each band: product[band] = a[band] @ b + bias
                   beside the next matmul: announce the band; wait for the peers' bands; read them

Or copies write each band to the peers' workspaces (transport ``sm_push`` can only do this). After the last matmul,
each rank copies the peers' slices, W times the bytes, out of its workspace. If the slices are side by side, the product
is the rank's own slice in its own workspace. No peer writes there in a call of this pattern: ranks write their own
slice of their peers' workspaces. An earlier call of the slot has received all that it was sent, and a later one sends
only with this call's credit.

Memory ordering. A band's sends or its announcement begin after its matmul (``SideStream``); flags follow the rows
(``transports.copy_engine``, ``transports.peer_reads``). A kernel waits for the flags. Later work on its stream, the
reads or the copies out of the workspace, sees the rows (``kernels.transfer``).

Forward progress. All ranks launch the same steps, and in each step the announcement or the sends before the waits. A
wait is for what peers announce or send in this step or in an earlier one. Loading a vendor's matmul waits for earlier
work on this rank, which waits only for earlier steps.

CUDA graphs. A call forks the side stream and joins it. Flags get the call's number from memory, and the workspace
outlives the graph. With reads, the side stream's waits are one branch of the graph, and the matmuls another one.

With copy engines, W ranks and B bands, a call has about ``2 * B * W + 4 * B + 2`` launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from overlap_inductor.kernels.layout import WAIT_RESULT
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked.checks import check
from overlap_inductor.lowerings.chunked.gather_launch import End
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
from overlap_inductor.transports.transport import PeerReads
from overlap_inductor.transports.transport import Reads
from overlap_inductor.transports.transport import Send

PATTERN = "matmul_all_gather"


@dataclass(frozen=True)
class _Band:
    """A prepared band.

    Attributes:
        rows: the band's rows in each slice.
        wait: waits for the peers' bands.
        send: sends the band to the peers; ``None`` if they read it.
        reads: reads the peers' bands; ``None`` if they are sent.
    """

    rows: Range
    wait: PreparedKernel
    send: Send | None
    reads: Reads | None


@dataclass(frozen=True)
class _Prepared:
    """A prepared call. ``workspace [ranks, rows, N]``: the memory of the slices. If the peers' slices are read, it has
    only this rank's slice."""

    bands: Sequence[_Band]
    workspace: torch.Tensor
    end: End


def matmul_all_gather(
    a: torch.Tensor, matmul: VendorMatmul, launch: Launch, parameters: ChunkedParameters, side_by_side: bool = False
) -> torch.Tensor:
    """``all_gather(a @ b + bias)``.

    Args:
        a: ``[rows, K]``, fp16 or bf16.
        side_by_side: the ranks' slices are columns of the result. By default, they are rows.

    Returns:
        ``[world_size * rows, N]``, or ``[rows, world_size * N]`` if ``side_by_side``.

    Raises:
        UnsupportedError, TransferError: as ``gather_launch.all_gather_matmul``.
    """
    launch.faults.check()
    rows, columns, ranks = len(a), matmul.columns, launch.world_size
    shape = (rows, ranks * columns) if side_by_side else (ranks * rows, columns)
    out = rows_like(a, *shape, matmul.dtype(a))
    tensors = [a, out, *matmul.operands]
    what = ("chunked", PATTERN, side_by_side, parameters, blas.switches())
    launched(
        launch,
        what,
        tensors,
        lambda: _gather_into(a, matmul, launch, parameters, side_by_side, out),
        parameters.replays,
        tensors,
    )
    return out


def _gather_into(
    a: torch.Tensor,
    matmul: VendorMatmul,
    launch: Launch,
    parameters: ChunkedParameters,
    side_by_side: bool,
    out: torch.Tensor,
) -> None:
    key = ("chunked", PATTERN, side_by_side, a.shape, a.dtype, matmul.b.shape, parameters)
    call = launch.prepared.get(key)
    if call is None:
        call = _prepare(a, matmul, launch, parameters, side_by_side, out)
        launch.remember(key, call)
    slices = _slices(out, launch.world_size, side_by_side)
    product = _product(call.workspace, slices, launch.rank, parameters, side_by_side)
    credits, side = credit_kernel(launch), side_stream(a.device)
    with one_call(launch, side):
        if parameters.reads:
            # The peers have ended the calls that read the previous product.
            credits()
        for number, band in enumerate(call.bands):
            start, stop = band.rows
            matmul(a[start:stop], start, stop, product)
            if number == 0 and not parameters.reads:
                # This wait is short: after the first band's matmul, the peers have usually ended their previous call.
                credits()
            with side:
                if band.send is not None:
                    band.send(product)
                if band.reads is not None:
                    band.reads.announce()
                    band.wait()
                    band.reads.read(slices[:, start:stop])
        if not parameters.reads:
            _copy_out(call, slices, launch.rank, side_by_side)
    call.end([out])


def _copy_out(call: _Prepared, slices: torch.Tensor, rank: int, own_too: bool) -> None:
    """Copy the bands from the workspace to the result when they have arrived. ``own_too``: also this rank's slice."""
    # Copies of words of 8 bytes take fewer instructions than copies of elements.
    arrived, result = call.workspace.view(torch.int64), slices.view(torch.int64)
    ranges = [slice(0, len(slices))] if own_too else [slice(0, rank), slice(rank + 1, len(slices))]
    for band in call.bands:
        band.wait()
        for those in ranges:
            if those.start < those.stop:
                result[those, slice(*band.rows)].copy_(arrived[those, slice(*band.rows)])


def _slices(out: torch.Tensor, ranks: int, side_by_side: bool) -> torch.Tensor:
    """A view ``[ranks, rows, width of a slice]`` of the result."""
    return out.view(len(out), ranks, -1).transpose(0, 1) if side_by_side else out.view(ranks, len(out) // ranks, -1)


def _product(
    workspace: torch.Tensor, slices: torch.Tensor, rank: int, parameters: ChunkedParameters, side_by_side: bool
) -> torch.Tensor:
    """The memory of this rank's matmul, ``[rows, N]``."""
    if parameters.reads:
        return workspace[0]
    return workspace[rank] if side_by_side else slices[rank]


def _prepare(
    a: torch.Tensor,
    matmul: VendorMatmul,
    launch: Launch,
    parameters: ChunkedParameters,
    side_by_side: bool,
    out: torch.Tensor,
) -> _Prepared:
    ranks, rows, columns = launch.world_size, len(a), matmul.columns
    check(a, [matmul], PATTERN, -(-rows // ranks), launch, parameters)
    p, sizes = chunked_plan.fitted_output(ranks, rows, columns, out.element_size(), parameters)
    held = 1 if p.reads else ranks
    workspace = launch.slot.data.local[: held * rows * columns * out.element_size()].view(out.dtype)
    workspace = workspace.view(held, rows, columns)
    product = _product(workspace, _slices(out, ranks, side_by_side), launch.rank, p, side_by_side)
    bands = []
    for number, (stop, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
        start = stop - size
        transfer = Transfer(size, columns, size, scattered=False, origin=start, base=start, index=number, stride=rows)
        send = reads = None
        if p.reads:
            reads = transport_named(PeerReads, p.transport).prepare_reads(launch, transfer, out)
        else:
            send = transport_named(PeerCopies, p.transport).prepare(
                launch, transfer, range(ranks - 1), product, p.share
            )
        bands.append(_Band((start, stop), wait_kernel(launch, transfer, 0, ranks - 1, WAIT_RESULT), send, reads))
    return _Prepared(bands, workspace, spoiling_end(launch, [out]))
