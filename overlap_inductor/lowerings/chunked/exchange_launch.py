# SPDX-License-Identifier: Apache-2.0
"""``matmul -> all-to-all`` in schedule ``chunked``. Rows are multiplied and sent in the same order as for a
reduce-scatter (``reduce_launch``), but nothing is summed. The product is stored with each rank's slice as a run of
rows, even if a slice consists of columns of ``a @ b`` (``SlicedMatmul``). So the product is never permuted for the
exchange.

The result has the product's memory: the slice from a rank takes the place of the slice for that rank. The copy out of
the workspace runs after the join with the side stream. So each slice has been sent before it is overwritten.

With copy engines, W ranks and C chunks, a call has about ``2 * W + 2 * C + 5`` launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked.checks import check
from overlap_inductor.lowerings.chunked.gather_launch import End
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.chunked.parameters import Range
from overlap_inductor.lowerings.chunked.reduce_launch import sent_chunks
from overlap_inductor.lowerings.one_op.vendor_matmul import SlicedMatmul
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.runtime.replay import launched
from overlap_inductor.runtime.side_stream import one_call
from overlap_inductor.runtime.side_stream import side_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import blas
from overlap_inductor.torch_compat.memory import rows_like
from overlap_inductor.transports.arrivals import receive_kernel
from overlap_inductor.transports.credits import credit_kernel
from overlap_inductor.transports.credits import spoiling_end
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import Send


@dataclass(frozen=True)
class _Sent:
    """A prepared call.

    Attributes:
        chunks: for each chunk, the ranges of rows to multiply, and the function that sends the chunk's
            rows for other ranks.
        own: range of this rank's own slice; ``None`` if a chunk contains it.
        receive: copies the other ranks' slices into the product when they have arrived.
    """

    chunks: list[tuple[list[Range], Send]]
    own: Range | None
    receive: Callable[[torch.Tensor], None]
    end: End


def matmul_all_to_all(
    a: torch.Tensor, matmul: VendorMatmul, launch: Launch, parameters: ChunkedParameters
) -> torch.Tensor:
    """``all_to_all(a @ b + bias)`` of rows; of columns if ``matmul`` is a ``SlicedMatmul``.

    Args:
        a: ``[world_size * rows, K]``, or ``[rows, K]`` if the slices are columns; fp16 or bf16.

    Returns:
        ``[world_size * rows, width]``: a slice from each rank, in the order of ranks.

    Raises:
        UnsupportedError, TransferError: as ``gather_launch.all_gather_matmul``.
    """
    launch.faults.check()
    world_size, by_columns = launch.world_size, isinstance(matmul, SlicedMatmul)
    rows = len(a) if by_columns else len(a) // world_size
    cut, what = (matmul.b.shape[1], "columns") if by_columns else (len(a), "rows")
    if cut % world_size:
        raise UnsupportedError(f"{cut} {what} cannot be cut into {world_size} equal slices")
    product = rows_like(a, world_size * rows, matmul.columns, matmul.dtype(a))
    tensors = [a, product, *matmul.operands]
    settings = ("chunked", "matmul_all_to_all", by_columns, parameters, blas.switches())
    launched(
        launch,
        settings,
        tensors,
        lambda: _send_into(a, matmul, launch, parameters, product),
        parameters.replays,
        tensors,
    )
    return product


def _send_into(
    a: torch.Tensor, matmul: VendorMatmul, launch: Launch, parameters: ChunkedParameters, product: torch.Tensor
) -> None:
    by_columns = isinstance(matmul, SlicedMatmul)
    key = ("chunked", "matmul_all_to_all", a.shape, a.dtype, product.shape, parameters)
    call = launch.prepared.get(key)
    if call is None:
        call = _prepare(a, matmul, launch, parameters, product)
        launch.remember(key, call)
    credits, side = credit_kernel(launch), side_stream(a.device)

    def multiply(start: int, stop: int) -> None:
        matmul(a if by_columns else a[start:stop], start, stop, product)

    with one_call(launch, side):
        for number, (ranges, send) in enumerate(call.chunks):
            for rows in ranges:
                multiply(*rows)
            if number == 0:
                # This wait is short: after the first chunk's matmul, the peers have usually ended their previous call.
                credits()
            with side:
                send(product)
        if call.own is not None:
            multiply(*call.own)
        side.join()
        call.receive(product)
    call.end([product])


def _prepare(
    a: torch.Tensor, matmul: VendorMatmul, launch: Launch, parameters: ChunkedParameters, product: torch.Tensor
) -> _Sent:
    world_size, (all_rows, width) = launch.world_size, product.shape
    rows, itemsize = all_rows // world_size, product.element_size()
    check(a, [matmul], "matmul_all_to_all", rows, launch, parameters)
    p = chunked_plan.fitted(
        "matmul_all_to_all", world_size, rows, matmul.inner, width, itemsize, a.element_size(), parameters
    )
    transfer = Transfer(rows, width, chunked_plan.part_rows_of(rows, world_size, p), scattered=True)
    workspace = launch.slot.data.local.view(product.dtype)
    own = None if p.chunks == 0 else (launch.rank * rows, (launch.rank + 1) * rows)
    receive = receive_kernel(launch, product, workspace, transfer, p.sms)
    return _Sent(sent_chunks(launch, transfer, p, product), own, receive, spoiling_end(launch, [product]))
