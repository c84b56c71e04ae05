# SPDX-License-Identifier: Apache-2.0
"""Ranks of a CPU benchmark do not share a physical core if there are enough cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.support.cores import own_core
from bench.support.cores import physical_cores


def _topology(folder: Path, cores: list[list[int]]) -> Path:
    for core in cores:
        for cpu in core:
            path = folder / f"cpu{cpu}" / "topology" / "thread_siblings_list"
            path.parent.mkdir(parents=True)
            path.write_text(",".join(map(str, core)) + "\n")
    return folder


@pytest.mark.parametrize("cores", [[[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_rank_has_a_physical_core(tmp_path: Path, cores: list[list[int]], ranks: int) -> None:
    found = physical_cores(range(8), _topology(tmp_path, cores))
    assert found == cores
    used = [own_core(rank, ranks, found) for rank in range(ranks)]
    assert len({next(i for i, core in enumerate(cores) if cpu in core) for cpu in used}) == ranks


def test_ranks_of_a_larger_machine_are_far_apart(tmp_path: Path) -> None:
    found = physical_cores(range(16), _topology(tmp_path, [[i, i + 1] for i in range(0, 16, 2)]))
    assert [own_core(rank, 4, found) for rank in range(4)] == [0, 4, 8, 12]


def test_more_ranks_than_cores_share_them() -> None:
    assert [own_core(rank, 4, [[0], [1]]) for rank in range(4)] == [0, 1, 0, 1]


def test_only_allowed_cpus_are_used(tmp_path: Path) -> None:
    assert physical_cores([2, 3, 5], _topology(tmp_path, [[0, 1], [2, 3], [4, 5]])) == [[2, 3], [5]]


def test_without_a_topology_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert physical_cores([1, 0], tmp_path) == [[0], [1]]
