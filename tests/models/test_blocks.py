# SPDX-License-Identifier: Apache-2.0
"""A sequence-parallel transformer block, forward and backward: results against fp64, and sites. Its variants differ in
batch size, order of batch and sequence, and biases."""

from __future__ import annotations

import pytest

from tests.support.block_problems import EXPECTED
from tests.support.block_problems import GENERATED
from tests.support.block_problems import TORCH
from tests.support.block_problems import problems
from tests.support.gloo_ranks import run_ranks

REPEATED = ("none", "full", "selective, matmuls only")
"""Kinds of checkpointing with which the hand-written block runs in thorough tests only. The other tests cover nearly
the same sites: the DTensor block without checkpointing, and the hand-written block with ``selective``."""


@pytest.mark.parametrize(
    ("by_hand", "checkpointing"),
    [
        pytest.param(
            h, c, id=f"{'by hand' if h else 'dtensor'}-{c}", marks=[pytest.mark.thorough] * (h and c in REPEATED)
        )
        for h in (False, True)
        for c in EXPECTED
    ],
)
def test_block(by_hand: bool, checkpointing: str) -> None:
    """All sites must be found. Each gradient must be summed once, and each slice must hold the right tokens."""
    if checkpointing != "none" and not by_hand and TORCH in ((2, 12), (2, 13)):
        pytest.skip(
            "with checkpointing, these torch versions treat the DeviceMesh as a saved tensor, and fail even without"
            " overlap"
        )
    for rank, found in enumerate(run_ranks(2, problems, by_hand, checkpointing)):
        assert not found, f"rank {rank}: {found}"


@pytest.mark.thorough
@pytest.mark.parametrize(("by_hand", "checkpointing"), [(False, "none"), *((True, c) for c in EXPECTED if c != "none")])
def test_every_pair_of_layouts(by_hand: bool, checkpointing: str) -> None:
    for rank, found in enumerate(run_ranks(2, problems, by_hand, checkpointing, "cpu", False, True)):
        assert not found, f"rank {rank}: {found}"


# Thorough only: ``tests/examples`` trains a DTensor block in generated code.
@pytest.mark.thorough
@pytest.mark.parametrize(("by_hand", "checkpointing"), list(GENERATED))
def test_block_in_generated_code(by_hand: bool, checkpointing: str) -> None:
    """Generated code must not overwrite a buffer before the last hop has read it."""
    for rank, found in enumerate(run_ranks(2, problems, by_hand, checkpointing, "cpu", True)):
        assert not found, f"rank {rank}: {found}"
