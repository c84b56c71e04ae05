"""Inductor pads a matmul where a timing on that rank says so: ranks that decide differently must still run one plan."""

from __future__ import annotations

import torch

from tests.numerics.ranks import run_ranks
from tests.numerics.test_agreement import _check
from tests.padded_matmuls import padded_matmuls


def _first_rank_pads(rank: int, world_size: int) -> list[str]:
    with padded_matmuls(rank == 0):
        return _check(rank, world_size, {"sub_chunks": 2}, torch.float32, None, False)


def test_one_rank_pads_its_matmuls() -> None:
    """Catches a plan or a site that rests on a timing of one rank: an agreement error, or one rank that waits for the
    others."""
    for rank, problems in enumerate(run_ranks(3, _first_rank_pads, timeout=300)):
        assert not problems, f"rank {rank}: {problems}"
