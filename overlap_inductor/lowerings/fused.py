"""Schedule ``fused``: one persistent kernel a site, launched on the current stream.

Each function is the host's part of one kernel. At a site's first call with operands of some shapes and strides it checks what the kernel rests on, cuts the
work into bands and pieces, and prepares the kernel; after that it launches, waits for nothing and allocates nothing but its result. A group that has been
aborted launches nothing more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.all_gather_matmul import all_gather_matmul as all_gather_matmul_kernel
from overlap_inductor.kernels.matmul_reduce import matmul_reduce
from overlap_inductor.lowerings.fused_plan import FusedParameters
from overlap_inductor.lowerings.fused_plan import band_rows
from overlap_inductor.lowerings.fused_plan import needed
from overlap_inductor.lowerings.operands import check_operands
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.copy_engine import prepare_without_kernels
from overlap_inductor.transports.credits import credit_kernel
from overlap_inductor.transports.credits import end_kernel
from overlap_inductor.transports.side_stream import side_stream
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.workspace import Launch

COPY_WORDS = 8192
"""int32 words that a block of the pushing part stores at once."""
TILES_A_BATCH = 8
"""Tiles after which a block waits for its last store (within a batch a store goes on under the next tile's matmul)."""


def right_descriptor(b: torch.Tensor, block_n: int, block_k: int) -> tuple[TensorDescriptor, bool]:
    """``b``'s descriptor, and whether it is the transposed matrix that lies in rows."""
    if b.stride(0) == 1 and b.stride(1) >= b.shape[0]:
        return TensorDescriptor.from_tensor(b.t(), [block_n, block_k]), True
    return TensorDescriptor.from_tensor(b, [block_k, block_n]), False


def _check(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, need: tuple[int, int], launch: Launch) -> None:
    check_operands(a, b, bias)
    nbytes, signals = need
    if nbytes > launch.slot.nbytes or signals > launch.slot.signals:
        raise UnsupportedError(f"the call needs {nbytes} bytes and {signals} signals, its slot has {launch.slot.nbytes} and {launch.slot.signals}")


def _key(pattern: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, parameters: FusedParameters, flag: bool) -> tuple[object, ...]:
    """What a prepared kernel rests on. Raises ``UnsupportedError`` where an operand lies as no kernel reads it."""
    if not a.is_contiguous() or a.data_ptr() % 16:
        raise UnsupportedError(f"the left operand of shape {list(a.shape)}, strides {list(a.stride())} is not contiguous at 16 bytes")
    if b.data_ptr() % 16:
        raise UnsupportedError(f"the right operand of shape {list(b.shape)} does not begin at 16 bytes")
    aligned = None if bias is None else bias.data_ptr() % 16 == 0
    return pattern, a.shape, a.dtype, b.shape, b.stride(), b.dtype, aligned, parameters, flag


def all_gather_matmul(
    a: torch.Tensor, b: torch.Tensor, launch: Launch, parameters: FusedParameters, bias: torch.Tensor | None = None, keep: bool = False
) -> torch.Tensor:
    """``all_gather(a) @ b + bias``: ``a [rows, K]`` this rank's shard, ``b [K, N]``, ``bias [N]``. Returns ``[world_size * rows, N]``.

    ``keep``: the call does not end with the kernel: ``gathered`` may be read on the same stream until ``end``.

    Raises:
        UnsupportedError: a dtype, layout or slot that the kernel is not made for.
        TransferError: a call of the group before this one gave up waiting, or was aborted.
    """
    launch.faults.check()
    result = torch.empty(launch.world_size * a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    key = _key("all_gather_matmul", a, b, bias, parameters, keep)
    kernel = launch.prepared.get(key)
    if kernel is None:
        kernel = _prepare_gather(a, b, result, launch, parameters, bias, keep)
        if keep:
            end_kernel(launch)
        launch.remember(key, kernel)
    arguments = (a, b, result, a, result, result if bias is None else bias)
    if parameters.transport == "sm_push":
        kernel(*arguments)
    else:
        _with_copies(a, launch, parameters, lambda: kernel(*arguments), keep)
    return result


def _with_copies(a: torch.Tensor, launch: Launch, parameters: FusedParameters, multiply: Callable[[], None], keep: bool) -> None:
    """Copy engines send the shard while ``multiply`` multiplies what has come.

    Nothing that they wait for needs an SM while the kernel fills all of them: leave to write is awaited before, on the current stream, and flags are copied,
    too. So a rank's shard leaves whatever its kernel waits for.
    """
    side, key = side_stream(a.device), ("send", a.shape, a.dtype, parameters)
    send = launch.prepared.get(key)
    if send is None:
        rows = a.shape[0]
        transfer = Transfer(rows, a.shape[1], band_rows(rows, launch.world_size, parameters), scattered=False)
        send = prepare_without_kernels(launch, transfer, a)
        launch.remember(key, send)
    credit_kernel(launch)()
    try:
        with side:
            send(a)
            if keep:
                gathered(a, launch)[launch.rank * len(a) : (launch.rank + 1) * len(a)].copy_(a)
        multiply()
    finally:
        side.join()


def _prepare_gather(
    a: torch.Tensor, b: torch.Tensor, result: torch.Tensor, launch: Launch, p: FusedParameters, bias: torch.Tensor | None, keep: bool
) -> PreparedKernel:
    world_size, slot = launch.world_size, launch.slot
    rows, inner = a.shape
    columns = b.shape[1]
    part_rows = band_rows(rows, world_size, p)
    _check(a, b, bias, needed("all_gather_matmul", world_size, rows, inner, columns, a.element_size(), p), launch)
    right, transposed = right_descriptor(b, p.block_n, p.block_k)
    varying = (
        TensorDescriptor.from_tensor(a, [p.block_m, p.block_k]),
        right,
        TensorDescriptor.from_tensor(result, [p.block_m, p.block_n // 2 if p.halves else p.block_n]),
        a, result, result if bias is None else bias,
    )  # fmt: skip
    fixed = (
        TensorDescriptor.from_tensor(gathered(a, launch), [p.block_m, p.block_k]),
        slot.data.pointers, slot.flags.pointers, slot.flags.local, slot.queues, slot.calls, launch.faults.stop,
        launch.patience_ns, launch.site, launch.rank, rows, columns, inner, a.nbytes // 16, part_rows, part_rows * inner * a.element_size() // 16, slot.signals,
        world_size, -(-rows // part_rows), p.transport == "sm_push", p.pieces, p.pushers, p.block_m, p.block_n, p.block_k, p.group_m, COPY_WORDS, TILES_A_BATCH, 32 * p.warps, p.halves,
        transposed, bias is not None, keep,
    )  # fmt: skip
    return PreparedKernel(all_gather_matmul_kernel, p.blocks, varying, fixed, num_warps=p.warps, num_stages=p.stages)


def gathered(a: torch.Tensor, launch: Launch) -> torch.Tensor:
    """The workspace of an ``all_gather_matmul`` of shard ``a`` as ``[world_size * rows, K]``; whole only after a call with ``keep``, until ``end``."""
    rows, inner = a.shape
    return launch.slot.data.local[: launch.world_size * a.nbytes].view(a.dtype).view(launch.world_size * rows, inner)


def end(launch: Launch) -> None:
    """End a call that was made with ``keep``: the peers may write into the workspace again."""
    end_kernel(launch)()


def matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, launch: Launch, parameters: FusedParameters, bias: torch.Tensor | None = None, average: bool = False
) -> torch.Tensor:
    """``reduce_scatter(a @ b + bias)`` of rows: ``a [world_size * rows, K]``, ``b [K, N]``, ``bias [N]``. Returns ``[rows, N]``, summed in fp32.

    Raises:
        UnsupportedError, TransferError: as ``all_gather_matmul``.
    """
    return _reduce("matmul_reduce_scatter", a, b, launch, parameters, bias, average)


def matmul_all_reduce(
    a: torch.Tensor, b: torch.Tensor, launch: Launch, parameters: FusedParameters, bias: torch.Tensor | None = None, average: bool = False
) -> torch.Tensor:
    """``all_reduce(a @ b + bias)``: as ``matmul_reduce_scatter``, returns all rows ``[M, N]``; ``M`` need not be a multiple of the world size."""
    return _reduce("matmul_all_reduce", a, b, launch, parameters, bias, average)


def _reduce(
    pattern: str, a: torch.Tensor, b: torch.Tensor, launch: Launch, parameters: FusedParameters, bias: torch.Tensor | None, average: bool
) -> torch.Tensor:
    launch.faults.check()
    rows = a.shape[0] if pattern == "matmul_all_reduce" else a.shape[0] // launch.world_size
    out = torch.empty(rows, b.shape[1], dtype=a.dtype, device=a.device)
    key = _key(pattern, a, b, bias, parameters, average)
    kernel = launch.prepared.get(key)
    if kernel is None:
        kernel = _prepare_reduce(pattern, a, b, out, launch, parameters, bias, average)
        launch.remember(key, kernel)
    kernel(a, b, out, out if bias is None else bias)
    return out


def _prepare_reduce(
    pattern: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, launch: Launch, p: FusedParameters, bias: torch.Tensor | None, average: bool
) -> PreparedKernel:
    world_size, slot, broadcast = launch.world_size, launch.slot, pattern == "matmul_all_reduce"
    all_rows, inner = a.shape
    columns = b.shape[1]
    if all_rows % world_size and not broadcast:
        raise UnsupportedError(f"{all_rows} rows do not fall into {world_size} equal shards")
    rows = -(-all_rows // world_size)
    part_rows = band_rows(rows, world_size, p)
    parts = -(-rows // part_rows)
    need = needed(pattern, world_size, rows, inner, columns, a.element_size(), p)
    _check(a, b, bias, need, launch)
    right, transposed = right_descriptor(b, p.block_n, p.block_k)
    varying = (TensorDescriptor.from_tensor(a, [p.block_m, p.block_k]), right, out, out if bias is None else bias)
    fixed = (
        slot.data.local[: need[0]].view(a.dtype), slot.data.pointers, slot.flags.pointers, slot.flags.local, slot.queues, slot.calls, launch.faults.stop,
        launch.patience_ns, launch.site, launch.rank, rows, all_rows, columns, inner, part_rows, slot.signals, 1.0 / world_size if average else 1.0,
        world_size, parts, min(p.lag, parts) if broadcast else parts, p.copy_lag, broadcast, p.stagger_ns,
        p.block_m, p.block_n, p.block_k, p.group_m, TILES_A_BATCH, 32 * p.warps, p.halves, transposed, bias is not None,
    )  # fmt: skip
    return PreparedKernel(matmul_reduce, p.blocks, varying, fixed, scratch=a.device, num_warps=p.warps, num_stages=p.stages)
