# SPDX-License-Identifier: Apache-2.0
"""Tags by which the partitioner of a training graph decides what is saved for backward and what is computed again."""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_TAG = "recompute"


def compute_again(node: fx.Node) -> None:
    """Let the backward compute ``node`` again, so that the forward does not save its value. A tag of the user's
    checkpointing stays."""
    node.meta.setdefault(_TAG, CheckpointPolicy.MUST_RECOMPUTE)
