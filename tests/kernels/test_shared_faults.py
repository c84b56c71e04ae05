# SPDX-License-Identifier: Apache-2.0
"""Ranks of a gloo group report faults to each other through the group's board: a file in host memory. All ranks map
this file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.errors import TransferError
from overlap_inductor.lowerings.wave_groups import launch as wave_groups
from overlap_inductor.lowerings.wave_groups.parameters import WaveParameters
from overlap_inductor.runtime import faults
from overlap_inductor.runtime import shared_file
from overlap_inductor.runtime.all_or_none import NotOnAllRanks
from overlap_inductor.runtime.workspace import workspace_of
from tests.support.gloo_ranks import run_ranks
from tests.support.shared_memory import use_shared_memory

WORLD = 3
CPU = torch.device("cpu")
PARAMETERS = WaveParameters(2, (1,), (0, 1, 2), 16, 16, 16, 2, 4, 1, False)


def _tiles_come_late(rank: int, world_size: int, folder: str, reached: bool, scatters: bool) -> None:
    """Rank 0 multiplies only after the collectives have run, as if other work occupied its GPU for longer than a kernel
    waits.

    Args:
        reached: whether the GPUs can reach each other's memory.
        scatters: reduce-scatter rather than all-reduce.
    """
    if reached:
        use_shared_memory(folder)
    group = dist.group.WORLD
    waves = wave_groups.waves_of(group, CPU)
    faults, waves.place.patience_ns = waves.place.faults, 20_000

    def call(value: float) -> torch.Tensor:
        run = wave_groups.matmul_reduce_scatter if scatters else wave_groups.matmul_all_reduce
        rows = 32 * world_size if scatters else 32
        right = torch.ones(32, 16).half().t()
        return run(torch.full((rows, 16), value).half(), right, group, PARAMETERS, "site_7")

    assert (call(1) == 16 * world_size).all()
    # The host checks nothing before a call, as in a replayed CUDA graph.
    faults.check = lambda: None  # type: ignore[method-assign]
    multiply = wave_groups.Call.multiply
    if rank == 0:
        late = []

        def held(self: wave_groups.Call, *arguments: object) -> torch.Tensor:
            late.append((self, arguments))
            return torch.zeros(self.a.shape[0], self.b.shape[1]).half()

        wave_groups.Call.multiply = held  # type: ignore[method-assign]
    for value in (2, 3):
        # In the second call, the counters already include the first call's late tiles. So the wait for tiles ends too
        # early, and the result must still be NaN.
        assert call(value).isnan().all(), "tiles that were never written are returned as valid"
        if rank == 0:
            multiply(late[0][0], *late[0][1])
            assert waves.counters.any()
    del faults.check
    first = "" if rank == 0 else "rank 0 gave up first: "
    if reached or rank == 0:
        site = f"site site_7 of group '{group.group_name}' timed out waiting for tiles of its own matmul"
        with pytest.raises(TransferError, match=f"{first}{site}: expected [26], saw 0"):
            call(4)


@pytest.mark.parametrize("scatters", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("reached", [True, False], ids=["GPUs reach each other", "no GPU reaches another"])
def test_tiles_that_were_never_written_are_nan_on_every_rank(reached: bool, scatters: bool, tmp_path: Path) -> None:
    run_ranks(WORLD, _tiles_come_late, str(tmp_path), reached, scatters, timeout=100)


def _aborts(rank: int, world_size: int, folder: str, files: str) -> tuple[str, bool]:
    """Rank 1 aborts the group. Returns ``("error before; error after", aborted)``. ``aborted``: whether this rank's
    kernels are told of the abort (by the word ``stop[0]``)."""
    use_shared_memory(folder)
    shared_file.SHARED_FOLDER = Path(files)
    faults = workspace_of(dist.group.WORLD, CPU).faults
    assert files in Path("/proc/self/maps").read_text(), f"no file in {files} is mapped, so the board is not there"
    before = faults.error()
    dist.barrier()
    if rank == 1:
        faults.abort()
    dist.barrier()
    return f"{before}; {faults.error()}", bool(faults.stop[0])


def test_all_ranks_see_an_abort_on_the_board_and_no_file_is_left(tmp_path: Path) -> None:
    files = tmp_path / "shared"
    files.mkdir()
    said = run_ranks(WORLD, _aborts, str(tmp_path), str(files), timeout=100)
    assert all(stopped and "was aborted by rank 1;" in text for text, stopped in (said[0], said[2])), said
    assert said[1][1] and "None; group" in said[1][0] and "was aborted;" in said[1][0]
    assert not list(files.iterdir())


def _cannot_tell(rank: int, world_size: int, folder: str) -> str:
    """Rank 1 fails to write the words from which its kernels read the board's address. Returns this rank's error."""
    use_shared_memory(folder)
    if rank == 1:
        faults.stop_words = lambda *arguments: 1 / 0
    with pytest.raises(NotOnAllRanks) as found:
        workspace_of(dist.group.WORLD, CPU)
    return str(found.value)


def test_every_rank_raises_if_one_cannot_tell_its_kernels_where_the_board_is(tmp_path: Path) -> None:
    said = run_ranks(WORLD, _cannot_tell, str(tmp_path), timeout=60)
    text = "rank 1 cannot tell its kernels where the board is (ZeroDivisionError: division by zero)"
    assert set(said) == {said[0]} and said[0].startswith(text)


def _sees_no_board(rank: int, world_size: int, folder: str, files: str, blind: int, full: bool) -> str:
    """Rank ``blind`` cannot make or map the board's file, because the folder has no room (``full``) or does not exist.
    Returns this rank's error."""
    use_shared_memory(folder)
    shared_file.SHARED_FOLDER = Path(files)
    if rank == blind and full:

        def fails(file: int, offset: int, size: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        os.posix_fallocate = fails
    elif rank == blind:
        shared_file.SHARED_FOLDER = Path(folder) / "nowhere"
    with pytest.raises(NotOnAllRanks) as found:
        workspace_of(dist.group.WORLD, CPU)
    return str(found.value)


@pytest.mark.parametrize(
    ("blind", "full", "why"),
    [
        (2, False, "map the first rank's file of {} (OverlapError: [Errno 2] No such file"),
        (0, False, "make a file of"),
        # If the folder is full, making the file must fail. Otherwise a later write would end the process with SIGBUS.
        (0, True, "make a file of {} for all ranks (OverlapError: [Errno 28] No space left"),
    ],
    ids=["a rank cannot map the file", "the first rank cannot make the file", "no memory is left for the file"],
)
def test_every_rank_raises_if_one_cannot_make_or_map_the_board(
    blind: int, full: bool, why: str, tmp_path: Path
) -> None:
    """All ranks must raise the same error, and no rank may wait for a timeout."""
    files = tmp_path / "shared"
    files.mkdir()
    said = run_ranks(WORLD, _sees_no_board, str(tmp_path), str(files), blind, full, timeout=60)
    assert set(said) == {said[0]} and said[0].startswith(f"rank {blind} cannot {why.format(files)}")
    assert "OVERLAP_INDUCTOR_SCHEDULE=ring" in said[0]
    assert not list(files.iterdir())
