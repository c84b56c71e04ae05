"""Schedule ``fused``: one persistent kernel a site, launched on the current stream.

Each function is the host's part of one kernel: it checks what the kernel rests on, cuts the work into bands and pieces, and launches. It
waits for nothing and allocates nothing but its result and, where a kernel builds tensor maps, memory for those. A group that has been aborted launches nothing more.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.all_gather_matmul import all_gather_matmul as all_gather_matmul_kernel
from overlap_inductor.kernels.matmul_reduce import matmul_reduce
from overlap_inductor.kernels.signals import end_call
from overlap_inductor.lowerings.fused_plan import FusedParameters
from overlap_inductor.lowerings.fused_plan import band_rows
from overlap_inductor.lowerings.fused_plan import needed
from overlap_inductor.lowerings.operands import check_operands
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
    launch.faults.check()


def _with_scratch(device: torch.device, launch: Callable[[], Any]) -> None:
    """Launch a kernel that builds tensor maps in memory that Triton asks for, and leave the caller's allocator as it is."""

    def run() -> None:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
        launch()

    contextvars.copy_context().run(run)


def all_gather_matmul(
    a: torch.Tensor, b: torch.Tensor, launch: Launch, parameters: FusedParameters, bias: torch.Tensor | None = None, keep: bool = False
) -> torch.Tensor:
    """``all_gather(a) @ b + bias``: ``a [rows, K]`` this rank's shard, ``b [K, N]``, ``bias [N]``. Returns ``[world_size * rows, N]``.

    ``keep``: the call does not end with the kernel: ``gathered`` may be read on the same stream until ``end``.

    Raises:
        UnsupportedError: a dtype, layout or slot that the kernel is not made for.
        TransferError: a call of the group before this one gave up waiting, or was aborted.
    """
    p, world_size = parameters, launch.world_size
    rows, inner = a.shape
    columns = b.shape[1]
    part_rows = band_rows(rows, p)
    parts = -(-rows // part_rows)
    _check(a, b, bias, needed("all_gather_matmul", world_size, rows, inner, columns, a.element_size(), p), launch)
    slot = launch.slot
    result = torch.empty(world_size * rows, columns, dtype=a.dtype, device=a.device)
    words = a.view(torch.int32).view(-1)
    right, transposed = right_descriptor(b, p.block_n, p.block_k)
    all_gather_matmul_kernel[(p.blocks,)](
        TensorDescriptor.from_tensor(a, [p.block_m, p.block_k]),
        TensorDescriptor.from_tensor(gathered(a, launch), [p.block_m, p.block_k]),
        right,
        TensorDescriptor.from_tensor(result, [p.block_m, p.block_n // 2 if p.halves else p.block_n]),
        result, result if bias is None else bias, words, slot.data.pointers, slot.flags.pointers, slot.flags.local, slot.queues, slot.calls, launch.faults.stop,
        launch.patience_ns, launch.site, launch.rank, rows, columns, inner, words.numel(), part_rows, part_rows * inner * a.element_size() // 4, slot.signals,
        world_size, parts, p.pieces, p.pushers, p.block_m, p.block_n, p.block_k, p.group_m, COPY_WORDS, TILES_A_BATCH, 32 * p.warps, p.halves,
        transposed, bias is not None, keep,
        num_warps=p.warps, num_stages=p.stages,
    )  # fmt: skip
    return result


def gathered(a: torch.Tensor, launch: Launch) -> torch.Tensor:
    """The workspace of an ``all_gather_matmul`` of shard ``a`` as ``[world_size * rows, K]``; whole only after a call with ``keep``, until ``end``."""
    rows, inner = a.shape
    return launch.slot.data.local[: launch.world_size * a.nbytes].view(a.dtype).view(launch.world_size * rows, inner)


def end(launch: Launch) -> None:
    """End a call that was made with ``keep``: the peers may write into the workspace again."""
    slot = launch.slot
    end_call[(1,)](slot.calls, slot.flags.pointers, launch.rank, launch.world_size, num_warps=1)


def matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, launch: Launch, parameters: FusedParameters, bias: torch.Tensor | None = None, average: bool = False
) -> torch.Tensor:
    """``reduce_scatter(a @ b + bias)`` of rows: ``a [world_size * rows, K]``, ``b [K, N]``, ``bias [N]``. Returns ``[rows, N]``, summed in fp32.

    Raises:
        UnsupportedError, TransferError: as ``all_gather_matmul``.
    """
    return _reduce(a, b, launch, parameters, bias, average, broadcast=False)


def matmul_all_reduce(
    a: torch.Tensor, b: torch.Tensor, launch: Launch, parameters: FusedParameters, bias: torch.Tensor | None = None, average: bool = False
) -> torch.Tensor:
    """``all_reduce(a @ b + bias)``: as ``matmul_reduce_scatter``, returns ``[world_size * rows, N]``."""
    return _reduce(a, b, launch, parameters, bias, average, broadcast=True)


def _reduce(
    a: torch.Tensor, b: torch.Tensor, launch: Launch, p: FusedParameters, bias: torch.Tensor | None, average: bool, broadcast: bool
) -> torch.Tensor:
    world_size, slot = launch.world_size, launch.slot
    all_rows, inner = a.shape
    columns = b.shape[1]
    if all_rows % world_size:
        raise UnsupportedError(f"{all_rows} rows do not fall into {world_size} equal shards")
    rows = all_rows // world_size
    part_rows = band_rows(rows, p)
    parts = -(-rows // part_rows)
    need = needed("matmul_all_reduce" if broadcast else "matmul_reduce_scatter", world_size, rows, inner, columns, a.element_size(), p)
    _check(a, b, bias, need, launch)
    staging = slot.data.local[: need[0]].view(a.dtype)
    out = torch.empty(all_rows if broadcast else rows, columns, dtype=a.dtype, device=a.device)
    right, transposed = right_descriptor(b, p.block_n, p.block_k)
    arguments = (
        TensorDescriptor.from_tensor(a, [p.block_m, p.block_k]),
        right,
        out, out if bias is None else bias, staging, slot.data.pointers, slot.flags.pointers, slot.flags.local, slot.queues, slot.calls, launch.faults.stop,
        launch.patience_ns, launch.site, launch.rank, rows, columns, inner, part_rows, slot.signals, 1.0 / world_size if average else 1.0,
        world_size, parts, min(p.lag, parts) if broadcast else parts, p.copy_lag, broadcast, p.stagger_ns,
        p.block_m, p.block_n, p.block_k, p.group_m, TILES_A_BATCH, 32 * p.warps, p.halves, transposed, bias is not None,
    )  # fmt: skip
    _with_scratch(a.device, lambda: matmul_reduce[(p.blocks,)](*arguments, num_warps=p.warps, num_stages=p.stages))
    return out
