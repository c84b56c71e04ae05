# SPDX-License-Identifier: Apache-2.0
"""Compiles random programs. No rewrite may fail, and overlap must not change the results.

    python -m tests.numerics.test_random_programs --world-size 2 --seeds 1000 2000 [--trains] \\
        [--exchanges] [--fields '{"step_node_budget": 1}']
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import pytest

from tests.support.exchange_programs import ExchangeProgram
from tests.support.gloo_ranks import run_ranks
from tests.support.program_checks import check
from tests.support.random_programs import Program

COUNT = 4
"""The number of programs in each case of the first test. Most trained programs have no site, but 9 of the 12 programs
with seeds 31 to 42 have one. So the trained cases begin at seed 31. After a change to the finder or to a rewrite, run
thousands of programs."""

HOPS = {"numerics": "allow_hop_rounding", "ring_direction": "bidirectional", "sub_chunks": 2}


@pytest.mark.parametrize(
    ("first", "world_size", "fields", "trains"),
    [
        *(pytest.param(first, 2, {}, False, marks=pytest.mark.thorough) for first in (0, COUNT)),
        (31, 2, {"step_node_budget": 1}, True),
        pytest.param(31 + COUNT, 2, {"step_node_budget": 1}, True, marks=pytest.mark.thorough),
        # These cases are only thorough, because ``test_random_shapes`` also draws these switches on three ranks.
        pytest.param(24, 3, HOPS, False, marks=pytest.mark.thorough),
        pytest.param(24 + COUNT, 3, HOPS, False, marks=pytest.mark.thorough),
    ],
    ids=[
        "2 ranks",
        "2 ranks, more of them",
        "2 ranks, looping, trained",
        "2 ranks, looping, trained, more of them",
        "3 ranks, hop rounding, bidirectional",
        "3 ranks, hop rounding, bidirectional, more of them",
    ],
)
def test_overlap_does_not_change_a_programs_results(
    first: int, world_size: int, fields: dict[str, Any], trains: bool
) -> None:
    for rank, (problems, overlapped) in enumerate(
        run_ranks(world_size, check, Program, list(range(first, first + COUNT)), fields, trains, timeout=500)
    ):
        assert not problems, f"rank {rank}: " + "\n".join(problems)
        assert sum(overlapped.values()) >= COUNT // 2, f"too few sites are overlapped: {overlapped}"


@pytest.mark.parametrize("seeds", [(200, 202), pytest.param((202, 212), marks=pytest.mark.thorough)])
def test_overlap_does_not_change_the_results_of_programs_with_all_to_alls(seeds: tuple[int, int]) -> None:
    for rank, (problems, overlapped) in enumerate(
        run_ranks(2, check, ExchangeProgram, list(range(*seeds)), {}, True, timeout=500)
    ):
        assert not problems, f"rank {rank}: " + "\n".join(problems)
        assert min(overlapped.get(name, 0) for name in ("matmul_all_to_all", "all_to_all_matmul")) >= 1, overlapped


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 1000), metavar=("FIRST", "END"))
    parser.add_argument("--fields", type=json.loads, default={}, help="fields of the configuration, as JSON")
    parser.add_argument("--trains", action="store_true", help="compare gradients, too")
    parser.add_argument("--exchanges", action="store_true", help="draw programs with all-to-alls")
    arguments = parser.parse_args()
    (problems, overlapped), *_ = run_ranks(
        arguments.world_size,
        check,
        ExchangeProgram if arguments.exchanges else Program,
        list(range(*arguments.seeds)),
        arguments.fields,
        arguments.trains,
        timeout=7200,
    )
    print(*problems, f"{len(problems)} problems; sites overlapped: {overlapped}", sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
