# SPDX-License-Identifier: Apache-2.0
"""A candidate for decode: the matmul of few rows and its all-reduce in one kernel. ``bench.small_message`` compares it
with schedule ``small_message``. The better one stays, and the other is deleted.

The product of a tile goes from the registers of the matmul to the peers (GEMV + AllReduce of Punniyamurthy et al.,
arXiv 2305.06942, which has the two-shot form). A tile is all rows (at most ``MOST_ROWS``) of ``BLOCK_N`` columns. With
``SPLITS`` above 1, that many blocks share the inner dimension of a tile. They store their products in this GPU's
memory, in fp32. The block that stores last sums the products in a fixed order, and only this block goes on. The product
is then rounded to the operands' dtype, as in ``keep``.

One-shot: every rank stores the tile into every peer's workspace, and sums all ranks' tiles. Two-shot: tile ``t``
belongs to rank ``t % WORLD``, its owner. The owner gets all partial tiles, sums them, and stores the sum into every
peer's workspace. Sums are in fp32, in the order of the ranks, rounded once, so all ranks get the same bits.

A half of the workspace is ``[WORLD, rows, columns]``: what has arrived from each source. In two-shot a rank that does
not own a tile gets only the sum, from the owner. The sum lies where the owner's partial tile would lie, so
``signal_flag(s, t)`` is the only flag for tile ``t`` from source ``s``.

Forward progress. A block waits for flags of its own tile only, and it stores what its peers wait for before it waits.
(In two-shot, the owner stores its sum after a wait for partial tiles, which are stored without any wait.) The blocks of
a tile have neighbouring numbers, and only the last of them to arrive waits. Take the lowest tile that has not ended on
some rank. Blocks start in the order of their numbers, and all lower tiles have ended on every rank. So the blocks of
this tile run or have ended on every rank: its partial tiles are stored, its waits succeed, and it ends. So one resident
block on each rank is enough. As in ``kernels.small_message``, CUDA does not promise this order of starts, but GPUs keep
it. Nothing depends on the order when all blocks are resident at once, as for the measured sizes. All waits are bounded
(``kernels.signals``).

Why two halves suffice without credits (``runtime.arena.HALVES``). The reason is that of ``kernels.small_message``, with
one more step in two-shot. In two-shot, a rank ends call ``n - 1`` when it has got the sum of each tile. The owner of a
tile has waited for the partial tile of each rank. So each peer had begun its call ``n - 1``, and had therefore ended
call ``n - 2``. Calls of ``small_message`` may use the same slot, because halves and call numbers belong to the slot.

Aborts (``kernels.signals``). A block looks at the abort word after its matmul, before it stores to peers, and after
each wait. If the word is set, nothing is stored to peers or signalled, and the result is NaN.

Memory ordering. Operands are read by bulk copies, and only kernels before this one on the stream wrote them. Partial
tiles: ordinary stores, ``signal_ranks`` (release), ``wait_for_all`` (acquire), ordinary loads that bypass L1. Products
of the blocks of a tile: ordinary stores, a barrier, one thread's acquire-release add, a barrier, loads that bypass L1.

CUDA graphs. The number of the call is read from device memory, and the last block that has read it increments it
(``count_call``). The counters of the tiles are zero between calls. No argument changes from replay to replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.group_signals import signal_ranks
from overlap_inductor.kernels.group_signals import wait_for_all
from overlap_inductor.kernels.signals import FLAG_WORDS
from overlap_inductor.kernels.signals import QUEUE_WORDS
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_PARTIALS
from overlap_inductor.kernels.signals import WAIT_RESULT
from overlap_inductor.kernels.signals import look
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import unless_aborted
from overlap_inductor.kernels.small_message import count_call
from overlap_inductor.kernels.small_message import finished_sum
from overlap_inductor.kernels.small_message import flag_word
from overlap_inductor.kernels.small_message import workspaces
from overlap_inductor.lowerings.one_op.descriptors import right_descriptor
from overlap_inductor.lowerings.small_message import parameters as small_plan
from overlap_inductor.runtime.arena import HALVES
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.call_arguments import call_arguments

MOST_ROWS = 64
LEAST_BLOCK_M = 16
"""Rows to which ``tl.dot`` is padded at least."""
BLOCK_K = 128
MOST_STAGES = 8
SHARED_BYTES = 192 << 10
"""Shared memory of an SM that steps may take."""
WIDE_TILE = 4096
"""Elements above which a tile takes eight warps. Four warps could not hold the tiles of eight ranks in registers."""


@triton.jit
def _rank_sum(own, came, stride, at, inside, rank, number, WORLD: tl.constexpr):
    """``number`` times the sum of the ranks' tiles. This rank's is ``own``, that of source ``s`` is at
    ``came + s * stride``."""
    parts = ()
    for s in tl.static_range(WORLD):
        parts = parts + (tl.load(came + s * stride + at, mask=inside & (rank != s), other=0.0, cache_modifier=".cg"),)
    # All loads first, so that their latencies overlap.
    total = tl.where(rank == 0, own, parts[0]).to(tl.float32)
    for s in tl.static_range(1, WORLD):
        total += tl.where(rank == s, own, parts[s]).to(tl.float32)
    return (total * number).to(own.dtype)


@triton.jit
def _exchange(
    own, tile, call, at, inside, out, staging, peer_data, peer_flags, flags, queues, calls, stop, patience,
    site, rank, stride, half, signals,
    WORLD: tl.constexpr, TWO_SHOT: tl.constexpr,
):  # fmt: skip
    """All-reduce one tile: ``own`` is this rank's, and the sum is stored to ``out + at`` where ``inside``."""
    mine = (call & 1).to(tl.int64) * half
    first = signal_flag(flags, 0, tile, signals, WORLD)
    word = flag_word(rank, tile, signals, WORLD)
    there = mine + rank.to(tl.int64) * stride
    partials = site * WAIT_KINDS + WAIT_PARTIALS
    to = workspaces(peer_data, rank, out, WORLD)
    looked = look(stop)
    if not TWO_SHOT:
        for step in tl.static_range(1, WORLD):
            tl.store(to[step] + there + at, own, mask=inside & (looked == 0))
        signal_ranks(peer_flags, word, call + 1, rank, looked, WORLD)
        count_call(calls, queues, call, "relaxed")
        wait_for_all(first, call + 1, WORLD, 1, signals * FLAG_WORDS, rank, stop, patience, partials, 0)
        summed = _rank_sum(own, staging + mine, stride, at, inside, rank, unless_aborted(1.0, stop), WORLD)
        tl.store(out + at, summed, mask=inside)
    elif rank == tile % WORLD:
        wait_for_all(first, call + 1, WORLD, 1, signals * FLAG_WORDS, rank, stop, patience, partials, 0)
        looked = look(stop)
        number = tl.where(looked == 0, 1.0, float("nan"))
        summed = _rank_sum(own, staging + mine, stride, at, inside, rank, number, WORLD)
        for step in tl.static_range(1, WORLD):
            tl.store(to[step] + there + at, summed, mask=inside & (looked == 0))
        signal_ranks(peer_flags, word, call + 1, rank, looked, WORLD)
        count_call(calls, queues, call, "relaxed")
        tl.store(out + at, summed, mask=inside)
    else:
        owner = tile % WORLD
        base = tl.multiple_of(tl.load(peer_data + owner).to(out.dtype), 16)
        tl.store(base + there + at, own, mask=inside & (looked == 0))
        # From ``owner`` on, the table is taken to have one rank, so only the owner gets this signal.
        signal_ranks(peer_flags + owner, word, call + 1, -1, looked, 1)
        count_call(calls, queues, call, "relaxed")
        flag = signal_flag(flags, owner, tile, signals, WORLD)
        wait_for_all(flag, call + 1, 1, 1, 0, -1, stop, patience, site * WAIT_KINDS + WAIT_RESULT, owner)
        summed = finished_sum(staging + mine + owner.to(tl.int64) * stride, at, inside, look(stop))
        tl.store(out + at, summed, mask=inside)


@triton.jit(do_not_specialize=["rank", "site", "rows", "eights", "signals"])
def gemv_all_reduce(
    x_desc, w_desc, out, products, staging, peer_data, peer_flags, flags, queues, calls, stop, patience,
    site, rank, rows, eights, inner, half, signals,
    WORLD: tl.constexpr, TWO_SHOT: tl.constexpr, SPLITS: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out`` is the sum over ranks of ``x @ w``. Grid: ``SPLITS`` blocks of at least ``WORLD`` threads for each tile.

    Args:
        x_desc: ``[rows, inner]``, blocks ``[BLOCK_M, BLOCK_K]``. ``BLOCK_M`` is at least ``rows``.
        w_desc, TRANSPOSED: as ``b_desc`` of ``kernels.tile_order.multiply_tile``.
        out: ``[rows, columns]``, fp16 or bf16, row-major and aligned to 16 bytes.
        products: fp32, this GPU's own memory: a tile for each block. ``None`` if ``SPLITS`` is 1.
        staging, half, peer_data, peer_flags, calls, eights: as in ``kernels.small_message.one_shot``.
        flags: ``signal_flag(s, t)`` holds the number of the call whose tile ``t`` has arrived from source ``s``.
        queues: word 0 counts blocks that have read ``calls``. Word ``QUEUE_WORDS + t`` counts products of tile ``t``.
    """
    columns = eights * 8
    call = tl.load(calls)
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    span = tl.cdiv(tl.cdiv(inner, SPLITS), BLOCK_K) * BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(split * span, tl.minimum((split + 1) * span, inner), BLOCK_K):
        if TRANSPOSED:
            total = tl.dot(x_desc.load([0, k]), w_desc.load([tile * BLOCK_N, k]).T, total)
        else:
            total = tl.dot(x_desc.load([0, k]), w_desc.load([k, tile * BLOCK_N]), total)
    row = tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    at = row * columns + tile * BLOCK_N + column
    inside = (row < rows) & (tile * BLOCK_N + column < columns)
    stride = rows.to(tl.int64) * columns
    if SPLITS == 1:
        _exchange(
            total.to(out.dtype.element_ty), tile, call, at, inside, out, staging, peer_data, peer_flags, flags, queues,
            calls, stop, patience, site, rank, stride, half, signals, WORLD, TWO_SHOT,
        )  # fmt: skip
    else:
        # (Rows that pad the tile are left out.)
        within = products + tile * SPLITS * BLOCK_M * BLOCK_N + row * BLOCK_N + column
        kept = (row < rows) & (column < BLOCK_N)
        tl.store(within + split * BLOCK_M * BLOCK_N, total, mask=kept)
        counter = queues + QUEUE_WORDS + tile
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(counter, 0)
            tl.debug_barrier()
            total = tl.load(within, mask=kept, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(within + other * BLOCK_M * BLOCK_N, mask=kept, other=0.0, cache_modifier=".cg")
            _exchange(
                total.to(out.dtype.element_ty), tile, call, at, inside, out, staging, peer_data, peer_flags, flags,
                queues, calls, stop, patience, site, rank, stride, half, signals, WORLD, TWO_SHOT,
            )  # fmt: skip
        else:
            count_call(calls, queues, call, "acq_rel")


@dataclass(frozen=True)
class GemvParameters:
    """The tunable parameters.

    Attributes:
        two_shot: each tile is summed by its owner, who sends the sum. Otherwise every rank sums every tile.
        block_n, block_k: columns of a tile, and elements of the inner dimension in one step.
        splits: blocks that share the inner dimension of a tile.
        stages: steps that are in shared memory at once.
    """

    two_shot: bool
    block_n: int
    splits: int
    block_k: int
    stages: int


def tiled(two_shot: bool, block_n: int, splits: int, rows: int, columns: int) -> GemvParameters:
    """Parameters with as many stages as fit into the shared memory of an SM: the matmul is bound by memory."""
    blocks = -(-columns // block_n) * splits
    step_bytes = (padded(rows) + block_n) * BLOCK_K * 2
    room = SHARED_BYTES if blocks <= small_plan.BLOCKS else SHARED_BYTES // 2
    return GemvParameters(two_shot, block_n, splits, BLOCK_K, min(max(room // step_bytes, 2), MOST_STAGES))


def settings_for(world_size: int, rows: int, columns: int, itemsize: int) -> GemvParameters:
    """The parameters for a product of ``[rows, columns]``. One-shot or two-shot: as for ``small_message``."""
    two_shot = bool(small_plan.settings_for(world_size, rows, columns, itemsize)["two_shot"])
    # Every block loads all rows of ``x``. With many rows, wide tiles load them less often.
    block_n = 64 if rows <= 16 else 128
    splits = 1
    while -(-columns // block_n) * splits * 2 <= small_plan.BLOCKS:
        splits *= 2
    return tiled(two_shot, block_n, splits, rows, columns)


def variants(world_size: int, rows: int, columns: int, itemsize: int) -> dict[str, GemvParameters]:
    """By name, the planned parameters (``gemv``) and others to compare them with. Empty for too many rows."""
    if rows > MOST_ROWS:
        return {}
    found = {"gemv": settings_for(world_size, rows, columns, itemsize)}
    for two_shot in (False, True) if world_size > 2 else (False,):
        for block_n, splits in ((32, 1), (64, 1), (64, 2), (128, 2)):
            name = f"gemv {'two' if two_shot else 'one'}-shot n{block_n} k/{splits}"
            found[name] = tiled(two_shot, block_n, splits, rows, columns)
    return found


def padded(rows: int) -> int:
    """Rows of a tile."""
    return max(LEAST_BLOCK_M, 1 << (rows - 1).bit_length())


def warps(p: GemvParameters, rows: int) -> int:
    """Warps of a block."""
    return 8 if padded(rows) * p.block_n > WIDE_TILE else 4


def needed(p: GemvParameters, world_size: int, rows: int, columns: int, itemsize: int) -> tuple[int, int, str]:
    """``(bytes, signals, protocol)`` that a call needs in its slot."""
    half = -(-world_size * rows * columns * itemsize // 128) * 128
    return 2 * half, -(-columns // p.block_n), HALVES


def matmul_all_reduce(x: torch.Tensor, w: torch.Tensor, launch: Launch, p: GemvParameters) -> torch.Tensor:
    """The sum over ranks of ``x [M, K] @ w [K, N]``, summed in fp32 and rounded once, to the same bits on all ranks.

    Args:
        x: fp16 or bf16, row-major, at most ``MOST_ROWS`` rows.
        w: like ``x``. It or its transpose is row-major.

    Raises:
        UnsupportedError: the kernel does not support a dtype, size or layout, or the slot is too small.
        TransferError: an earlier call of the group gave up waiting, or was aborted.
    """
    launch.faults.check()
    out = torch.empty(x.shape[0], w.shape[1], device=x.device, dtype=x.dtype)
    key = "gemv", x.shape, x.stride(), w.shape, w.stride(), x.dtype, w.dtype, p
    kernel = launch.prepared.get(key)
    if kernel is None:
        kernel = _prepare(x, w, out, launch, p)
        launch.remember(key, kernel)
    kernel(x, w, out)
    return out


def _prepare(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, launch: Launch, p: GemvParameters) -> PreparedKernel:
    (rows, inner), columns, slot, world_size = x.shape, w.shape[1], launch.slot, launch.world_size
    reason = small_plan.why_not(x.dtype, world_size, rows, columns)
    if reason is None and not 0 < rows <= MOST_ROWS:
        reason = f"the matmul has {rows} rows; expected 1 to {MOST_ROWS}"
    if reason is None and (w.shape[0] != inner or w.dtype != x.dtype or inner % 8 or not x.is_contiguous()):
        reason = f"cannot multiply {x.dtype}{list(x.shape)} by {w.dtype}{list(w.shape)}"
    if reason is not None:
        raise UnsupportedError(reason)
    launch.check_room(*needed(p, world_size, rows, columns, x.element_size()))
    block_m = padded(rows)
    blocks = -(-columns // p.block_n) * p.splits
    # Halves of the slot, not of the bytes that this call needs: all calls must use the same halves.
    half = slot.nbytes // 256 * 128
    w_desc, transposed = right_descriptor(w, p.block_n, p.block_k)
    varying = {"x_desc": TensorDescriptor.from_tensor(x, [block_m, p.block_k]), "w_desc": w_desc, "out": out}
    split = p.splits > 1
    fixed = {
        **call_arguments(gemv_all_reduce, launch),
        "products": torch.empty(blocks * block_m * p.block_n, device=x.device) if split else None,
        "staging": slot.data.local[: 2 * half].view(x.dtype),
        "rows": rows,
        "eights": columns // 8,
        "inner": inner,
        "half": half // x.element_size(),
        "TWO_SHOT": p.two_shot,
        "SPLITS": p.splits,
        "TRANSPOSED": transposed,
        "BLOCK_M": block_m,
        "BLOCK_N": p.block_n,
        "BLOCK_K": p.block_k,
    }
    return PreparedKernel(gemv_all_reduce, blocks, varying, fixed, num_warps=warps(p, rows), num_stages=p.stages)
