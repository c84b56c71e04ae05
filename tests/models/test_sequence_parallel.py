# SPDX-License-Identifier: Apache-2.0
"""The sequence-parallel rewrite replaces the all-reduces of unchanged Hugging Face models. Logits and gradients agree
with fp64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support import hugging_face
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.rewritten_families import Case
from tests.support.rewritten_families import problems

CASES = {
    "llama": Case("llama, one layer", 9, 10),
    "llama, generated code": Case("llama, one layer", 9, 10, generated=True),
    "starcoder2, 13 tokens": Case("starcoder2, one layer", 8, 8, (1, 13)),
    "cohere": Case("cohere, one layer", 3, 4, trains=False),
    "olmo2": Case("olmo2, one layer", 9, 15),
    "gemma2, batch of 3 x 5 tokens": Case("gemma2, one layer", 3, 5, (3, 5), trains=False),
    "phi3": Case("phi3, one layer", 3, 5, trains=False),
    "gpt_neox": Case("gpt_neox, one layer", 6, 8),
}


FEW = ("llama", "cohere")
"""The families that ``make test`` runs. In ``cohere``, attention and MLP read the result of the same norm."""


@pytest.mark.parametrize(
    "names",
    [
        FEW,
        pytest.param([name for name, case in CASES.items() if case.generated], marks=pytest.mark.thorough),
        pytest.param(
            [name for name, case in CASES.items() if not case.generated and name not in FEW], marks=pytest.mark.thorough
        ),
    ],
    ids=["interpreted", "generated code", "interpreted, more of them"],
)
def test_families(names: Sequence[str], tmp_path: Path) -> None:
    """All all-reduces of a family must be rewritten. The gradients must be right, also those of
    norms and biases."""
    cases = {name: CASES[name] for name in names}
    for rank, found in enumerate(run_ranks(2, problems, cases, str(tmp_path), timeout=500)):
        assert not found, f"rank {rank}: " + "\n".join(found)


@pytest.mark.thorough
def test_fewer_sequences_than_ranks(tmp_path: Path) -> None:
    """4 ranks divide 2 sequences of 6 tokens, so each rank holds 3 tokens of one sequence."""
    cases = {"llama": Case("llama, one layer", 9, 10, (2, 6))}
    for rank, found in enumerate(run_ranks(4, problems, cases, str(tmp_path), timeout=500)):
        assert not found, f"rank {rank}: " + "\n".join(found)


STEPS, BATCHES = 200, 4


def _losses(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float], int]:
    """The losses of a training without the pass, the losses with the pass, and the number of rewritten stretches."""
    compile_anew()
    generator = torch.Generator().manual_seed(3)
    data = [torch.randint(0, hugging_face.VOCABULARY, (2, 12), generator=generator) for _ in range(BATCHES)]
    curves: list[list[float]] = []
    reports: list[OverlapReport] = []
    fields: tuple[dict[str, Any], ...] = ({"mode": "off"}, {"schedule": "ring", "sequence_parallel": "on"})
    for config in fields:
        torch._dynamo.reset()
        model = hugging_face.load("llama, one layer", folder, "cpu")
        compiled = torch.compile(model, backend=interpreted(OverlapConfig(**config), reports))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        curves.append([])
        for step in range(STEPS):
            optimizer.zero_grad()
            ids = data[step % BATCHES]
            loss = compiled(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            curves[-1].append(loss.item())
    return curves[0], curves[1], sum(s.status == "rewritten" for r in reports for s in r.stretches)


@pytest.mark.thorough
def test_training_has_the_loss_curve_of_the_plain_compile(tmp_path: Path) -> None:
    """Catches small errors that add up over steps."""
    for plain, found, rewritten in run_ranks(2, _losses, str(tmp_path), timeout=500):
        assert rewritten and found[-1] < found[0] / 4
        assert found == pytest.approx(plain, rel=1e-3)
