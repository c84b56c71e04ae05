# SPDX-License-Identifier: Apache-2.0
"""All-to-alls after a matmul and row-wise ops, such as the norms and rotary embeddings of Ulysses attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.report.report import OverlapReport
from tests.compile.readings import misses
from tests.support.exchange_spellings import exchange
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.generated_code import events
from tests.support.generated_code import lines_of
from tests.support.golden import check_golden
from tests.support.ulysses import UlyssesAttention
from tests.support.ulysses import to_heads

SENT, RECEIVED = "matmul_all_to_all", "all_to_all_matmul"


def _overlapped(report: OverlapReport) -> list[str]:
    return [s.facts.pattern for s in report.sites if s.decision.status == "overlapped"]


def normed(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The norm of each head of a projection, then the exchange."""
    y = (x @ w).unflatten(-1, (-1, 8))
    return to_heads(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * scale, dist.group.WORLD)


BLOCKS = list(itertools.product(("heads", "rows"), ("halves", "pairs", ""), (False, True)))
QUICK = [("heads", "halves", False), ("rows", "pairs", False), ("rows", "", True)]
"""These blocks cover each norm, each rotary embedding, and static and dynamic sizes."""


@pytest.mark.parametrize(
    ("norm", "rotary", "dynamic"),
    [pytest.param(*block, marks=[] if block in QUICK else [pytest.mark.thorough]) for block in BLOCKS],
)
def test_every_exchange_of_a_block_is_a_site(norm: str, rotary: str, dynamic: bool) -> None:
    with fake_group(4, 3), torch.no_grad():
        block = UlyssesAttention(64, 8, dist.group.WORLD, norm=norm, rotary=rotary)
        x, places = torch.randn(1, 6, 64), torch.arange(6.0)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 1)
            torch._dynamo.mark_dynamic(places, 0)
        report = report_of(block, x, places)
    assert _overlapped(report) == [SENT] * 3 + [RECEIVED] and report.near_misses == [], report.near_misses


@pytest.mark.usefixtures("alone")
def test_each_band_is_sent_before_the_next_one_is_multiplied() -> None:
    """Each band has its own norm kernel, which writes the parts in the order of sending."""
    lines = lines_of(normed, (1, 6, 16), (16, 64), (8,), world_size=4, sub_chunks=2)
    found = events(lines)
    assert found.index("start") < found.index("send"), found
    steps = [e for e in found if e != "start"]
    assert steps[:10] == ["mm", "pointwise", "send", "send", "send"] * 2, found
    assert steps.count("wait") == 1 and steps.index("wait") >= 10, found


def test_ranks_compare_the_bands() -> None:
    with fake_group(2), torch.no_grad():
        first, second = (
            report_of(normed, torch.randn(2, 6, 16), torch.randn(16, 32), torch.randn(8), sub_chunks=parts)
            for parts in (1, 2)
        )
    assert first.plan_hash != second.plan_hash and _overlapped(first) == _overlapped(second) == [SENT]
    if torch.__version__.startswith("2.13"):
        check_golden(second.after, "exchange_in_bands.txt")


def _over_tokens(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return exchange((y - y.mean(0)).unflatten(1, (2, -1)).transpose(0, 1).contiguous())


def _of_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Here a band is neighbouring rows of the product, and must hold a part of what each rank gets. In this program,
    each row goes to one rank only, so there is no such band."""
    y = x @ w
    return exchange(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))


def _read_before(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The exchange needs a sum over the whole product, so no band can be sent early."""
    y = x @ w
    y = y.softmax(-1) * (y.sum() > 0)
    return exchange(y.unflatten(1, (2, -1)).transpose(0, 1).contiguous())


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("function", [_over_tokens, _of_rows, _read_before])
def test_a_near_miss(function: Callable[..., torch.Tensor]) -> None:
    report = report_of(function, torch.randn(4, 16), torch.randn(16, 8))
    assert report.sites == [] and misses(report)[0][0] == "all_to_all"


@pytest.mark.usefixtures("two")
def test_other_schedules_do_not_compute_the_ops_between() -> None:
    inputs = torch.randn(2, 6, 16).bfloat16(), torch.randn(16, 32).bfloat16(), torch.randn(8).bfloat16()
    (site,) = report_of(normed, *inputs, schedule="chunked").sites
    assert site.decision.status == "refused" and "is between the matmuls and" in site.decision.reasons[0].text


@pytest.mark.usefixtures("two")
def test_a_budget_that_is_too_small_is_a_reason() -> None:
    (site,) = report_of(normed, torch.randn(2, 6, 16), torch.randn(16, 32), torch.randn(8), step_node_budget=1).sites
    assert [r.code for r in site.decision.reasons] == ["too_many_steps"]
