# SPDX-License-Identifier: Apache-2.0
"""If one rank of a group is out of memory, no rank gets a workspace, and no rank hangs."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.errors import OverlapError
from overlap_inductor.lowerings import group_ops  # noqa: F401  (defines agree)
from overlap_inductor.runtime import workspace
from overlap_inductor.runtime.all_or_none import NotOnAllRanks
from overlap_inductor.runtime.all_or_none import all_or_none
from overlap_inductor.torch_compat import symmetric
from tests.support.fake_group import fake_group
from tests.support.gloo_ranks import run_ranks
from tests.support.shared_memory import use_shared_memory

CPU = torch.device("cpu")


def _attempts(rank: int, world_size: int) -> list[Any]:
    group, said = dist.group.WORLD, []

    def attempt(fails: tuple[int, ...]) -> None:
        def attempted() -> int:
            if rank in fails:
                raise torch.OutOfMemoryError(f"CUDA out of memory on GPU {rank}")
            return rank

        try:
            said.append(all_or_none(group, "allocate 512 bytes", attempted))
        except NotOnAllRanks as error:
            said.append((str(error), type(error.__cause__).__name__))

    for fails in ((), (1,), (0, 2), ()):
        attempt(fails)
    # In a subgroup, the verdict comes from the subgroup's first rank. The error text names global ranks.
    group = dist.new_group([1, 2])
    if rank:
        attempt((2,))
    # A new group of all ranks must not read the verdicts of earlier groups in the ranks' store.
    group = dist.new_group()
    attempt((1,))
    dist.destroy_process_group(group)
    return said


def test_all_ranks_succeed_or_all_raise_one_text() -> None:
    found = run_ranks(3, _attempts)
    for rank, said in enumerate(found):
        assert said[0] == said[3] == rank
        assert (
            said[1][0] == "rank 1 cannot allocate 512 bytes (OutOfMemoryError: CUDA out of memory on GPU 1). "
            "So no rank of group '0' does."
        )
        assert said[2][0].startswith(
            "rank 0 cannot allocate 512 bytes (OutOfMemoryError: CUDA out of memory on GPU 0); rank 2 cannot"
        )
    assert [said[1][1] for said in found] == ["NoneType", "OutOfMemoryError", "NoneType"]
    assert len(found[0]) == 5 and found[1][4][0] == found[2][4][0] and found[1][4][0].startswith("rank 2 cannot")
    assert found[0][4] == (found[1][5][0], "NoneType") and found[0][4][0].startswith("rank 1 cannot")


def _silent(rank: int, world_size: int, silent: int) -> tuple[str, float]:
    start = time.monotonic()
    if rank == silent:
        time.sleep(4)
        return "", 0.0
    with pytest.raises(NotOnAllRanks) as told:
        all_or_none(dist.group.WORLD, "allocate 512 bytes", lambda: None, seconds=1.0)
    return str(told.value), time.monotonic() - start


def test_a_rank_that_writes_nothing_counts_as_failed_at_the_deadline() -> None:
    (first, took), (second, _), _ = run_ranks(3, _silent, 2)
    assert (
        first
        == second
        == "rank 2 cannot allocate 512 bytes (it has said nothing for 1 s; has it died?). So no rank of group '0' does."
    )
    assert 0.9 < took < 4


def test_a_rank_without_a_verdict_speaks_only_for_itself() -> None:
    """Here the first rank gives no verdict. Another rank cannot know what the first rank has decided. So the other
    rank's error must not speak for the whole group."""
    _, *others = run_ranks(3, _silent, 0)
    for rank, (text, took) in enumerate(others, 1):
        because = "because rank 0 has given no verdict for 2 s. Has rank 0 died?"
        assert text == f"rank {rank} cannot allocate 512 bytes, {because}"
        assert 1.9 < took < 5


def test_a_dry_run_waits_for_no_other_rank() -> None:
    with fake_group(8, rank=3) as group:
        assert all_or_none(group, "allocate 512 bytes", lambda: 7) == 7
        with pytest.raises(NotOnAllRanks, match="rank 3 cannot allocate 512 bytes"):
            all_or_none(group, "allocate 512 bytes", lambda: [][0])


def _workspace(rank: int, world_size: int, folder: str) -> list[Any]:
    use_shared_memory(folder)
    shared, left, said = symmetric.allocate, [0], []

    def allocate(
        elements: int, dtype: torch.dtype, device: torch.device, group: Any, together: symmetric.Together
    ) -> Any:
        def meagre(what: str, attempt: Any) -> Any:
            def attempted() -> Any:
                left[0] -= 1
                if rank == 1 and left[0] == 0:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return attempt()

            return together(what, attempted)

        return shared(elements, dtype, device, group, meagre)

    symmetric.allocate = allocate
    group, requests = dist.group.WORLD, json.dumps([["a", 3000, 2], ["b", 500, 1]])
    for failing in (1, 1, 2, 3, 4):
        # Five allocations can fail: the fault record, then the data and the flags of each of two slots. In each
        # round, the next of these allocations fails. After the first round's failure, ``workspace_of`` below allocates
        # the fault record. So the second round, too, fails at its first allocation.
        left[0] = failing
        said.append(workspace.prepare(group, CPU, requests, 2**30))
        assert not workspace.workspace_of(group, CPU).arena.slots
    left[0] = 1
    try:
        torch.ops.overlap_inductor.agree(group.group_name, "{}", torch.zeros(1), requests, 1)
    except OverlapError as error:
        said.append(str(error))
    said.append(workspace.prepare(group, CPU, requests, 2**30))
    place = workspace.workspace_of(group, CPU)
    assert len(place.arena.slots) == 2 and place.launch("a", 3000, 2) is not None
    # A rank can write into the memory of a peer.
    flags = place.arena.slot("a").flags
    flags.peers[(rank + 1) % world_size][0] = 100 + rank
    dist.barrier()
    assert int(flags.local[0]) == 100 + (rank - 1) % world_size and not place.arena.slot("a").queues.any()
    return said


def test_a_rank_without_memory_leaves_all_without_workspace_and_none_waiting(tmp_path: Path) -> None:
    found = run_ranks(3, _workspace, str(tmp_path))
    assert found[0] == found[1] == found[2]
    assert (
        found[0][1] == "rank 1 cannot allocate 3072 bytes of symmetric memory (OutOfMemoryError: CUDA out of memory). "
        "So no rank of group '0' does."
    )
    assert all(text.startswith("rank 1 cannot allocate") for text in found[0][:5]) and found[0][6] is None
    assert (
        found[0][5].startswith("sites of group '0' have no workspace: rank 1 cannot allocate 3072 bytes")
        and "OVERLAP_INDUCTOR=off" in found[0][5]
    )


def _limits(rank: int, world_size: int, folder: str) -> list[Any]:
    """Request slots three times. A slot is the part of the group's workspace that a call of a site uses. The workspace
    has a smaller limit on rank 1. Returns, for this rank:

    - which sites of each request got a slot;
    - the warnings;
    - the number of slots;
    - whether the first site still has its slot.
    """
    use_shared_memory(folder)
    told: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("overlap_inductor").addHandler(heard)
    group = dist.group.WORLD
    given = []
    for sites in ([["a", 1000, 1]], [["a", 2**21, 1], ["b", 10, 1]], [["c", 2000, 1]]):
        assert workspace.prepare(group, CPU, json.dumps(sites), 2**20 if rank == 1 else 2**30) is None
        place = workspace.workspace_of(group, CPU)
        given.append([place.launch(site, nbytes, signals) is not None for site, nbytes, signals in sites])
    return [given, told, len(place.arena.slots), place.launch("a", 1000, 1) is not None]


def test_if_a_rank_has_a_smaller_limit_no_rank_gets_a_slot_above_it(tmp_path: Path) -> None:
    """If only the other ranks got a slot, their kernels would wait for a rank that runs the plain collective."""
    found = run_ranks(3, _limits, str(tmp_path), timeout=60)
    assert found[0] == found[1] == found[2]
    given, told, _, kept = found[0]
    assert given == [[True], [False, False], [True]] and kept, (
        "the first and the third request must get slots, the second must get none"
    )
    (text,) = told
    assert text.startswith("overlap_inductor: 2 sites of group '0' run without overlap: rank 1 cannot hold ")
    assert "OVERLAP_INDUCTOR_WORKSPACE_LIMIT is 1 MiB" in text and "rank 0" not in text and "rank 2" not in text
