# SPDX-License-Identifier: Apache-2.0
"""``matmul -> all-gather`` of the matmul's result in schedule ``chunked`` (the sharded head of a language model). The
rows are cut into bands (``output_sizes``)::

    for each band: product[band] = a[band] @ b + bias; send product[band] to every peer   # under the next matmul
    for each band: wait; result[band] = the peers' bands, from the workspace

Each band is a run of rows, so each copy to a peer is one run of bytes, and the vendor's matmul sums over all of K.

The result may have the ranks' slices one below the other, as the collective gives them, or side by side, as the
program's ``cat`` after the collective arranges them. The copy out of the workspace writes either order, so a program's
``cat`` costs nothing more. With slices one below the other, the product is a part of the result. With slices side by
side, the product is this rank's own slice in its own workspace. No peer ever writes there during the call: a call
writes its sender's slice only. An earlier call has ended before this one begins, and a peer starts a later one only
with this call's credit, which follows the copies and the join with the side stream.

Memory ordering. A send begins after the band's matmul (``SideStream``), and sets a flag behind its rows
(``transports``). A kernel waits for the flags of a band. Later work on its stream, the copy out of the workspace, sees
the rows (``kernels.transfer``).

Forward progress. All ranks launch the same steps: a band's matmul, then its sends, and the waits last. Loading a
vendor's matmul waits for earlier work on this rank. That is only the wait for credits and earlier sends, which depend
on no wait of this call but turns (``kernels.transfer``).

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
from overlap_inductor.transports.transport import Send

PATTERN = "matmul_all_gather"


@dataclass(frozen=True)
class _Band:
    """A prepared band: its rows, the function that sends them, and the kernel that waits for the peers' bands."""

    rows: Range
    send: Send
    wait: PreparedKernel


@dataclass(frozen=True)
class _Prepared:
    """A prepared call. ``workspace [world_size, rows, N]``: the memory in which the slices arrive."""

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
    rank, (ranks, rows, _) = launch.rank, call.workspace.shape
    product = call.workspace[rank] if side_by_side else _slices(out, ranks, rows, False)[rank]
    # Copies of words of 8 bytes take fewer instructions than copies of elements.
    arrived, result = call.workspace.view(torch.int64), _slices(out.view(torch.int64), ranks, rows, side_by_side)
    # If the product is a part of the result, only the peers' slices are copied.
    copied = [slice(None)] if side_by_side else [slice(0, rank), slice(rank + 1, ranks)]
    credits, side = credit_kernel(launch), side_stream(a.device)
    with one_call(launch, side):
        for number, band in enumerate(call.bands):
            start, stop = band.rows
            matmul(a[start:stop], start, stop, product)
            if number == 0:
                # This wait is short: after the first band's matmul, the peers have usually ended their previous call.
                credits()
            with side:
                band.send(product)
        for band in call.bands:
            band.wait()
            for those in copied:
                if those.start is None or those.start < those.stop:
                    result[those, slice(*band.rows)].copy_(arrived[those, slice(*band.rows)])
    call.end([out])


def _slices(out: torch.Tensor, ranks: int, rows: int, side_by_side: bool) -> torch.Tensor:
    """A view ``[ranks, rows, width of a slice]`` of the result."""
    return out.view(rows, ranks, -1).transpose(0, 1) if side_by_side else out.view(ranks, rows, -1)


def _prepare(
    a: torch.Tensor,
    matmul: VendorMatmul,
    launch: Launch,
    parameters: ChunkedParameters,
    side_by_side: bool,
    out: torch.Tensor,
) -> _Prepared:
    ranks, rank, rows, columns = launch.world_size, launch.rank, len(a), matmul.columns
    check(a, [matmul], PATTERN, -(-rows // ranks), launch, parameters)
    p, sizes = chunked_plan.fitted_output(ranks, rows, columns, out.element_size(), parameters)
    workspace = launch.slot.data.local[: ranks * rows * columns * out.element_size()].view(out.dtype)
    workspace = workspace.view(ranks, rows, columns)
    product = workspace[rank] if side_by_side else _slices(out, ranks, rows, False)[rank]
    transport, bands = transport_named(PeerCopies, p.transport), []
    for number, (stop, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
        start = stop - size
        transfer = Transfer(size, columns, size, scattered=False, origin=start, base=start, index=number, stride=rows)
        send = transport.prepare(launch, transfer, range(ranks - 1), product, p.share)
        bands.append(_Band((start, stop), send, wait_kernel(launch, transfer, 0, ranks - 1, WAIT_RESULT)))
    return _Prepared(bands, workspace, spoiling_end(launch, [out]))
