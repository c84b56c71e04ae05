# SPDX-License-Identifier: Apache-2.0
"""The sequence-parallel rewrite of layers that are written as in common frameworks. The tests compare graphs with
golden files and between ranks."""

from __future__ import annotations

import pytest
import torch

from overlap_inductor.facts.stretch import StretchFacts
from overlap_inductor.report.report import OverlapReport
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.golden import check_golden
from tests.support.sequence_blocks import BLOCKS
from tests.support.sequence_blocks import file_of

TORCH = "2.13"
"""The golden files are for this torch version."""
KEPT = {
    "few tokens": "few_tokens",
    "dropout": "no_token_wise_work",
}
"""Blocks that are not rewritten, each with its reason."""
ON_RANKS = [
    *[(2, "llama trained"), (2, "positions"), (2, "uneven")],
    *[(3, "llama"), (3, "uneven"), (3, "dynamic"), (3, "dynamic odd")],
    *[(8, "llama trained"), (8, "dynamic"), (8, "dynamic odd"), (8, "fp8")],
]
"""``(number of ranks, block)``. The block's reports and graphs are compared between the first and the last rank."""
REPEATED = [(2, "llama trained"), (2, "positions"), (2, "uneven"), (3, "llama"), (8, "llama trained"), (8, "dynamic")]
"""The entries of ``ON_RANKS`` that only thorough tests compare. ``test_golden`` already checks the graphs of these
blocks on the last of 2 ranks."""


def reports(name: str, world_size: int, rank: int = 0) -> list[OverlapReport]:
    fn, make = BLOCKS[name]
    trained = name.endswith("trained")
    with fake_group(world_size, rank), torch.set_grad_enabled(trained):
        arguments = [t.requires_grad_(trained) for t in make(world_size)]
        if name.startswith("dynamic"):
            torch._dynamo.mark_dynamic(arguments[0], 0)
        return reports_of(fn, *arguments, sequence_parallel="on", sub_chunks=1)


def describe(stretch: StretchFacts) -> str:
    reasons = "".join(f"\n  {r.code}: {r.text}" for r in stretch.reasons)
    needs = ", ".join(f"{op} ({count})" for op, count in stretch.gathered_for.items())
    return (
        f"{stretch.id} {stretch.status}: {stretch.tokens} tokens x {stretch.features} {stretch.dtype}\n"
        f"  {stretch.all_reduces} all-reduces -> {stretch.scatters} scatters, {stretch.gathers} gathers,"
        f" {stretch.sums} sums; {stretch.nodes} nodes on rows; all rows for: {needs}{reasons}\n"
    )


def text(found: list[OverlapReport]) -> str:
    """For each graph, its stretches, and the graph as the overlap pass finds it."""
    return "----\n".join(f"{r.phase}\n{''.join(map(describe, r.stretches))}\n{r.before}" for r in found)


@pytest.mark.parametrize("name", BLOCKS)
def test_golden(name: str) -> None:
    found = reports(name, 2, 1)
    stretches = [s for r in found for s in r.stretches]
    codes = {KEPT[name]} if name in KEPT else set()
    assert {r.code for s in stretches for r in s.reasons} == codes and stretches
    assert not any(r.failures for r in found)
    if torch.__version__.startswith(TORCH):
        check_golden(text(found), file_of(name))


@pytest.mark.parametrize(
    ("world_size", "name"),
    [pytest.param(*key, marks=[pytest.mark.thorough] * (key in REPEATED)) for key in ON_RANKS],
)
def test_the_first_and_the_last_rank_have_one_text(world_size: int, name: str) -> None:
    """A graph must not hold the rank's number. Otherwise ranks would compile different code, or hang."""
    found = [reports(name, world_size, rank) for rank in (0, world_size - 1)]
    first, last = ([r.to_json(graphs=True) for r in of_rank] for of_rank in found)
    assert first == last and all(s.status == "rewritten" for r in found[0] for s in r.stretches)
