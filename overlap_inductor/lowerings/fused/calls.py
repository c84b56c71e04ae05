# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused`` launches one persistent kernel for each site, on the current stream.

Each function is the host's part of one kernel. At a site's first call with operands of some shapes and strides it
checks the kernel's requirements, cuts the work into bands and pieces, and prepares the kernel. After that it only
launches, as one CUDA graph if the call is replayed (``runtime.replay``). It never waits for the device. A launch
allocates only its result and, in an all-reduce whose shards are not whole tiles, the tensor that blocks send from. In a
group that was aborted it launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import torch

from overlap_inductor.lowerings.fused.gather import gathered
from overlap_inductor.lowerings.fused.gather import operands
from overlap_inductor.lowerings.fused.gather import own_shard
from overlap_inductor.lowerings.fused.gather import prepare_gather
from overlap_inductor.lowerings.fused.launch import NO_TAIL
from overlap_inductor.lowerings.fused.launch import Tail
from overlap_inductor.lowerings.fused.launch import key_of
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.parameters import copiers
from overlap_inductor.lowerings.fused.parameters import slices_of
from overlap_inductor.lowerings.fused.reduce import prepare_all_reduce
from overlap_inductor.lowerings.fused.reduce import prepare_all_to_all
from overlap_inductor.lowerings.fused.reduce import prepare_reduce_scatter
from overlap_inductor.lowerings.fused.reduce import product_rows
from overlap_inductor.runtime.replay import launched
from overlap_inductor.runtime.side_stream import one_call
from overlap_inductor.runtime.side_stream import side_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.memory import rows_like
from overlap_inductor.transports.credits import credit_kernel
from overlap_inductor.transports.credits import end_kernel
from overlap_inductor.transports.credits import spoil_kernel
from overlap_inductor.transports.credits import spoiling_end
from overlap_inductor.transports.registry import transport_named
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import PeerCopies
from overlap_inductor.transports.transport import Share


def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    launch: Launch,
    parameters: FusedParameters,
    bias: torch.Tensor | None = None,
    keep: bool = False,
) -> torch.Tensor:
    """``all_gather_matmuls`` with one weight."""
    return all_gather_matmuls(a, [b], launch, parameters, [bias], keep)[0]


def all_gather_matmuls(
    a: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    launch: Launch,
    parameters: FusedParameters,
    biases: Sequence[torch.Tensor | None],
    keep: bool = False,
    tail: Tail = NO_TAIL,
) -> list[torch.Tensor]:
    """``all_gather(a) @ b + bias`` for each weight, with its epilogue.

    Args:
        a: this rank's shard, ``[rows, K]``, fp16 or bf16, contiguous and aligned to 16 bytes.
        rhs: 1 to ``MOST_WEIGHTS`` weights ``[K, N]``, all row-major or all transposed (``in_one_launch`` chooses them).
        biases: ``[N]`` or ``None`` for each.
        keep: the call does not end with the kernel; ``gathered`` may be read on the same stream until ``end``.

    Returns:
        ``[world_size * rows, N]`` for each weight.

    Raises:
        UnsupportedError: the kernel does not support a dtype or layout, or the slot is too small.
        TransferError: an earlier call of the group gave up waiting, or was aborted.
    """
    return _multiplied("all_gather_matmul", a, rhs, launch, parameters, biases, keep, tail)


def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    launch: Launch,
    parameters: FusedParameters,
    bias: torch.Tensor | None = None,
    keep: bool = False,
) -> torch.Tensor:
    """``all_to_all_matmuls`` with one weight."""
    return all_to_all_matmuls(a, [b], launch, parameters, [bias], keep)[0]


def all_to_all_matmuls(
    a: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    launch: Launch,
    parameters: FusedParameters,
    biases: Sequence[torch.Tensor | None],
    keep: bool = False,
    tail: Tail = NO_TAIL,
) -> list[torch.Tensor]:
    """``all_to_all(a) @ b + bias`` for each weight: as ``all_gather_matmuls``, but ``a [world_size * rows, K]`` has a
    shard for each rank."""
    return _multiplied("all_to_all_matmul", a, rhs, launch, parameters, biases, keep, tail)


def _multiplied(
    pattern: str,
    a: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    launch: Launch,
    parameters: FusedParameters,
    biases: Sequence[torch.Tensor | None],
    keep: bool,
    tail: Tail,
) -> list[torch.Tensor]:
    """``all_gather_matmuls`` or ``all_to_all_matmuls``."""
    launch.faults.check()
    own = own_shard(pattern, a, launch)
    results = [rows_like(a, launch.world_size * own.shape[0], b.shape[1], a.dtype) for b in rhs]
    # (Results are contiguous, and the operands determine their sizes: only their addresses may change.)
    what = ("fused", pattern, parameters, keep, tail.epilogues, *[r.data_ptr() for r in results])
    copied = [a] if own.nbytes >= parameters.copies_from else []
    launched(
        launch,
        what,
        [a, *rhs, *biases, *tail.extras],
        lambda: _gather(pattern, a, own, rhs, results, launch, parameters, biases, keep, tail),
        parameters.replays,
        copied,
    )
    return results


def _gather(
    pattern: str,
    a: torch.Tensor,
    own: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    launch: Launch,
    parameters: FusedParameters,
    biases: Sequence[torch.Tensor | None],
    keep: bool,
    tail: Tail,
) -> None:
    """The launches of one call, into ``results``, each ``[world_size * rows, N]``. Raises ``UnsupportedError``."""
    slices = slices_of(launch.world_size, own, rhs, parameters)
    copied = slices == 1 and own.nbytes >= parameters.copies_from
    key = key_of(pattern, a, rhs, biases, tail, parameters, keep)
    kernel = launch.prepared.get(key)
    if kernel is None:
        kernel = prepare_gather(pattern, a, own, rhs, results, launch, parameters, biases, keep, tail, copied, slices)
        if keep:
            end_kernel(launch)
        launch.remember(key, kernel)
    given = operands(a, own, rhs, results, biases, tail)
    if not copied:
        kernel(*given)
    else:
        with_copies(a, own, len(own), launch, parameters, lambda: kernel(*given), keep)
        # (With ``keep``, ``end`` does this once all of the call's results exist.)
        for result in results if not keep else ():
            spoil_kernel(launch, result)(result)


def with_copies(
    a: torch.Tensor,
    own: torch.Tensor,
    part_rows: int,
    launch: Launch,
    p: FusedParameters,
    multiply: Callable[[], None],
    keep: bool,
) -> None:
    """A transport of ``copiers`` sends the shard (in an all-to-all: each peer's shard) in bands of ``part_rows`` rows.
    In the meantime, ``multiply`` multiplies the rows that have arrived.

    The kernel of ``multiply`` occupies every SM, so nothing that the copies wait for may need an SM while it runs. The
    wait for permission to write therefore ends before that kernel starts, on the current stream, and the flags are
    written by copies, too. So a rank's shard is sent whatever its kernel waits for.
    """
    side, key = side_stream(a.device), ("send", p.copier, a.shape, a.dtype, part_rows)
    send = launch.prepared.get(key)
    if send is None:
        transport = transport_named(PeerCopies, p.copier or copiers()[0].name)
        exchanged = own is not a
        transfer = Transfer(len(own), own.shape[1], part_rows, scattered=exchanged, read_in_order=exchanged)
        send = transport.prepare(launch, transfer, range((launch.world_size - 1) * transfer.parts), a, Share())
        launch.remember(key, send)
    credit_kernel(launch)()
    with one_call(launch, side):
        with side:
            send(a)
            if keep:
                gathered(own, launch)[launch.rank * len(own) : (launch.rank + 1) * len(own)].copy_(own)
        multiply()


def end(launch: Launch, results: Sequence[torch.Tensor] = ()) -> None:
    """End a call that was made with ``keep``: the peers may write into the workspace again. ``results``: the call's
    results, including those computed from ``gathered``. They are set to NaN if the group was aborted."""
    if results:
        spoiling_end(launch, results)(results)
    else:
        end_kernel(launch)()


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    launch: Launch,
    parameters: FusedParameters,
    bias: torch.Tensor | None = None,
    average: bool = False,
    tail: Tail = NO_TAIL,
) -> torch.Tensor:
    """``reduce_scatter(a @ b + bias)`` of rows, with its epilogue.

    Args:
        a: ``[world_size * rows, K]``, fp16 or bf16, contiguous and aligned to 16 bytes.
        b: ``[K, N]``, row-major or column-major, with rows or columns of whole 16-byte words.
        bias: ``[N]``.
        average: divide the sum by the number of ranks.

    Returns:
        ``[rows, N]``, summed over ranks in fp32.

    Raises:
        UnsupportedError, TransferError: as ``all_gather_matmul``.
    """
    launch.faults.check()
    out = rows_like(a, a.shape[0] // launch.world_size, b.shape[1], a.dtype)

    def start() -> None:
        key = key_of("matmul_reduce_scatter", a, [b], [bias], tail, parameters, average)
        kernel = launch.prepared.get(key)
        if kernel is None:
            kernel = prepare_reduce_scatter(a, b, out, launch, parameters, bias, average, tail)
            launch.remember(key, kernel)
        kernel(a, b, out, out if bias is None else bias, *tail.operands)

    what = ("fused", "matmul_reduce_scatter", parameters, average, tail.epilogues, out.data_ptr())
    launched(launch, what, [a, b, bias, *tail.extras], start, parameters.replays)
    return out


def matmul_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    launch: Launch,
    parameters: FusedParameters,
    bias: torch.Tensor | None = None,
    by_columns: bool = False,
) -> torch.Tensor:
    """``all_to_all(a @ b + bias)`` of rows, or ``by_columns`` of columns.

    Args:
        a: ``[world_size * rows, K]``, with a slice of rows for each rank; ``[rows, K]`` if the slices are columns.
            Otherwise as in ``matmul_reduce_scatter``, like ``b`` and ``bias``.

    Returns:
        ``[world_size * rows, width]``: a slice from each rank, in the order of ranks.

    Raises:
        UnsupportedError, TransferError: as ``all_gather_matmul``.
    """
    launch.faults.check()
    cut = launch.world_size if by_columns else 1
    out = rows_like(a, a.shape[0] * cut, b.shape[1] // cut, a.dtype)

    def start() -> None:
        key = key_of("matmul_all_to_all", a, [b], [bias], NO_TAIL, parameters, by_columns)
        kernel = launch.prepared.get(key)
        if kernel is None:
            kernel = prepare_all_to_all(a, b, out, launch, parameters, bias, by_columns)
            launch.remember(key, kernel)
        kernel(a, b, out, out if bias is None else bias)

    what = ("fused", "matmul_all_to_all", parameters, by_columns, out.data_ptr())
    launched(launch, what, [a, b, bias], start, parameters.replays)
    return out


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    launch: Launch,
    parameters: FusedParameters,
    bias: torch.Tensor | None = None,
    average: bool = False,
    tail: Tail = NO_TAIL,
) -> torch.Tensor:
    """``all_reduce(a @ b + bias)``: as ``matmul_reduce_scatter``, but ``a [M, K]`` may have any number of rows. Returns
    ``[M, N]``."""
    launch.faults.check()
    rows = a.shape[0]
    out = rows_like(a, rows, b.shape[1], a.dtype)
    sent_from = product_rows(-(-rows // launch.world_size), launch.world_size, parameters)
    # (If a shard is a whole number of tiles, the product is written into ``out`` itself. A peer's finished rows replace
    # this rank's partial rows only after the peer has received the partial rows. This rank's own rows are summed in
    # place.)
    product = out if sent_from == rows else rows_like(a, sent_from, b.shape[1], a.dtype)

    def start() -> None:
        key = key_of("matmul_all_reduce", a, [b], [bias], tail, parameters, average)
        kernel = launch.prepared.get(key)
        if kernel is None:
            kernel = prepare_all_reduce(a, b, product, out, launch, parameters, bias, average, tail)
            launch.remember(key, kernel)
        kernel(a, b, product, out, out if bias is None else bias, *tail.operands)

    what = ("fused", "matmul_all_reduce", parameters, average, tail.epilogues, product.data_ptr(), out.data_ptr())
    launched(launch, what, [a, b, bias, *tail.extras], start, parameters.replays)
    return out
