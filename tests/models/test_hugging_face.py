# SPDX-License-Identifier: Apache-2.0
"""Unchanged Hugging Face models, sharded by their own plan: every site is found, and logits and gradients agree with
fp64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gloo_ranks import run_ranks
from tests.support.hugging_face_problems import problems


@pytest.mark.parametrize(
    ("family", "trains"),
    [
        # (Thorough only, because ``test_sizes_that_the_group_does_not_divide`` trains a Llama of one layer.)
        pytest.param("llama", True, marks=pytest.mark.thorough),
        pytest.param("starcoder2, one layer", False, marks=pytest.mark.thorough),
        pytest.param("cohere, one layer", False, marks=pytest.mark.thorough),
        pytest.param("olmo2, one layer", True, marks=pytest.mark.thorough),
    ],
    ids=["llama, trained", "starcoder2", "cohere", "olmo2, trained"],
)
def test_family(family: str, trains: bool, tmp_path: Path) -> None:
    """Each site is found and counted once, and no slice of logits or gradients is wrong."""
    for rank, found in enumerate(run_ranks(2, problems, family, str(tmp_path), trains, False, timeout=500)):
        assert not found, f"rank {rank}: {found}"


@pytest.mark.parametrize(
    ("family", "world_size", "trains", "generated"),
    [
        ("llama, odd vocabulary", 2, True, False),
        pytest.param("llama, odd vocabulary", 2, True, True, marks=pytest.mark.thorough),
        pytest.param("llama, odd vocabulary, ffn of 50", 3, True, False, marks=pytest.mark.thorough),
    ],
    ids=[
        "vocabulary of 101 on 2 ranks, trained",
        "vocabulary of 101 on 2 ranks, trained, generated code",
        "vocabulary of 101 and ffn of 50 on 3 ranks",
    ],
)
def test_sizes_that_the_group_does_not_divide(
    family: str, world_size: int, trains: bool, generated: bool, tmp_path: Path
) -> None:
    """The ranks' shards of the weights have different sizes. The head's results are padded to one size before they are
    gathered."""
    for rank, found in enumerate(
        run_ranks(world_size, problems, family, str(tmp_path), trains, generated, timeout=500)
    ):
        assert not found, f"rank {rank}: {found}"
