# SPDX-License-Identifier: Apache-2.0
"""Ranks that disagree, die or recompile, destroyed groups, and unusual inputs. Each must lead to a clear error or a
right result, never to a hang."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted

SECONDS = 20


def _group(seconds: int = SECONDS) -> dist.ProcessGroup:
    return dist.new_group(timeout=timedelta(seconds=seconds))


def _site(group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    return lambda x, w: all_gather(x, 0, group) @ w


def _inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 16, generator=generator), torch.randn(16, 8, generator=generator)


def _outcome(call: Callable[[], Any]) -> tuple[str, str, float]:
    """``(exception type or "ok", message, seconds)``."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001  (the outcome is what is tested)
        return type(error).__name__, str(error), time.monotonic() - start
    return "ok", "", time.monotonic() - start


# Ranks that disagree


def _disagree(rank: int, world_size: int, fields: list[dict[str, Any]]) -> tuple[str, str, float]:
    group = _group()
    switches = {"schedule": "ring", "agreement_timeout": 3, "sub_chunks": 4, **fields[rank]}
    backend = interpreted(OverlapConfig(**switches), [])
    compiled = torch.compile(_site(group), backend=backend, dynamic=False)
    return _outcome(lambda: compiled(*_inputs(rank)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([{}, {}, {"sub_chunks": 2}], "sub_chunks is"),
        pytest.param([{}, {"ring_direction": "bidirectional"}, {}], "ring_direction is", marks=pytest.mark.thorough),
    ],
    ids=["sub-chunks", "direction"],
)
def test_different_switches(fields: list[dict[str, Any]], words: str) -> None:
    """Here, the backend ``interpreted`` has no plain program to run in place of the rewritten graph. So every rank must
    raise an error that names the ranks with other plans, and what differs."""
    odd = next(i for i, f in enumerate(fields) if f)
    for rank, (kind, text, _) in enumerate(run_ranks(3, _disagree, fields)):
        assert kind == "AgreementError" and words in text, f"rank {rank}: {kind} {text}"
        named = f"ranks {', '.join(str(r) for r in range(3) if r != rank)}: " if rank == odd else f"rank {odd}: "
        assert named in text


def _other_model(rank: int, world_size: int, other: str) -> tuple[str, str, float]:
    """The collective of rank 1's model has another kind, reduce op or dtype. The inputs have equal shapes."""
    group = _group()
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "sum": lambda x, w: reduce_scatter(x @ w, "sum", 0, group),
        "avg": lambda x, w: reduce_scatter(x @ w, "avg", 0, group),
        "all-reduce": lambda x, w: all_reduce(x @ w, "sum", group),
        "cast": lambda x, w: reduce_scatter((x @ w).bfloat16(), "sum", 0, group).float(),
    }
    backend = interpreted(OverlapConfig(schedule="ring", agreement_timeout=3), [])
    compiled = torch.compile(functions[other if rank else "sum"], backend=backend, dynamic=False)
    return _outcome(lambda: compiled(*_inputs(rank)))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (
            "avg",
            (
                r"transfer 1 is g0: reduce_scatter\(sum\) float32 \[4, 8\] .* here and g0: reduce_scatter\(avg\)"
                r" float32 \[4, 8\]"
            ),
        ),
        ("all-reduce", r"and g0: all_reduce\(sum\) float32 \[4, 8\] .* in matmul_all_reduce by ring/p2p"),
        ("cast", r"reduce_scatter\(sum\) bfloat16"),
    ],
)
def test_the_error_names_what_differs_between_two_models(other: str, named: str) -> None:
    here, _ = run_ranks(2, _other_model, other)
    assert here[0] == "AgreementError" and re.search(named, here[1]), here[1]


def _other_version(rank: int, world_size: int) -> tuple[str, str, float]:
    from overlap_inductor.passes import agreed_plan as exchange_steps

    if rank:
        exchange_steps.__version__ = "9.9"
    return _disagree(rank, world_size, [{}, {}])


def test_different_versions() -> None:
    """Two versions may divide a site into different pieces, so every rank must raise an error that names both
    versions."""
    for kind, text, _ in run_ranks(2, _other_version):
        assert kind == "AgreementError" and "overlap_inductor is '" in text and "9.9" in text


def _switched_off_on_one(rank: int, world_size: int) -> tuple[str, str, float]:
    # Rank 1 may wait until the group's timeout, so this timeout is short. Rank 0's deadline does not depend on it.
    group = _group(10)
    inputs = _inputs(rank)
    if rank == 1:
        return _outcome(lambda: _site(group)(*inputs))
    compiled = torch.compile(
        _site(group), backend=interpreted(OverlapConfig(schedule="ring", agreement_timeout=3), []), dynamic=False
    )
    return _outcome(lambda: compiled(*inputs))


def test_switched_off_on_one_rank() -> None:
    """Overlap is off on rank 1, so rank 1 publishes no plan. Rank 0 must raise an error at its deadline. Rank 0 must
    not send to rank 1, which waits in another collective."""
    on, off = run_ranks(2, _switched_off_on_one)
    assert on[0] == "AgreementError" and "rank 1 published no plan" in on[1] and on[2] < 60
    # No peer takes part in rank 1's all-gather. So the all-gather fails at the group's timeout, or when rank 0 ends.
    assert off[0] != "ok"


def _one_compiles_again(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    group = _group()
    outcomes = []
    for sub_chunks in (4, 2 if rank else 4):
        torch._dynamo.reset()
        backend = interpreted(OverlapConfig(schedule="ring", agreement_timeout=3, sub_chunks=sub_chunks), [])
        compiled = torch.compile(_site(group), backend=backend, dynamic=False)
        outcomes.append(_outcome(lambda compiled=compiled: compiled(*_inputs(rank))))
    return outcomes


def test_one_rank_alone_compiles_again() -> None:
    """Both ranks compile again, but only rank 1 gets another plan. Without a plain program, the ranks compare a plan
    only once, even if it is compiled again. Rank 0 has the plan that was agreed before, so it starts its transfers,
    which find no partner. Rank 0's error must say why."""
    (first, kept), (second, changed) = run_ranks(2, _one_compiles_again, expect_failure=True)
    assert first[0] == second[0] == "ok", (first, second)
    assert (
        changed[0] == "AgreementError" and "rank 0 published no plan" in changed[1] and "recompiled alone" in changed[1]
    )
    assert kept[0] == "TransferError" and kept[2] < SECONDS + 15
    assert "another plan was compiled by rank 1" in kept[1] and "sub_chunks is 4 here and 2 there" in kept[1], kept


# A peer that dies


def _peer_dies(rank: int, world_size: int, first_call: bool) -> tuple[str, str, float]:
    group = _group()
    compiled = torch.compile(
        _site(group), backend=interpreted(OverlapConfig(schedule="ring", agreement_timeout=3), []), dynamic=False
    )
    inputs = _inputs(rank)
    if not first_call:
        compiled(*inputs)
    dist.barrier(group)
    if rank == 2:
        os._exit(9)
    outcome = _outcome(lambda: compiled(*inputs))
    # Rank 0's process holds the store, which the other survivor still reads.
    time.sleep(3 if rank == 0 else 0)
    return outcome


@pytest.mark.parametrize("first_call", [True, False], ids=["before the plans are compared", "after"])
def test_killed_peer(first_call: bool) -> None:
    """Survivors must end at most 15 seconds after the group's timeout. Their error must name the dead rank and, once
    the plans have been compared, the site."""
    *survivors, dead = run_ranks(3, _peer_dies, first_call, expect_failure=True)
    assert dead == "rank 2 left no result; exit code 9"
    for kind, text, seconds in survivors:
        assert kind == ("AgreementError" if first_call else "TransferError"), (kind, text)
        assert re.search(r"rank (\d, )*2\b", text) and seconds < SECONDS + 15
        assert first_call or "all_gather_matmul-" in text


# Groups


def _recycled(rank: int, world_size: int) -> list[str]:
    problems = []
    # The function finds its group by name, as a compiled graph does. So it uses a new group in each round.
    name = dist.group.WORLD.group_name

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, world_size, name)
        return torch.ops._c10d_functional.wait_tensor(gathered) @ w

    compiled = torch.compile(function, backend=interpreted(OverlapConfig(schedule="ring"), []), dynamic=False)
    for round_ in range(3):
        if round_:
            store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]) + round_, world_size, is_master=rank == 0)
            dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
        x, w = _inputs(rank + 10 * round_)
        found = compiled(x, w)
        exact = function(x, w)
        if not torch.allclose(found, exact, atol=1e-5):
            problems.append(f"round {round_}: off by {(found - exact).abs().max()}")
        if dist.group.WORLD.group_name != name:
            problems.append(f"round {round_}: the group is called {dist.group.WORLD.group_name}, not {name}")
        dist.barrier()
        if round_ < 2:
            dist.destroy_process_group()
    return problems


def test_recycled_group_names() -> None:
    """A compiled graph may outlive its group. A new group of the same name must not use the old group's counters, keys
    or buffers."""
    assert run_ranks(2, _recycled) == [[], []]


# Unusual inputs


def _edges(rank: int, world_size: int) -> list[str]:
    group = dist.group.WORLD
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "gather": _site(group),
        "gather, inner dim": lambda x, w: all_gather(x, 1, group) @ torch.cat([w] * world_size),
        "all-reduce": lambda x, w: all_reduce(x @ w, "sum", group),
        "gathered output": lambda x, w: all_gather(x @ w, 0, group),
    }

    def all_of_them(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        return [function(x, w) for function, w in zip(functions.values(), weights, strict=True)]

    inputs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda x: x.t().contiguous().t(),
        "strided rows": lambda x: x.repeat(2, 1)[::2],
        "with an offset": lambda x: torch.cat([x, x])[1:-1],
        "zero tokens": lambda x: x[:0],
        "one token": lambda x: x[:1],
        "expanded": lambda x: x[:1].expand(5, -1),
        "no multiple of the ranks": lambda x: x[:3],
    }
    problems = []
    x, w = _inputs(rank)
    # One graph holds all functions, because one compile is faster than four.
    weights = [w * (i + 1) for i in range(len(functions))]
    for kind, make in inputs.items():
        torch._dynamo.reset()
        reports: list[OverlapReport] = []
        value = make(x)
        backend = interpreted(OverlapConfig(schedule="ring", sub_chunks=2), reports)
        results = torch.compile(all_of_them, backend=backend, dynamic=False)(value, *weights)
        for (name, function), weight, found in zip(functions.items(), weights, results, strict=True):
            exact = function(value.double(), weight.double())
            if found.shape != exact.shape or not torch.allclose(found.double(), exact, atol=1e-4):
                problems.append(f"{name}, {kind}: wrong")
            if found.stride() != function(value, weight).stride():
                problems.append(f"{name}, {kind}: strides {found.stride()}")
        for site in reports[0].sites:
            if site.decision.status != "overlapped":
                reasons = [(r.code, r.text) for r in site.decision.reasons]
                problems.append(f"{kind}: {site.facts.id}: {site.decision.status} {reasons}")
        if len(reports[0].sites) != len(functions):
            problems.append(f"{kind}: {len(reports[0].sites)} sites")
    return problems


def test_unusual_inputs() -> None:
    """Results must have the strides of eager PyTorch. No rank may wait for a piece without rows, and no row may be
    lost."""
    for rank, found in enumerate(run_ranks(2, _edges, timeout=400)):
        assert found == [], f"rank {rank}: {found}"


def _alone(rank: int, world_size: int) -> tuple[bool, list[tuple[str, list[str]]]]:
    reports: list[OverlapReport] = []
    x, w = _inputs(rank)
    function = lambda x, w: all_reduce(x @ w, "sum", dist.group.WORLD)  # noqa: E731
    found = torch.compile(function, backend=interpreted(OverlapConfig(schedule="ring"), reports), dynamic=False)(x, w)
    return torch.allclose(found, x @ w, atol=1e-5), [
        (s.decision.status, [r.code for r in s.decision.reasons]) for s in reports[0].sites
    ]


def test_world_size_one() -> None:
    """With one rank, there is no transfer to hide. The report must say so."""
    assert run_ranks(1, _alone) == [(True, [("kept", ["world_size_one"])])]


def _without_group(rank: int, world_size: int) -> tuple[bool, list[tuple[Any, Any]]]:
    assert not dist.is_initialized()
    reports: list[OverlapReport] = []
    x, w = _inputs(0)
    found = torch.compile(lambda x, w: torch.relu(x @ w), backend=interpreted(OverlapConfig(schedule="ring"), reports))(
        x, w
    )
    return torch.allclose(found, torch.relu(x @ w)), [(r.sites, r.near_misses) for r in reports]


def test_uninitialised_process_group() -> None:
    """Without a process group there is no site, and the pass must work."""
    assert run_ranks(1, _without_group, grouped=False) == [(True, [([], [])])]


def test_a_plan_of_another_form_is_named_by_its_version() -> None:
    """Another version may write plans in another format. The comparison must name that version."""
    from overlap_inductor.facts.exchange import ExchangePlan
    from overlap_inductor.facts.exchange import difference

    mine = ExchangePlan("0.2", "on", ("g0: all_reduce float32 kept",))
    for other in ('{"overlap_inductor": "0.1", "steps": 1, "config": []}', '{"overlap_inductor": "0.1", "sites": {}}'):
        assert (
            difference(mine, {1: ExchangePlan.from_json(other)})
            == "rank 1: overlap_inductor is '0.2' here and '0.1' there"
        )
