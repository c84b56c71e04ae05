"""Transport ``sm_push``: the blocks of one kernel store to the peers and signal part by part. Where pieces are small,
and copy engines' fixed costs show."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from overlap_inductor.kernels.transfer import push_parts
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.transfer import Send
from overlap_inductor.transports.transfer import Transfer

COPY_WORDS = 8192
"""int32 words that a block stores at once: eight 16-byte stores of each of its threads."""


@dataclass(frozen=True)
class SmPush:
    """``blocks``: of the pushing kernel, at most one an SM. What they take is missing from matmuls beside them."""

    blocks: int

    def prepare(
        self, launch: Launch, transfer: Transfer, numbers: range, source: torch.Tensor, guarded: bool = False
    ) -> Send:
        """As ``Transport.prepare``; receivers are told after each part. Rows are whole 16-byte words."""
        slot, row_vectors = launch.slot, transfer.width * source.element_size() // 16
        fixed = (
            slot.data.pointers, slot.flags.pointers, slot.queues, slot.calls, launch.faults.stop, launch.rank,
            transfer.index, numbers.start, len(numbers), slot.signals,
            transfer.rows * row_vectors, transfer.part_rows * row_vectors,
            transfer.origin * row_vectors, transfer.base * row_vectors,
            launch.world_size, transfer.parts, self.blocks, transfer.direction, transfer.scattered, COPY_WORDS,
        )  # fmt: skip
        return PreparedKernel(push_parts, self.blocks, (source,), fixed, num_warps=8)
