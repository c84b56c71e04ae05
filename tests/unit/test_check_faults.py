# SPDX-License-Identifier: Apache-2.0
"""``tests.gpu.check_faults`` must expect the messages that ranks really raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from overlap_inductor.kernels.layout import WAIT_KINDS
from overlap_inductor.kernels.layout import WAIT_PARTIALS
from overlap_inductor.runtime.faults import FaultRecord
from tests.gpu.check_faults import expected
from tests.gpu.check_faults import judge

SITE = "faulty small_message matmul_all_reduce two_shot"
"""A site's name in the form that ``tests.gpu.stress_sites`` writes."""
SCENARIOS = [("skipped", 0), ("skipped", 1), ("uneven", 0), ("uneven_replays", 0), ("again", 1)]


@dataclass
class Ended:
    """A finished scenario of three ranks. ``errors``: the error message of each rank."""

    errors: list[str]
    ranks: int = 3

    def said(self, rank: int) -> dict[str, Any]:
        return {"error": self.errors[rank], "seconds": 6.0}


def errors_of(first: int, call: int = 4, peer: int = 2) -> list[str]:
    """Each rank's error after rank ``first`` timed out in its wait for call number ``call`` of rank ``peer``."""
    texts = []
    for rank in range(3):
        faults = FaultRecord.of("1", [0, 1, 2], torch.device("cpu"), rank)
        code = WAIT_KINDS * faults.number(SITE) + WAIT_PARTIALS
        record = faults.board.record(first)
        record[1:5] = torch.tensor([code, peer, call, call - 1])
        record[0] = 1
        faults.board.words[0] = 1
        texts.append(str(faults.error()))
    return texts


@pytest.mark.parametrize(("scenario", "first"), SCENARIOS)
def test_the_errors_that_ranks_raise_are_the_expected_ones(scenario: str, first: int) -> None:
    found, problems = judge(Ended(errors_of(first)), expected(15)[scenario], [0, 0, 0], 6.6)  # type: ignore[arg-type]
    assert not problems and SITE in found


@pytest.mark.parametrize("texts", [errors_of(0, call=5), errors_of(0, peer=1), ["", "", ""]])
def test_another_error_is_a_problem_on_each_rank(texts: list[str]) -> None:
    _, problems = judge(Ended(texts), expected(15)["skipped"], [0, 0, 0], 6.6)  # type: ignore[arg-type]
    assert len(problems) == 3


def test_in_scenario_uneven_rank_0_must_time_out_first() -> None:
    _, problems = judge(Ended(errors_of(1)), expected(15)["uneven"], [0, 0, 0], 6.6)  # type: ignore[arg-type]
    assert [problem.split(" is ")[0] for problem in problems] == ["the error of rank 1", "the error of rank 2"]
