# SPDX-License-Identifier: Apache-2.0
"""Transport ``sm_push``: the blocks of one kernel store to the peers, and signal after each part. It is meant for small
pieces: the fixed costs of copy engines are too high for them."""

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
"""The name of the transport. Schedules whose own kernels store to peers use this name, too."""


class SmPush:
    """Implements ``transports.transport.PeerCopies``. The kernel has ``share.sms`` blocks, so it takes at most that
    many SMs from matmuls that run at the same time."""

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
        """As ``PeerCopies.prepare``. ``numbers`` must be consecutive, and the bytes of a row a multiple of 16.
        Receivers are signalled after each part."""
        from overlap_inductor.kernels.transfer import push_parts
        from overlap_inductor.torch_compat.triton_launch import PreparedKernel

        row_vectors = transfer.width * source.element_size() // 16
        fixed = {
            **call_arguments(push_parts, launch),
            "index": transfer.index,
            "first": numbers[0],
            "count": len(numbers),
            # (The distance from the start of one shard to the start of the next. With gaps between shards, this is
            # more than a shard. Each shard is then one part, and the kernel stops at the part's end.)
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
