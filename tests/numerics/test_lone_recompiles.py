# SPDX-License-Identifier: Apache-2.0
"""One rank alone recompiles its graph. The new graph may exchange other data than the old one.

The ranks compare their plans as for graphs on GPUs. If they share memory, they compare plans on the *call page* of the
group, which is in this memory. The usual comparison for graphs on CPUs, through the store at every call, is switched
off.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.report.publish import all_reports
from overlap_inductor.runtime import agreement
from overlap_inductor.runtime import call_board
from overlap_inductor.runtime import call_page
from overlap_inductor.runtime import call_store
from overlap_inductor.runtime import shared_file
from overlap_inductor.runtime.call_state import state_of
from overlap_inductor.torch_compat.distributed import group_store
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.support.differing_ranks import UNROLLED
from tests.support.differing_ranks import ring
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.heard import Heard

TIMEOUT = 60
SHAPES = ((8, 16), (16, 12), (12, 16))
"""A shard of rows, and two weights."""


def _compare_as_on_gpus() -> None:
    made = agreement.Comparison.__init__
    agreement.Comparison.__init__ = lambda self, plan, groups, every_call: made(self, plan, groups, False)


def _groups(world_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The two groups of a rank. With two ranks, both are the group of all ranks. With four, they are the rank's row and
    column of a 2 x 2 mesh."""
    if world_size == 2:
        return dist.group.WORLD, dist.group.WORLD  # type: ignore[return-value]
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh["tp"].get_group(), mesh["dp"].get_group()


def _alone(rank: int, world_size: int, change: dict[str, Any], trains: bool, folder: str) -> dict[str, Any]:
    """Each rank calls one function eight times. Before the fourth call, only the last rank compiles the function again,
    with the switches in ``change``. This rank makes its fourth and fifth call with the new graph."""
    compile_anew(kernels=False)
    _compare_as_on_gpus()
    if folder:
        own = Path(folder) / str(rank)
        own.mkdir()
        shared_file.SHARED_FOLDER = own
    rows, columns = _groups(world_size)

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return all_reduce(torch.relu(all_gather(x, 0, rows) @ a) @ b, "sum", columns)

    heard, problems = Heard(), []
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).float().requires_grad_(trains) for s in SHAPES]
    exact = [i.detach().double().requires_grad_(trains) for i in inputs]

    def check(compiled: Any, when: str) -> None:
        found, wanted = compiled(*inputs), function(*exact)
        pairs = [("result", found, wanted)]
        if trains:
            gradients = torch.autograd.grad(found.square().sum(), inputs)
            pairs += zip(("x", "a", "b"), gradients, torch.autograd.grad(wanted.square().sum(), exact), strict=True)
        for name, f, w in pairs:
            error = ((f.double() - w).abs().max() / w.abs().max()).item()
            if not error < 1e-5:
                problems.append(f"{when}: {name} off by {error:.3g}")

    with ring(agreement_timeout=TIMEOUT):
        first = torch.compile(function, dynamic=False)
        for _ in range(3):
            check(first, "at first")
    agreed, alone = len(heard.texts), rank == world_size - 1
    with ring(agreement_timeout=TIMEOUT, **(change if alone else {})):
        second = torch.compile(lambda *args: function(*args), dynamic=False) if alone else first
        for _ in range(2):
            check(second, "alone")
        plain, compiles = len(heard.texts), len(all_reports())
        for _ in range(3):
            check(first, "back")
    if len(all_reports()) > compiles:
        problems.append("back: the agreed graph was compiled again, not called")
    pages = [state_of(g).page is not None for g in dict.fromkeys((rows, columns))]
    return {"problems": problems, "warnings": heard.texts, "agreed": agreed, "plain": plain, "pages": pages}


@pytest.mark.parametrize(
    ("world_size", "change", "trains", "words"),
    [
        (2, {"sub_chunks": 2}, False, "sub_chunks is 4 here and 2 there"),
        pytest.param(2, {"sub_chunks": 2}, True, "sub_chunks is 4 here and 2 there", marks=pytest.mark.thorough),
        (2, {"mode": "report"}, False, "all_gather float32 kept there"),
        (2, {"patterns": ("all_gather_matmul",)}, True, "kept there"),
        pytest.param(4, {"sub_chunks": 2}, False, "sub_chunks is 4 here and 2 there", marks=pytest.mark.thorough),
        pytest.param(4, {"mode": "report"}, False, "kept there", marks=pytest.mark.thorough),
    ],
    ids=["other pieces", "trained", "no site", "trained, one site less", "mesh", "mesh, no site"],
)
def test_all_ranks_run_the_plain_program(world_size: int, change: dict[str, Any], trains: bool, words: str) -> None:
    """The rank that recompiles must not wait until its deadline and raise an error. A new graph without a site must
    compare plans, too. Otherwise peers would wait until the group's timeout."""
    results = run_ranks(world_size, _alone, change, trains, "")
    assert all(r["problems"] == [] and all(r["pages"]) and r["agreed"] == 0 for r in results), results
    warnings = [w for r in results for w in r["warnings"]]
    told = "rank 0 and other ranks do not make the same transfers"
    assert warnings and all(told in w or world_size == 4 for w in warnings), results
    assert all(words in w for w in warnings if "sub_chunks" in words) and any(words in w for w in warnings), results
    assert [r["plain"] for r in results] == [len(r["warnings"]) for r in results], (
        "a rank did not warn about a call that ran plain, or warned about another call"
    )


def test_a_recompile_to_the_same_exchange_gives_no_warning() -> None:
    for result in run_ranks(2, _alone, UNROLLED, False, ""):
        assert result["problems"] == [] and result["warnings"] == [] and all(result["pages"]), result


def test_ranks_without_memory_in_common_run_without_a_call_page(tmp_path: Path) -> None:
    """The ranks share no memory, as on several machines. Results must be right without a call page and without a
    warning. No file may be left."""
    for result in run_ranks(2, _alone, UNROLLED, False, str(tmp_path)):
        assert result["problems"] == [] and result["warnings"] == [] and not any(result["pages"]), result
    assert [list(own.iterdir()) for own in tmp_path.iterdir()] == [[], []]


def _plan(steps: str, overlaps: bool) -> ExchangePlan:
    return ExchangePlan("1", "on", (steps,), overlaps, groups=((dist.group.WORLD.group_name,),))


def _ahead(rank: int, world_size: int, calls: int) -> dict[str, Any]:
    """Rank 1 makes ``calls`` calls without overlap before rank 0 compares the first of them. No data moves."""
    group = dist.group.WORLD
    same = agreement.Comparison(_plan("g0: all_reduce float32 [4] in matmul_all_reduce by ring", True), [group], False)
    kept = agreement.Comparison(_plan("g0: all_reduce float32 [4] kept", False), [group], False)
    # The third call is made as in ``ComparedCall``: ``count`` first, then ``call`` if ``count`` returns False.
    # ``count`` returns False if a rank is late. ``call`` then decides whether the ranks overlap this call.
    found = [same.call().overlapped, same.call().overlapped, same.count() or same.call().overlapped]
    dist.barrier()
    if rank:
        found += [kept.count() or kept.call().overlapped for _ in range(calls)]
        dist.barrier()
        return {"found": found[:3]}
    dist.barrier()
    assert not same.count()
    outcome = same.call()
    return {"found": found, "overlapped": outcome.overlapped, "why": outcome.difference}


@pytest.mark.parametrize("calls", [1, 3 * call_page.CALLS])
def test_a_rank_that_is_far_ahead_ran_the_call_without_overlap(calls: int) -> None:
    here, there = run_ranks(2, _ahead, calls)
    assert here["found"] == there["found"] == [True] * 3 and not here["overlapped"], here
    assert ("calls ahead of rank 0" if calls > 1 else "rank 1: transfer 1") in here["why"]


def _compiled_again(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """The group has no call page. Rank 1 alone recompiles a graph that no rank overlaps. Another graph overlaps a
    collective of the same kind."""
    compile_anew(kernels=False)
    _compare_as_on_gpus()
    shared_file.SHARED_FOLDER = Path(folder) / str(rank)
    shared_file.SHARED_FOLDER.mkdir()
    heard, x, w = Heard(), torch.ones(8, 16), torch.ones(16, 12)
    begun = 0.0

    def reduced(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(torch.relu(x), "sum", dist.group.WORLD)

    with ring(agreement_timeout=8):
        overlapped = torch.compile(lambda x, w: all_reduce(x @ w, "sum", dist.group.WORLD), dynamic=False)
        kept = torch.compile(reduced, dynamic=False)
        found = [overlapped(x, w), kept(x)]
        if rank:
            kept = torch.compile(lambda x: reduced(x), dynamic=False)
        begun = time.monotonic()
        found += [kept(x), kept(x)]
    wrong = [f.unique().tolist() for f, value in zip(found, (32.0, 2.0, 2.0, 2.0), strict=True) if (f != value).any()]
    page = state_of(dist.group.WORLD).page  # type: ignore[arg-type]
    return {"wrong": wrong, "warnings": heard.texts, "page": page, "seconds": time.monotonic() - begun}


def test_a_kept_plan_that_ran_before_needs_no_answer(tmp_path: Path) -> None:
    """The recompiled graph makes the same transfers as the old graph, so its plan is not new. The rank that recompiled
    must not wait for the other rank's plan, which never comes."""
    for result in run_ranks(2, _compiled_again, str(tmp_path)):
        assert result["wrong"] == result["warnings"] == [] and result["page"] is None and result["seconds"] < 8, result


def _late(rank: int, world_size: int) -> bool:
    """Rank 0 is late by more than ``ABSENT`` seconds, and has not announced that it compiles with overlap on. Rank 1
    must still wait, because the ranks have agreed upon a plan."""
    call_board.ABSENT = 0.5
    plan = _plan("g0: all_reduce float32 [4] in matmul_all_reduce by ring", True)
    same = agreement.Comparison(plan, [dist.group.WORLD], False)
    same.call()
    if rank == 0:
        time.sleep(3)
    return same.count() or same.call().overlapped


def test_peers_wait_for_a_late_rank_if_a_plan_was_agreed_upon() -> None:
    assert run_ranks(2, _late) == [True, True]


def _disabled(rank: int, world_size: int) -> bool:
    """Rank 0 runs a call with overlap and then disables overlap. Rank 1 compares that call only afterwards."""
    group = dist.group.WORLD
    assert group is not None
    same = agreement.Comparison(_plan("g0: all_reduce float32 [4] in matmul_all_reduce by ring", True), [group], False)
    same.call()
    state = state_of(group)
    page, store = state.page, group_store(group)
    assert page is not None
    if rank == 0:
        found = same.count() or same.call().overlapped
        call_board.part(state, "a later call")
        return found
    blind = [True]

    class Looks:
        """A store whose ``check`` waits until overlap has been disabled."""

        def check(self, keys: list[str]) -> bool:
            store.wait(keys)
            blind[0] = False
            return store.check(keys)

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    all_publish, published = page.all_publish, page.published
    page.all_publish = lambda *args: not blind[0] and all_publish(*args)  # type: ignore[method-assign]
    page.published = lambda *args: None if blind[0] else published(*args)  # type: ignore[method-assign]
    call_board.group_store = lambda group: Looks()  # type: ignore[assignment, return-value]
    return same.count() or same.call().overlapped


def test_a_slow_rank_overlaps_a_call_after_which_another_rank_disabled_overlap() -> None:
    """The slow rank must not run the plain program while the other rank runs the overlapped program."""
    assert run_ranks(2, _disabled) == [True, True]


def _differs_for_long(rank: int, world_size: int) -> list[int]:
    """The plans have two groups. In many calls, rank 1's plan differs. Returns the number of keys in the store after
    every ``KEPT_CALLS`` calls."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    names = (tuple(g.group_name for g in groups),)
    steps = "g0: all_reduce float32 [4] in matmul_all_reduce by ring", "g1: all_reduce float32 kept"
    plans = [ExchangePlan("1", "on", (steps[0] + how, steps[1]), True, groups=names) for how in ("", " otherwise")]
    same, other = (agreement.Comparison(plan, groups, False) for plan in plans)
    assert same.call().overlapped
    keys = []
    for number in range(3 * call_store.KEPT_CALLS):
        assert not (other if rank else same).call().overlapped
        if number % call_store.KEPT_CALLS == call_store.KEPT_CALLS - 1:
            dist.barrier()
            keys.append(group_store(groups[0]).num_keys())
            dist.barrier()
    return keys


def test_reasons_of_old_verdicts_do_not_stay_in_the_store() -> None:
    """A verdict says whether the ranks overlap a call. The reason for a verdict does not fit on the page, so the ranks
    write it to the store. Reasons of old calls must be deleted."""
    for _, first, second in run_ranks(2, _differs_for_long, timeout=120):
        assert second - first < call_store.KEPT_CALLS, (first, second)


def _inside_a_plan_of_two_groups(rank: int, world_size: int, overlaps: bool) -> list[Any]:
    """Both ranks run two graphs. The first graph uses the first group alone. The second graph uses both groups, and
    only the first group has a page. Then rank 0 runs the second graph again, and rank 1 runs a new graph that uses the
    first group alone. (With several machines, a group across machines has no page.)"""
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    names = [g.group_name for g in groups]
    step, kept = "g0: all_reduce float32 [4] in matmul_all_reduce by ring", "g0: all_reduce float32 kept"
    one = agreement.Comparison(_plan(step, True), groups[:1], False)
    both = ExchangePlan("1", "on", (step, "g1: all_reduce float32 kept"), True, groups=(tuple(names),))
    same = agreement.Comparison(both, groups, False)
    lone = agreement.Comparison(_plan(step + " otherwise" if overlaps else kept, overlaps), groups[:1], False)
    state_of(groups[1])._page_tried = True
    found = [one.call().overlapped, same.call().overlapped]
    dist.barrier()
    try:
        found.append(lone.call().overlapped if rank else same.call().overlapped)
    except agreement.AgreementError as error:
        found.append(str(error))
    dist.barrier()
    return found


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_rank_with_which_others_do_not_compare_raises_at_once(overlaps: bool) -> None:
    """One group of rank 0's plan has no page, so the plan is compared at its first run only. In a later run, rank 0
    does not see rank 1's other plan, and overlaps. So rank 1 must raise an error, and must not run its plain
    program."""
    others, alone = run_ranks(2, _inside_a_plan_of_two_groups, overlaps, timeout=60)
    assert others == [True] * 3 and alone[:2] == [True] * 2
    assert "rank 0: " in alone[2] and "compared at its first run only" in alone[2], alone


def _reason_comes_late(rank: int, world_size: int) -> str | None:
    group = dist.group.WORLD
    same = agreement.Comparison(_plan("g0: all_reduce float32 [4] in matmul_all_reduce by ring", True), [group], False)
    same.call()
    state = state_of(group)
    state.calls += 1
    dist.barrier()
    if rank:
        state.page.say(state.calls, 0, "0")
        time.sleep(0.5)
        state.store.say(state.calls, 0, "0they differ")
        dist.barrier()
        return None
    found = call_board.said(state, 1, 0, time.monotonic() + 30)
    dist.barrier()
    return found


def test_a_rank_waits_for_a_reason_that_comes_after_its_verdict() -> None:
    """The store does not acknowledge writes, so a verdict may be on the page before its reason is in the store. The
    rank must wait for the reason, and must not take the writer for dead."""
    assert run_ranks(2, _reason_comes_late) == ["0they differ", None]
