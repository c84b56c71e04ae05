"""Schedule ``fused``: one persistent kernel a site, launched on the current stream.

Each function is the host's part of one kernel: it checks what the kernel rests on, cuts the work into bands and pieces, and launches. It
waits for nothing and allocates nothing but its result. A group that has been aborted launches nothing more.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.all_gather_matmul import all_gather_matmul as all_gather_matmul_kernel
from overlap_inductor.kernels.matmul_reduce import matmul_reduce
from overlap_inductor.transports.arena import Slot
from overlap_inductor.transports.faults import FaultRecord

COPY_WORDS = 8192
"""int32 words that a block of the pushing part stores at once."""
TILES_A_BATCH = 8
"""Tiles after which a block waits for its last store (within a batch a store goes on under the next tile's matmul)."""


@dataclass(frozen=True)
class FusedParameters:
    """What may be tuned. ``blocks``: grid, at best the number of SMs. ``parts``: bands a shard. ``pieces``: pieces that a part is pushed in, and
    ``pushers``: blocks that push before they multiply (all-gather only)."""

    blocks: int
    parts: int = 1
    pieces: int = 16
    pushers: int = 8
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    warps: int = 8
    stages: int = 3
    lag: int = 1
    copy_lag: int = 2
    stagger_ns: int = 0
    halves: bool = False


@dataclass(frozen=True)
class Launch:
    """Where a site's kernel runs: this rank of a group, its slot, the group's fault record and the site's number in it, the patience of waits in ns."""

    rank: int
    world_size: int
    slot: Slot
    faults: FaultRecord
    site: int
    patience_ns: int


def band_rows(rows: int, parameters: FusedParameters) -> int:
    """Rows of a band: a multiple of the tile, so that no tile waits for two bands."""
    tiles = -(-rows // parameters.block_m)
    return -(-tiles // min(parameters.parts, tiles)) * parameters.block_m


def _right_operand(b: torch.Tensor) -> torch.Tensor:
    if b.stride(0) != 1:
        raise UnsupportedError(f"the right operand of shape {list(b.shape)} has strides {list(b.stride())}; expected a transposed weight, stride 1 along K")
    return b.t()


def _check(a: torch.Tensor, b: torch.Tensor, nbytes: int, signals: int, launch: Launch) -> None:
    if a.dtype != b.dtype or a.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(f"a fused kernel multiplies two matrices of fp16 or bf16, not {a.dtype} and {b.dtype}")
    if not a.is_contiguous() or a.shape[1] % 8 or a.data_ptr() % 16:
        raise UnsupportedError(f"the left operand of shape {list(a.shape)}, strides {list(a.stride())} does not lie in whole 16-byte rows")
    if nbytes > launch.slot.nbytes or signals > launch.slot.signals:
        raise UnsupportedError(f"the call needs {nbytes} bytes and {signals} signals, its slot has {launch.slot.nbytes} and {launch.slot.signals}")
    launch.faults.check()


def _with_scratch(device: torch.device, launch: Callable[[], Any]) -> None:
    """Launch a kernel that builds tensor maps in memory that Triton asks for, and leave the caller's allocator as it is."""

    def run() -> None:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
        launch()

    contextvars.copy_context().run(run)


def all_gather_matmul(a: torch.Tensor, b: torch.Tensor, launch: Launch, parameters: FusedParameters) -> torch.Tensor:
    """``all_gather(a) @ b``: ``a [rows, K]`` this rank's shard, ``b [K, N]`` with stride 1 along K. Returns ``[world_size * rows, N]``.

    Raises:
        UnsupportedError: a dtype, layout or slot that the kernel is not made for.
        TransferError: a call of the group before this one gave up waiting, or was aborted.
    """
    p, world_size = parameters, launch.world_size
    rows, inner = a.shape
    columns = b.shape[1]
    part_rows = band_rows(rows, p)
    parts = -(-rows // part_rows)
    nbytes = world_size * rows * inner * a.element_size()
    _check(a, b, nbytes, parts, launch)
    slot = launch.slot
    workspace = slot.data.local[:nbytes].view(a.dtype).view(world_size * rows, inner)
    result = torch.empty(world_size * rows, columns, dtype=a.dtype, device=a.device)
    words = a.view(torch.int32).view(-1)
    all_gather_matmul_kernel[(p.blocks,)](
        TensorDescriptor.from_tensor(a, [p.block_m, p.block_k]),
        TensorDescriptor.from_tensor(workspace, [p.block_m, p.block_k]),
        TensorDescriptor.from_tensor(_right_operand(b), [p.block_n, p.block_k]),
        TensorDescriptor.from_tensor(result, [p.block_m, p.block_n // 2 if p.halves else p.block_n]),
        result, words, slot.data.pointers, slot.flags.pointers, slot.flags.local, slot.queues, slot.calls, launch.faults.stop,
        launch.patience_ns, launch.site, launch.rank, rows, columns, inner, words.numel(), part_rows, part_rows * inner * a.element_size() // 4, slot.signals,
        world_size, parts, p.pieces, p.pushers, p.block_m, p.block_n, p.block_k, p.group_m, COPY_WORDS, TILES_A_BATCH, 32 * p.warps, p.halves,
        num_warps=p.warps, num_stages=p.stages,
    )  # fmt: skip
    return result


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, launch: Launch, parameters: FusedParameters, average: bool = False) -> torch.Tensor:
    """``reduce_scatter(a @ b)`` of rows: ``a [world_size * rows, K]``, ``b [K, N]`` with stride 1 along K. Returns ``[rows, N]``, summed in fp32.

    Raises:
        UnsupportedError: as ``all_gather_matmul``.
    """
    return _reduce(a, b, launch, parameters, average, broadcast=False)


def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, launch: Launch, parameters: FusedParameters, average: bool = False) -> torch.Tensor:
    """``all_reduce(a @ b)``: ``a [world_size * rows, K]``, ``b [K, N]`` with stride 1 along K. Returns ``[world_size * rows, N]``, summed in fp32.

    Raises:
        UnsupportedError: as ``all_gather_matmul``.
    """
    return _reduce(a, b, launch, parameters, average, broadcast=True)


def _reduce(a: torch.Tensor, b: torch.Tensor, launch: Launch, p: FusedParameters, average: bool, broadcast: bool) -> torch.Tensor:
    world_size, slot = launch.world_size, launch.slot
    all_rows, inner = a.shape
    columns = b.shape[1]
    if all_rows % world_size:
        raise UnsupportedError(f"{all_rows} rows do not fall into {world_size} equal shards")
    rows = all_rows // world_size
    part_rows = band_rows(rows, p)
    parts = -(-rows // part_rows)
    nbytes = (2 if broadcast else 1) * world_size * -(-rows // p.block_m) * p.block_m * columns * a.element_size()
    _check(a, b, nbytes, 2 * parts, launch)
    staging = slot.data.local[:nbytes].view(a.dtype)
    out = torch.empty(all_rows if broadcast else rows, columns, dtype=a.dtype, device=a.device)
    arguments = (
        TensorDescriptor.from_tensor(a, [p.block_m, p.block_k]),
        TensorDescriptor.from_tensor(_right_operand(b), [p.block_n, p.block_k]),
        out, staging, slot.data.pointers, slot.flags.pointers, slot.flags.local, slot.queues, slot.calls, launch.faults.stop,
        launch.patience_ns, launch.site, launch.rank, rows, columns, inner, part_rows, slot.signals, 1.0 / world_size if average else 1.0,
        world_size, parts, min(p.lag, parts) if broadcast else parts, p.copy_lag, broadcast, p.stagger_ns, p.block_m, p.block_n, p.block_k, p.group_m, TILES_A_BATCH, 32 * p.warps, p.halves,
    )  # fmt: skip
    _with_scratch(a.device, lambda: matmul_reduce[(p.blocks,)](*arguments, num_warps=p.warps, num_stages=p.stages))
    return out
