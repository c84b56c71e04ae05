# SPDX-License-Identifier: Apache-2.0
"""Compiles random programs whose ranks differ in bias, K and padding. Overlap must not change their results.
``tools/sweep_models.py --part programs`` runs hundreds of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gloo_ranks import run_ranks
from tests.support.program_checks import check_uneven

COUNT = 4
"""The number of programs of each case. No two cases run the same program."""


@pytest.mark.parametrize(
    ("first", "world_size", "fields", "trains"),
    [
        (0, 2, {}, True),
        pytest.param(COUNT, 2, {}, True, marks=pytest.mark.thorough),
        (2 * COUNT, 3, {"step_node_budget": 1}, False),
        pytest.param(3 * COUNT, 3, {"step_node_budget": 1}, False, marks=pytest.mark.thorough),
    ],
    ids=["2 ranks, trained", "2 ranks, trained, more of them", "3 ranks, looping", "3 ranks, looping, more of them"],
)
def test_programs_that_differ_between_ranks(first: int, world_size: int, fields: dict[str, Any], trains: bool) -> None:
    seeds = list(range(first, first + COUNT))
    results = run_ranks(world_size, check_uneven, seeds, fields, trains, timeout=500)
    for rank, (problems, overlapped, fell_back, differ) in enumerate(results):
        assert not problems, f"rank {rank}: " + "\n".join(problems)
        assert differ >= COUNT // 2, "too few programs differ between ranks"
        assert sum(overlapped.values()) >= COUNT // 2, (
            f"too few sites are overlapped: {overlapped}, {fell_back} programs fell back"
        )
