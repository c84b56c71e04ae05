# SPDX-License-Identifier: Apache-2.0
"""The all-reduces of unchanged Hugging Face models are rewritten, and logits and gradients agree with fp64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gloo_ranks import run_ranks
from tests.support.rewritten_families import Case
from tests.support.rewritten_families import problems

CASES = {
    "llama, generated code": Case("llama, one layer", 9, 0, generated=True),
    "llama, batch of 3 x 5 tokens": Case("llama", 16, 0, (3, 5)),
    "starcoder2, 13 tokens": Case("starcoder2, one layer", 0, 0, (1, 13)),
    "cohere": Case("cohere, one layer", 0, 0),
    "olmo2": Case("olmo2, one layer", 0, 0),
    "gemma2": Case("gemma2, one layer", 0, 0, (2, 6)),
    "phi3": Case("phi3, one layer", 0, 0, trains=False),
    "qwen2": Case("qwen2, one layer", 0, 0, trains=False),
    "gpt_neox": Case("gpt_neox, one layer", 0, 0),
}
GENERATED = {"llama, generated code"}


@pytest.mark.parametrize("generated", [False, True], ids=["interpreted", "generated code"])
def test_families(generated: bool, tmp_path: Path) -> None:
    """Catches an op of one family that no longer runs on rows, and a wrong gradient behind a norm, a bias, a branch."""
    cases = {name: case for name, case in CASES.items() if case.generated == generated}
    for rank, found in enumerate(run_ranks(2, problems, cases, str(tmp_path), timeout=500)):
        assert not found, f"rank {rank}: " + "\n".join(found)
