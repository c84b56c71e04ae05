# SPDX-License-Identifier: Apache-2.0
"""Attention that runs while its keys and values are exchanged: the rewritten graphs, and the code that Inductor
generates from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import fx

from overlap_inductor.passes import find_held
from tests.compile.readings import summary
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_by_fields
from tests.support.fake_group import reports_of
from tests.support.generated_code import events
from tests.support.generated_code import lines_of
from tests.support.golden import check_golden
from tests.support.golden import report_text
from tests.support.rotated_attention import OP
from tests.support.rotated_attention import rotation
from tests.support.rotated_attention import token_ring
from tests.support.rotated_attention import torch_ring

SCHEDULE = {"schedule": "early_start"}
SHAPE = (2, 4, 8, 16)
SLOW_MATMULS = json.dumps({"collective_seconds": 1e-9, "link_bytes": 1e9, "matmul_flops": {"4": 5.5e10}})
SLOW = json.dumps({"link_bytes": 6.25e7, "step_seconds": 3e-4})


@torch.library.custom_op("rotated_test::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _own(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(SHAPE) for _ in range(count)]


def causal_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch_ring(q, k, v, True)


NAMES = {"alltoall": "attention_all_to_all", "allgather": "attention_all_gather"}


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="golden files are for torch 2.13")
@pytest.mark.parametrize(
    ("file", "layer", "method"),
    [
        ("rotated/full.txt", torch_ring, "alltoall"),
        ("rotated/causal.txt", causal_ring, "alltoall"),
        ("rotated/gathered.txt", torch_ring, "allgather"),
        ("rotated/by_hand.txt", token_ring, "alltoall"),
    ],
)
def test_golden(file: str, layer: Callable[..., torch.Tensor], method: str) -> None:
    with fake_group(2), torch.no_grad(), rotation(method, layer is causal_ring):
        report = report_of(layer, *_own(), **SCHEDULE)
    text = f"{report_text(report)}\nbefore\n{report.before}\nafter\n{report.after}"
    check_golden(text.rstrip() + "\n", file)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 4])
@pytest.mark.parametrize("method", ["alltoall", "allgather"])
def test_every_exchange_is_a_site(method: str, ranks: int, causal: bool) -> None:
    """Each exchange that passes a block on is a site. A gather passes all blocks on at once, as one site."""
    with fake_group(ranks, ranks - 1), torch.no_grad(), rotation(method, causal):
        report = report_of(causal_ring if causal else torch_ring, *_own(), **SCHEDULE)
    found = [(s.facts.pattern, s.decision.status) for s in report.sites]
    count = ranks - 1 if method == "alltoall" else 1
    assert found == [(NAMES[method], "overlapped")] * count and report.near_misses == [] and not report.failures


def _lines(method: str, schedule: str) -> list[str]:
    with rotation(method, False):
        return lines_of(torch_ring, *[SHAPE] * 3, world_size=3, rank=2, schedule=schedule)


def _order(lines: list[str]) -> list[str]:
    return [event for event in events(lines) if event != "pointwise"]


@pytest.mark.usefixtures("alone")
def test_exchanges_run_under_the_attention_and_keep_what_they_send() -> None:
    """With ``keep``, an exchange starts only when its result is needed. With ``early_start``, the exchange
    starts before an attention that does not need that result. Until the exchange's wait, the sent buffer must not be
    freed or reused."""
    assert _order(_lines("alltoall", "keep")) == ["attention", *["exchange", "wait for it", "attention"] * 2]
    assert _order(_lines("allgather", "early_start")) == ["gather", "attention", "wait for it", *["attention"] * 2]
    lines = _lines("alltoall", "early_start")
    assert _order(lines) == [*["exchange", "attention", "wait for it"] * 2, "attention"]
    starts = [i for i, line in enumerate(lines) if "all_to_all_single.default(" in line and not line.startswith("#")]
    waits = [i for i, line in enumerate(lines) if "wait_tensor.default(" in line and not line.startswith("#")]
    assert len(starts) == len(waits) == 2
    for start, wait in zip(starts, waits, strict=True):
        sent = lines[start].split("default(")[1].split(",")[0]
        assert not [
            line for line in lines[start + 1 : wait] if sent in line.replace(",", " ").replace(";", " ").split()
        ]


def test_training_forward() -> None:
    """As written, each wait follows its exchange directly. In the rewritten graph, the attention stands between the
    two."""
    with fake_group(3), rotation("alltoall", False):
        forward, *_ = reports_of(torch_ring, *(x.requires_grad_() for x in _own()), **SCHEDULE)
    assert [s.decision.status for s in forward.sites] == ["overlapped"] * 2
    names = ("all_to_all_single", "_scaled_dot_product", "wait_tensor")
    order = [name for line in forward.after.splitlines() for name in names if line.startswith(name)]
    assert order == [*names] * 2 + [names[1]]


def test_keys_and_values_apart_are_one_site() -> None:
    with fake_group(2), torch.no_grad():
        report = report_of(token_ring, *_own(), **SCHEDULE)
    assert summary(report) == [("attention_all_to_all", None, ["attention K"], "overlapped")]
    assert len(json.loads(report.exchange)["steps"]) == 3
    lines = report.after.splitlines()
    first = next(i for i, line in enumerate(lines) if "_for_cpu.default(" in line)
    assert sum(line.startswith("all_to_all_single") for line in lines[:first]) == 2


def test_ranks_with_different_graphs_write_the_same_plan() -> None:
    """Without load balance, ranks of a causal ring skip blocks that the mask hides. So they find different numbers of
    sites.

    Rank 0 has only a causal block. The other ranks also have whole blocks. At the rates ``SLOW_MATMULS``, an early
    start pays only beside a whole block. With ``auto``, all ranks must still choose alike.
    """
    plans, chosen, sites = set(), set(), []
    for rank in range(3):
        with fake_group(3, rank), torch.no_grad(), rotation("alltoall", False):
            (report,), (auto,) = reports_by_fields(
                causal_ring, *_own(), several=[SCHEDULE, {"schedule": "auto", "machine": SLOW_MATMULS}]
            )
        plans.add(report.exchange)
        chosen.add(auto.exchange)
        sites.append(len(report.sites))
    assert len(chosen) == 1 and json.loads(chosen.pop())["steps"][-1] == "g0: kept collectives in the graph's order"
    assert sites == [1, 2, 2] and len(plans) == 1
    assert json.loads(plans.pop())["steps"] == [
        *["g0: all_to_all float32 kept"] * 2,
        "g0: kept collectives in the graph's order",
    ]


@pytest.mark.usefixtures("two")
def test_a_collective_between_attention_and_exchange() -> None:
    """The exchange must not move before the other collective. If it moved, the ranks' orders would differ, because a
    rank without this attention leaves the exchange in place."""

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = OP(q, k, v)[0]
        total = funcol.all_reduce(q, "sum", dist.group.WORLD)
        return y, total, funcol.permute_tensor(torch.cat([k.flatten(), v.flatten()]), [1, 0], dist.group.WORLD)

    report = report_of(layer, *_own(), **SCHEDULE)
    assert summary(report) == []
    (near,) = [n for n in report.near_misses if n.collective.kind == "all_to_all"]
    assert near.reason.code == "hoist" and "is a collective of the same group between" in near.reason.text


@pytest.mark.usefixtures("two")
def test_an_opaque_op_between_attention_and_exchange() -> None:
    """The exchange must not move before an op that may itself issue a collective of the exchange's group."""

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = OP(q, k, v)[0]
        total = opaque(q)
        return y, funcol.permute_tensor(
            torch.cat([k.flatten(), v.flatten(), total.flatten()]), [1, 0], dist.group.WORLD
        )

    report = report_of(layer, *_own(), **SCHEDULE)
    assert summary(report) == []
    (near,) = [n for n in report.near_misses if n.collective.kind == "all_to_all"]
    assert near.reason.code == "hoist" and "may issue collectives" in near.reason.text


def test_what_is_sent_is_computed_with_after_the_attention() -> None:
    """Inductor may compute an op on the keys in place, while the exchange still sends them. ``_later_reader`` must find
    such an op, also behind a view."""
    graph = fx.Graph()
    keys = graph.placeholder("keys")
    attention = graph.call_function(torch.ops.aten.relu.default, (keys,))
    view = graph.call_function(torch.ops.aten.reshape.default, (keys, [8]))
    between = graph.call_function(torch.ops.aten.sin.default, (view,))
    exchange = graph.call_function(torch.ops.aten.clone.default, (keys,))
    graph.call_function(torch.ops.aten.sin.default, (keys,))
    sent: Any = SimpleNamespace(input=keys, node=exchange)
    assert find_held._later_reader(sent, attention) is between
    assert find_held._later_reader(sent, between) is None


@pytest.mark.usefixtures("two")
def test_an_exchange_that_waits_for_itself_is_no_site() -> None:
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moved = torch.ops._dtensor.shard_dim_alltoall(k, 2, 1, dist.group.WORLD.group_name)
        return OP(q, k, v)[0], moved

    report = report_of(layer, *_own(), **SCHEDULE)
    assert summary(report) == [] and not report.failures


@pytest.mark.usefixtures("two")
def test_a_dependent_attention_hides_nothing() -> None:
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        both = funcol.permute_tensor(torch.cat([k.flatten(), v.flatten()]), [1, 0], dist.group.WORLD)
        return OP(q + both[: q.numel()].view(q.shape), k, v)[0]

    report = report_of(layer, *_own(), **SCHEDULE)
    assert summary(report) == [] and report.near_misses[0].reason.code == "no_matmul"


def test_the_ring_leaves_these_exchanges_as_written() -> None:
    with fake_group(2), torch.no_grad(), rotation("alltoall", False):
        report = report_of(torch_ring, *_own())
    (site,) = report.sites
    assert site.decision.status == "refused" and "computes attention_all_to_all" in site.decision.reasons[0].text


@pytest.mark.parametrize(("own", "status"), [(1024, "overlapped"), (2, "kept")])
def test_the_planner(own: int, status: str) -> None:
    """The attention hides much of the exchange only for a long sequence."""
    with fake_group(2), torch.no_grad(), rotation("alltoall", False):
        given = [torch.randn(2, 4, own, 16) for _ in range(3)]
        report = report_of(torch_ring, *given, schedule="auto", machine=SLOW)
    (site,) = report.sites
    estimate = site.decision.plan[0].estimate_us
    assert site.decision.status == status
    assert max(estimate["matmul"], estimate["collective"]) <= estimate["early_start"] <= estimate["keep"]
