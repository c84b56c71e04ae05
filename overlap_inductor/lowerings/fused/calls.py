# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused`` launches one persistent kernel for each site, on the current stream. If a transport copies the
shard, further launches come with the kernel (``received``).

The first call with new shapes or strides of the operands prepares the launches. Later calls with these shapes and
strides only make the launches, as one CUDA graph if the call is replayed (``runtime.replay``). No call waits for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.lowerings.fused.gather import prepare_gather
from overlap_inductor.lowerings.fused.launch import NO_TAIL
from overlap_inductor.lowerings.fused.launch import Tail
from overlap_inductor.lowerings.fused.launch import key_of
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.received import Received
from overlap_inductor.lowerings.fused.received import gathered as gathered
from overlap_inductor.lowerings.fused.received import multiply
from overlap_inductor.lowerings.fused.received import own_shard as own_shard
from overlap_inductor.lowerings.fused.reduce import prepare_all_reduce
from overlap_inductor.lowerings.fused.reduce import prepare_all_to_all
from overlap_inductor.lowerings.fused.reduce import prepare_reduce_scatter
from overlap_inductor.lowerings.fused.reduce import product_rows
from overlap_inductor.runtime.replay import launched
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.memory import rows_like
from overlap_inductor.transports.credits import end_kernel
from overlap_inductor.transports.credits import spoiling_end


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
        biases: for each weight, ``[N]`` or ``None``.
        keep: if true, the kernel does not end the call. The gathered rows (function ``gathered``) may be read on the
            same stream until ``end`` is called.

    Returns:
        ``[world_size * rows, N]`` for each weight.

    Raises:
        UnsupportedError: the kernel does not support a dtype or layout, or ``launch.slot`` is too small. The slot is
            the part of the workspace that the call uses.
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
    launch.faults.check()
    own = own_shard(pattern, a, launch)
    results = [rows_like(a, launch.world_size * own.shape[0], b.shape[1], a.dtype) for b in rhs]
    multiply(Received(pattern, a, own, rhs, biases, results, keep, tail), launch, parameters, prepare_gather)
    return results


def end(launch: Launch, results: Sequence[torch.Tensor] = ()) -> None:
    """End a call that was made with ``keep``: the peers may write into the workspace again. ``results``, also those
    computed from ``gathered``, are set to NaN if the group was aborted."""
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
        average: divide the sum by the number of ranks.

    Returns:
        ``[rows, N]``, summed over ranks in fp32.

    Raises:
        UnsupportedError, TransferError: as ``all_gather_matmuls``.
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
    """``all_to_all(a @ b + bias)`` of rows, or of columns if ``by_columns``. Operands and errors as in
    ``matmul_reduce_scatter``, but ``a [rows, K]`` if ``by_columns``.

    Returns:
        ``[world_size * rows, width]``: a slice from each rank, in the order of ranks.
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
    # If a shard is a whole number of tiles, ``out`` also holds the product. A peer's finished rows overwrite this
    # rank's partial rows only after the peer has received the partial rows. This rank sums its own rows in place.
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
