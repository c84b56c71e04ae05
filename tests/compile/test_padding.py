# SPDX-License-Identifier: Apache-2.0
"""Each rank measures whether padding makes a matmul faster, so ranks may pad different matmuls. The sites must not
depend on padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.padded_matmuls import padded_matmuls
from tests.support.ring_cases import cases


def _reports(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], pads: bool, trains: bool = False, **fields: Any
) -> list[OverlapReport]:
    torch._dynamo.reset()
    with padded_matmuls(pads):
        return reports_of(function, *[torch.randn(s, requires_grad=trains) for s in shapes], **fields)


def _paddings(reports: list[OverlapReport]) -> int:
    return sum(r.before.count("constant_pad_nd.") for r in reports)


QUICK = (
    "gather rows",
    "gather sequence, batch 2",
    "dgrad and wgrad on one gather",
    "bmm",
    "gated MLP, piece by piece",
    "scatter rows",
    "scatter the last dim",
    "all-reduce",
    "two all-reduces added",
    "scatter uneven rows",
    "gathered output",
)
"""The cases that ``make test`` runs."""


@pytest.mark.parametrize("repeats", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_padding_changes_neither_sites_nor_plan(repeats: bool) -> None:
    """A shard has 7 rows. This size is not aligned, so Inductor may pad it."""
    with fake_group(3):
        known = cases(3, 7)
        for name in set(known).difference(QUICK) if repeats else QUICK:
            function, shapes, expected = known[name]
            plain, padded = ([r] for pads in (False, True) for r in _reports(function, shapes, pads))
            assert padded[0].before == plain[0].before, name
            assert padded[0].plan_hash == plain[0].plan_hash, name
            assert padded[0].counters()["sites_overlapped"] == expected, name


TRAINED: dict[str, Callable[..., Any]] = {
    "activation behind the gather's matmul": lambda x, a, b: torch.nn.functional.gelu(
        all_gather(x, 0, torch.distributed.group.WORLD) @ a
    ),
    "gather, activation, scatter": lambda x, a, b: reduce_scatter(
        torch.nn.functional.gelu(all_gather(x, 0, torch.distributed.group.WORLD) @ a) @ b,
        "sum",
        0,
        torch.distributed.group.WORLD,
    ),
    "activation, all-reduce": lambda x, a, b: all_reduce(
        torch.nn.functional.gelu(x @ a) @ b, "sum", torch.distributed.group.WORLD
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.thorough] * (n == "activation behind the gather's matmul")) for n in TRAINED],
)
def test_padding_changes_nothing_in_forward_and_backward(name: str) -> None:
    with fake_group(3):
        plain, padded = (_reports(TRAINED[name], SMALL, pads, trains=True) for pads in (False, True))
    assert [r.plan_hash for r in padded] == [r.plan_hash for r in plain] and any(r.plan_hash for r in plain)
    assert [[s.facts.id for s in r.sites] for r in padded] == [[s.facts.id for s in r.sites] for r in plain]


SMALL = [(7, 18), (18, 10), (10, 18)]


def test_padding_elsewhere_renames_no_site() -> None:
    """Padding changes the numbers in Inductor's node names. In a function without modules, the name of a matmul's node
    takes the place of the site's module. The site's id must not change."""
    group = torch.distributed.group

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return torch.softmax(reduce_scatter(x @ a + b, "sum", 0, group.WORLD), -1) @ c + d

    with fake_group(3):
        plain, padded = (
            _reports(function, [(21, 18), (18, 10), (10,), (10, 18), (18,)], pads) for pads in (False, True)
        )
    assert _paddings(padded) > _paddings(plain)
    assert [s.facts.id for s in padded[0].sites] == [s.facts.id for s in plain[0].sites] and len(plain[0].sites) == 1
    assert padded[0].plan_hash == plain[0].plan_hash


@pytest.mark.parametrize("budget", [40, 4000])
def test_padding_of_the_next_matmul_does_not_change_the_epilogue(budget: int) -> None:
    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(all_gather(x, 0, torch.distributed.group.WORLD) @ a) @ b

    with fake_group(3):
        plain, padded = (
            _reports(function, SMALL, pads, step_node_budget=budget, sub_chunks=4) for pads in (False, True)
        )
    pieces = plain[0].after.count("aten.erf.default(")
    assert pieces == 1 if budget == 40 else pieces > 3
    assert padded[0].after == plain[0].after


@pytest.mark.parametrize("mode", ["on", "report"])
def test_matmuls_elsewhere_are_padded_as_before(mode: str) -> None:
    """The site has only the second matmul, because a softmax follows the first one. The first matmul is padded in both
    modes. The site's matmul is padded in mode ``report`` only."""
    group = torch.distributed.group

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(torch.softmax(x @ a, -1) @ b, "sum", 0, group.WORLD)

    with fake_group(3):
        assert _paddings(_reports(function, [(21, 18), (18, 10), (10, 18)], False, mode=mode)) == 0
        elsewhere, everywhere = 2, 4
        assert _paddings(_reports(function, [(21, 18), (18, 10), (10, 18)], True, mode=mode)) == (
            elsewhere if mode == "on" else everywhere
        )
