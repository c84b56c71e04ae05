# SPDX-License-Identifier: Apache-2.0
"""Transport ``sm_push``: the blocks of one kernel store to the peers, and signal after each part. This transport is for
small pieces, for which the fixed costs of copy engines are too high."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.transports.call_arguments import call_arguments
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import Send
from overlap_inductor.transports.transport import Share

COPY_WORDS = 8192
"""int32 words that a block stores at once: eight 16-byte stores per thread."""
NAME = "sm_push"
"""Schedules whose own kernels store to peers also give this name as their transport."""


class SmPush:
    """Implements ``transports.transport.PeerCopies``. The kernel has ``share.sms`` blocks, so it takes at most that
    many SMs from matmuls."""

    name = NAME
    moved_by = "SMs that store, over symmetric memory"
    needs_sms = True
    fastest_from = 0

    def prepare(
        self,
        launch: Launch,
        transfer: Transfer,
        numbers: Sequence[int],
        source: torch.Tensor,
        share: Share,
        guarded: bool = False,
    ) -> Send:
        """As ``PeerCopies.prepare``. ``numbers`` must be consecutive, and the bytes of a row a multiple of 16."""
        from overlap_inductor.kernels.transfer import push_parts
        from overlap_inductor.torch_compat.triton_launch import PreparedKernel

        row_vectors = transfer.width * source.element_size() // 16
        fixed = {
            **call_arguments(push_parts, launch),
            "index": transfer.index,
            "first": numbers[0],
            "count": len(numbers),
            # The distance from one shard's start to the next one's. If there are gaps between shards, each shard is one
            # part. The kernel copies no row after the part's end, so it does not copy the gap.
            "shard_vectors": transfer.step * row_vectors,
            "part_vectors": transfer.part_rows * row_vectors,
            "origin": transfer.origin * row_vectors,
            "base": transfer.base * row_vectors,
            "PARTS": transfer.parts,
            "PIECES": share.sms,
            "DIRECTION": transfer.direction,
            "SCATTERED": transfer.scattered,
            "BLOCK": COPY_WORDS,
        }
        return PreparedKernel(push_parts, share.sms, {"source": source}, fixed, num_warps=8)
