# SPDX-License-Identifier: Apache-2.0
"""The graphs and the code of all-to-alls beside matmuls."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed as dist

from tests.compile.readings import misses
from tests.support.exchange_spellings import RECEIVED
from tests.support.exchange_spellings import SENT
from tests.support.exchange_spellings import exchange
from tests.support.exchange_spellings import from_own_heads
from tests.support.exchange_spellings import to_own_heads
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_of
from tests.support.generated_code import events
from tests.support.generated_code import lines_of
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import c10d
from tests.support.ulysses import UlyssesAttention
from tests.support.ulysses import to_tokens

FORWARD = [(SENT, "N")] * 3 + [(RECEIVED, "K")]
SLOW = json.dumps({"link_bytes": 6.25e7, "step_seconds": 3e-4, "matmul_flops": {"4": 4e10}})


def _block(hidden: int = 32, heads: int = 8, plain: bool = False) -> UlyssesAttention:
    return UlyssesAttention(hidden, heads, dist.group.WORLD, plain=plain)


def _sites(report: object) -> list[tuple[str, str]]:
    sites = [s for s in report.sites if s.decision.status == "overlapped"]  # type: ignore[attr-defined]
    return [(s.facts.pattern, s.facts.matmuls[0].role) for s in sites]


def test_every_exchange_of_a_block_of_a_dynamic_sequence_is_a_site() -> None:
    with fake_group(2, 1), torch.no_grad():
        x = torch.randn(2, 16, 32)
        torch._dynamo.mark_dynamic(x, 1)
        report = report_of(_block(), x, step_node_budget=10_000)
    assert _sites(report) == FORWARD and report.near_misses == []


@pytest.mark.parametrize(("world_size", "dynamic"), [pytest.param(2, True, marks=pytest.mark.thorough), (8, False)])
def test_every_exchange_of_a_ulysses_block_is_a_site(world_size: int, dynamic: bool) -> None:
    with fake_group(world_size, world_size - 1):
        x = torch.randn(2, 16, 32)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 1)
        forward, backward = reports_of(_block(), x.requires_grad_(), step_node_budget=10_000)
    assert _sites(forward) == FORWARD and forward.near_misses == []
    assert _sites(backward) == [(SENT, "N")] + [(RECEIVED, "K")] * 3 and backward.near_misses == []
    assert [len(s.facts.matmuls) for s in backward.sites] == [1, 2, 2, 2]


def test_the_last_slices_also_travel_under_what_comes_before_the_wait() -> None:
    """Each projection's wait stands where the program waits: behind the matmuls of all three projections."""
    with fake_group(2), torch.no_grad():
        report = report_of(_block(), torch.randn(1, 16, 32), sub_chunks=1)
    steps = re.findall(r"inductor\.exchange_(send|wait)|aten\.(addmm)\.", report.after.split("scaled_dot")[0])
    assert ["".join(step) for step in steps] == ["addmm", "send", "addmm"] * 3 + ["wait"] * 3


@pytest.mark.usefixtures("alone")
def test_permutes_of_one_sequence_become_views() -> None:
    """With a batch of one, nothing is copied: slices are sent from where they are computed."""
    w, b = (16, 64), (64,)
    lines = lines_of(to_own_heads, (1, 3, 16), w, b, world_size=4)
    assert events(lines) == ["start", *["mm", "send"] * 3, "mm", "wait"]
    lines = lines_of(from_own_heads, (1, 12, 2, 8), (64, 8), world_size=4)
    assert events(lines) == ["start", "send", "mm", "wait", "send", "mm", "wait", "send", "mm", "wait", "mm"]


def _projected(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, gate: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An output projection of heads, its gate and its residual."""
    return y + gate * torch.nn.functional.linear(to_tokens(x, dist.group.WORLD).flatten(2, 3), w, b)


def _expert(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(torch.addmm(b, exchange(x), w)) @ v


@pytest.mark.usefixtures("alone")
def test_what_follows_the_matmul_of_what_arrives() -> None:
    """Token-wise ops between the site's matmul and a later matmul run on each piece. The output projection is a sum
    over the slices, so its bias, gate and residual are one kernel after the last slice."""
    lines = lines_of(_expert, (12, 16), (16, 64), (64,), (64, 8), world_size=4)
    assert events(lines) == [
        "start",
        "send",
        "mm",
        *["pointwise", "wait", "send", "mm"] * 2,
        "pointwise",
        "wait",
        "mm",
    ] + [
        "pointwise",
        "mm",
    ]
    lines = lines_of(_projected, (1, 12, 2, 8), (64, 64), (64,), (64,), (1, 3, 64), world_size=4)
    assert events(lines) == ["start", "send", "mm", *["wait", "send", "mm"] * 2, "wait", "mm", "pointwise"]


@pytest.mark.usefixtures("alone")
def test_permutes_of_a_batch_are_one_copy() -> None:
    """As written, the graph has two copies: before and after the exchange."""
    lines = lines_of(from_own_heads, (2, 12, 2, 8), (64, 8), world_size=4)
    assert events(lines).count("pointwise") == 1
    lines = lines_of(to_own_heads, (2, 3, 16), (16, 64), (64,), world_size=4)
    assert events(lines).count("pointwise") == 1


def test_the_exchange_belongs_to_the_projection_and_not_to_an_attention_of_plain_matmuls() -> None:
    with fake_group(2), torch.no_grad():
        report = report_of(_block(plain=True), torch.randn(2, 16, 32))
    assert _sites(report) == FORWARD


@pytest.mark.usefixtures("two")
def test_parts_of_a_dynamic_size_may_be_equal() -> None:
    """If the parts are known to be equal, the site is unrolled. Otherwise the site becomes op
    ``matmul_all_to_all_uneven``."""

    def layer(x: torch.Tensor, w: torch.Tensor, known: bool) -> torch.Tensor:
        if known:
            torch._check(x.shape[0] % 2 == 0)
        return exchange(x @ w)

    x, w = torch.randn(4, 16), torch.nn.Parameter(torch.randn(16, 8))
    for known in (True, False):
        report = report_of(layer, x, w, known, dynamic=True)
        assert _sites(report) == [(SENT, "M")]
        assert ("matmul_all_to_all_uneven" in report.after) == (not known)
        torch._dynamo.reset()


@pytest.mark.usefixtures("two")
def test_a_result_that_is_also_read_before_the_exchange() -> None:
    """If no matmul reads what arrives, the site of the matmul before the exchange is refused. If a matmul reads what
    arrives, the exchange is overlapped with that matmul."""
    x, w, v = torch.randn(4, 16), torch.randn(16, 8), torch.randn(8, 8)

    def both(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, after: bool) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        return (exchange(y) @ v if after else exchange(y)), y.sin()

    (site,) = report_of(lambda *a: both(*a, False), x, w, v).sites
    assert (site.facts.pattern, site.decision.status) == (SENT, "refused")
    assert [r.code for r in site.decision.reasons] == ["other_users"]
    assert _sites(report_of(lambda *a: both(*a, True), x, w, v)) == [(RECEIVED, "M")]


@pytest.mark.usefixtures("two")
def test_an_op_that_cannot_be_cut_is_named() -> None:
    x, w = torch.randn(4, 16), torch.randn(16, 16)
    for fn in (lambda x, w: exchange((x @ w).cumsum(0)), lambda x, w: exchange(x).cumsum(0) @ w):
        report = report_of(fn, x, w)
        assert misses(report) == [("all_to_all", "op_between")] and "cumsum" in report.near_misses[0].reason.text


@pytest.mark.usefixtures("two")
def test_an_exchange_of_counts_is_a_near_miss() -> None:
    """A layer of experts exchanges how many tokens each expert gets. No matmul stands beside this exchange."""
    made = HandGraph()
    counts = made.input(2, dtype=torch.int64)
    report = made.output(made.wait(made.call(c10d.all_to_all_single.default, counts, [1, 1], [1, 1], made.group))).run()
    assert report.sites == [] and misses(report) == [("all_to_all", "no_matmul")]


def test_auto_overlaps_exchanges_of_many_tokens_and_keeps_those_of_few() -> None:
    with fake_group(4), torch.no_grad():
        many = report_of(_block(1024, 8), torch.randn(1, 512, 1024), schedule="auto", machine=SLOW)
        torch._dynamo.reset()
        few = report_of(_block(), torch.randn(1, 4, 32), schedule="auto", machine=SLOW)
    assert _sites(many) == FORWARD
    for site in many.sites:
        estimate = site.decision.moving.estimate_us
        # Each rank sends 3/4 of its 512 x 1024 fp32 numbers to other ranks.
        assert site.decision.source == "analytic" and estimate["collective"] >= 0.75 * 512 * 1024 * 4 / 6.25e7 * 1e6
        assert max(estimate["matmul"], 0.75 * 512 * 1024 * 4 / 62.5) <= estimate["ring"] < estimate["keep"]
    assert {(s.decision.status, s.decision.reasons[0].code) for s in few.sites} == {("kept", "too_small")}


def test_ranks_compare_the_order_in_which_elements_are_sent() -> None:
    with fake_group(2), torch.no_grad():
        report = report_of(_block(), torch.randn(2, 16, 32))
    sent = "cut [1, 16] on dim 1 in order [2, 1, 0, 3] of [2, 16, 2, 16] in matmul_all_to_all"
    received = "cut [2] in order [0, 2, 1, 3] of [2, 32, 4, 4] in all_to_all_matmul"
    assert json.loads(report.exchange)["steps"] == [
        *[f"g0: all_to_all float32 [1024] {sent} by ring/p2p (route=direct, sub_chunks=4)"] * 3,
        f"g0: all_to_all float32 [1024] {received} by ring/p2p (route=direct, sub_chunks=2)",
    ]
