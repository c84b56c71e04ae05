# SPDX-License-Identifier: Apache-2.0
"""All ranks of a 2-D mesh run the plain program in two cases: one rank has another plan, or one row cannot run its
plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.differing_ranks import block_on_a_mesh
from tests.support.differing_ranks import counts
from tests.support.differing_ranks import inputs_of
from tests.support.differing_ranks import ring
from tests.support.differing_ranks import wrong
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.heard import Heard

TIMEOUT = 60


def _mesh(rank: int, world_size: int, fields: list[dict[str, Any]]) -> dict[str, Any]:
    """Run a block on a 2-D mesh. A difference in one row must reach the other row through the columns."""
    compile_anew(kernels=False)
    function = block_on_a_mesh()
    heard, inputs = Heard(), inputs_of(rank)
    with ring(agreement_timeout=TIMEOUT, **fields[rank]):
        compiled = torch.compile(function, dynamic=False)
        problems = [p for _ in range(2) for p in wrong(compiled(*inputs), function, inputs)]
    return {"problems": problems, "warnings": heard.texts, "counts": counts()}


@pytest.mark.parametrize("differs", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_difference_reaches_all_ranks_of_a_mesh(differs: bool) -> None:
    results = run_ranks(4, _mesh, [{}, {}, {}, {"sub_chunks": 2} if differs else {}])
    assert all(r["problems"] == [] for r in results), results
    assert all(bool(r["counts"].get("reason.ranks_differ")) is differs for r in results), results
    warnings = [w for r in results for w in r["warnings"]]
    assert (
        all("rank 3: " in w and "sub_chunks is 4 here and 2 there" in w for w in warnings) and bool(warnings) is differs
    ), warnings


def _without_memory(rank: int, world_size: int) -> dict[str, Any]:
    """On a 2 x 2 mesh, the ranks of one row have no memory for their workspace. Rings need no workspace, so the
    failure is simulated."""
    from overlap_inductor.inductor import compared_call

    compile_anew(kernels=False)
    function = block_on_a_mesh()
    made = compared_call.ComparedCall._prepare
    compared_call.ComparedCall._prepare = lambda self, inputs: (
        made(self, inputs) or ("rank 3 has no memory left" if rank > 1 else "")
    )  # type: ignore[method-assign]
    heard, inputs = Heard(), inputs_of(rank)
    with ring(agreement_timeout=TIMEOUT):
        compiled = torch.compile(function, dynamic=False)
        problems = [p for _ in range(2) for p in wrong(compiled(*inputs), function, inputs)]
    return {"problems": problems, "warnings": heard.texts, "counts": counts()}


def test_all_ranks_of_a_mesh_run_the_plain_program_if_one_row_has_no_memory() -> None:
    results = run_ranks(4, _without_memory)
    assert all(r["problems"] == [] and r["counts"]["reason.ranks_differ"] == 2 for r in results), results
    assert len([w for r in results for w in r["warnings"]]) == 1, results
