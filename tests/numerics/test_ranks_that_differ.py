# SPDX-License-Identifier: Apache-2.0
"""If the ranks would exchange different data, all ranks run the plain program, and a warning says why. In mode
``strict``, and between different versions of the package, ranks raise an error instead."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap_inductor
from overlap_inductor.report.publish import all_reports
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.differing_ranks import UNROLLED
from tests.support.differing_ranks import block
from tests.support.differing_ranks import block_on_a_mesh
from tests.support.differing_ranks import compare_as_on_gpus
from tests.support.differing_ranks import counts
from tests.support.differing_ranks import inputs_of
from tests.support.differing_ranks import ring
from tests.support.differing_ranks import wrong
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.heard import Heard

TIMEOUT = 60


def _at_first_runs(rank: int, world_size: int, fields: list[dict[str, Any]]) -> dict[str, Any]:
    """Run ``_once``. The ranks compare plans only at a graph's first call, as ranks with GPUs do that share no
    ``/dev/shm``."""
    compare_as_on_gpus()
    return _once(rank, world_size, fields)


@pytest.mark.parametrize(
    "fields",
    [
        [{}, {}, {"sub_chunks": 2}],
        # Thorough only: ``test_lone_recompiles`` has such cases, too.
        pytest.param([{}, {"patterns": ("all_gather_matmul",)}], marks=pytest.mark.thorough),
        pytest.param([{}, {}], marks=pytest.mark.thorough),
    ],
    ids=["differ", "no site there", "alike"],
)
def test_plans_that_are_compared_as_on_gpus(fields: list[dict[str, Any]]) -> None:
    results = run_ranks(len(fields), _at_first_runs, fields)
    differ = any(fields)
    assert all(
        r.get("problems") == [] and bool(r["notices"]) is (differ and bool(r["counts"].get("sites_overlapped")))
        for r in results
    ), results
    assert sum(len(r["warnings"]) for r in results) == int(differ)


def _once(rank: int, world_size: int, fields: list[dict[str, Any]], caches: str | None = None) -> dict[str, Any]:
    """Compile one graph with this rank's own switches and call it twice. Returns the error, or problems, warnings,
    counters, cache hits and notices."""
    if caches is None:
        compile_anew(kernels=False)
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/{rank}"
        torch._inductor.config.fallback_by_default = True
    heard, inputs, begun = Heard(), inputs_of(rank), time.monotonic()
    try:
        with ring(agreement_timeout=TIMEOUT, **fields[rank]):
            compiled = torch.compile(block, dynamic=False)
            problems = wrong(compiled(*inputs), block, inputs)
            problems += wrong(compiled(*inputs), block, inputs)
    except Exception as error:  # noqa: BLE001  (the outcome is what is tested)
        seconds = time.monotonic() - begun
        # Rank 0's process holds the store, which the other ranks still read.
        time.sleep(5 if rank == 0 else 0)
        return {"error": type(error).__name__, "text": str(error), "seconds": seconds}
    counters = torch._dynamo.utils.counters
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    report = overlap_inductor.last_report()
    return {
        "problems": problems,
        "warnings": heard.texts,
        "counts": counts(),
        "hits": hits,
        "notices": report.notices if report else [],
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([{}, {"sub_chunks": 2}], "sub_chunks is 4 here and 2 there"),
        pytest.param(
            [{}, {"ring_direction": "bidirectional"}, {}],
            "ring_direction is 'unidirectional' here and 'bidirectional' there",
            marks=pytest.mark.thorough,
        ),
        ([{}, {"patterns": ("all_gather_matmul",)}], "all_reduce float32 kept there"),
        pytest.param([{}, {"mode": "report"}], "kept there", marks=pytest.mark.thorough),
    ],
    ids=["sub-chunks", "direction", "no site there", "report mode there"],
)
def test_all_ranks_run_the_plain_program(fields: list[dict[str, Any]], words: str) -> None:
    """If ranks with different plans overlapped, they would send each other pieces of different sizes, and hang or get
    wrong numbers."""
    results = run_ranks(len(fields), _once, fields)
    warnings = [w for r in results for w in r.get("warnings", [str(r)])]
    assert all(r.get("problems") == [] for r in results), results
    assert (
        len(warnings) == 1
        and words in warnings[0]
        and "rank 0 and other ranks do not make the same transfers" in warnings[0]
    ), warnings
    odd = next(i for i, f in enumerate(fields) if f)
    assert f"rank {odd}: " in warnings[0]
    for rank, result in enumerate(results):
        overlapping = result["counts"].get("sites_overlapped", 0) > 0
        assert bool(result["counts"].get("reason.ranks_differ")) is overlapping, f"rank {rank}: {result}"
        assert any("without overlap" in n for n in result["notices"]) is overlapping


def test_strict_raises_on_every_rank_that_overlaps() -> None:
    results = run_ranks(2, _once, [{"mode": "strict"}, {"mode": "strict", "sub_chunks": 2}], expect_failure=True)
    assert [r["error"] for r in results] == ["StrictError"] * 2 and all(
        "do not make the same transfers" in r["text"] for r in results
    ), results


def test_different_node_budgets_exchange_the_same() -> None:
    """One rank may run unrolled steps while another runs looping ops. For this block, both move the same pieces. Plans
    name only the pieces, so the plans are equal."""
    for result in run_ranks(2, _once, [UNROLLED, {}]):
        assert result["problems"] == [] and result["warnings"] == [] and result["counts"]["sites_overlapped"] == 2, (
            result
        )


def _cut_otherwise(rank: int, world_size: int) -> list[str]:
    """Run sites that the two ranks divide into different pieces. In the first three functions, only rank 1 runs looping
    ops, which divide these sites in another way than unrolled steps do. In the last one,
    only rank 1 views the gathered tensor in another shape."""
    compile_anew(kernels=False)
    group, problems = dist.group.WORLD, []
    functions: list[tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = [
        (lambda x, w: reduce_scatter(x @ w, "sum", 1, group), [(2, 8, 8), (8, 6)]),
        (lambda x, w: reduce_scatter(x @ w, "sum", 1, group), [(6, 8), (8, 16)]),
        (lambda x, w: all_gather(x, 0, group) @ w, [(5, 3, 8), (8, 6)]),
        (
            lambda x, w: (
                all_gather(x, 0, group).view(world_size * 5, 3, 8) @ w if rank else all_gather(x, 0, group) @ w
            ),
            [(15, 8), (8, 6)],
        ),
    ]
    for number, (function, shapes) in enumerate(functions):
        generator = torch.Generator().manual_seed(rank)
        inputs = [torch.randn(s, generator=generator) for s in shapes]
        torch._dynamo.reset()
        with ring(agreement_timeout=TIMEOUT, step_node_budget=1 if rank and number < 3 else 4000):
            problems += [
                f"{number}: {p}" for p in wrong(torch.compile(function, dynamic=False)(*inputs), function, inputs)
            ]
    return problems


def test_pieces_that_ranks_cut_differently_are_not_exchanged() -> None:
    """Plans with different pieces must not count as equal. Otherwise results would be wrong, or gloo would abort."""
    assert run_ranks(2, _cut_otherwise) == [[], []]


def test_warm_cache_on_one_rank(tmp_path: Path) -> None:
    """A graph from a cache must still have its plan and its plain program."""
    for result in run_ranks(2, _once, [{}, {}], str(tmp_path)):
        assert result["problems"] == [] and result["warnings"] == [] and result["hits"] == 0, result
    warm, cold = run_ranks(2, _once, [{}, {"sub_chunks": 2}], str(tmp_path))
    assert warm["hits"] > 0 and cold["hits"] == 0
    for result in (warm, cold):
        assert result["problems"] == [] and result["counts"]["reason.ranks_differ"] == 2, result
    assert len(warm["warnings"] + cold["warnings"]) == 1


def _one_is_off(rank: int, world_size: int, how: str) -> dict[str, Any]:
    """Overlap is off on rank 1: with ``told``, its mode is ``off``; with ``silent``, it compiles with plain
    Inductor."""
    from overlap_inductor.runtime import call_board

    call_board.ABSENT = 3.0
    fields = {"schedule": "ring", "agreement_timeout": TIMEOUT}
    compile_anew(kernels=False)
    heard, inputs, begun = Heard(), inputs_of(rank), time.monotonic()
    backend = "inductor" if rank and how == "silent" else "overlap_inductor"
    options = {} if backend == "inductor" else {**fields, "mode": "off" if rank else "on"}
    compiled = torch.compile(block, dynamic=False, backend=backend, options=options)
    problems = [p for _ in range(2) for p in wrong(compiled(*inputs), block, inputs)]
    return {"problems": problems, "warnings": heard.texts, "seconds": time.monotonic() - begun}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("told", "OVERLAP_INDUCTOR is on here and off there"),
        pytest.param("silent", "rank 1 published no plan", marks=pytest.mark.thorough),
    ],
)
def test_switched_off_on_one_rank(how: str, words: str) -> None:
    """Rank 1 runs the plain program, so rank 0 must run it, too. If rank 1 publishes its mode, rank 0 reads it at once.
    Otherwise rank 0 waits for ``ABSENT`` seconds."""
    on, off = run_ranks(2, _one_is_off, how, warm=how != "silent")
    assert on["problems"] == off["problems"] == [] and on["seconds"] < TIMEOUT, (on, off)
    assert off["warnings"] == [] and len(on["warnings"]) == 1 and words in on["warnings"][0], on


def _other_version(rank: int, world_size: int) -> dict[str, Any]:
    from overlap_inductor.passes import agreed_plan as exchange_steps

    if rank:
        exchange_steps.__version__ = "9.9"
    return _once(rank, world_size, [{}, {}])


def test_another_version_is_an_error_at_once() -> None:
    """Two versions may divide a site into different pieces. So ranks with different versions must not overlap, even if
    the plans look equal."""
    for result in run_ranks(2, _other_version, expect_failure=True):
        assert (
            result["error"] == "AgreementError"
            and "overlap_inductor is '" in result["text"]
            and "9.9" in result["text"]
        ), result
        assert result["seconds"] < TIMEOUT


def _again(rank: int, world_size: int, changes: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks call the compiled block. Then the ranks with ``changes`` compile the block again with these switches,
    call the result twice, and call the first compiled block. Meanwhile, the other ranks call the first compiled
    block."""
    compile_anew(kernels=False)
    heard, inputs, problems = Heard(), inputs_of(rank), []
    first = torch.compile(block, dynamic=False)
    with ring(agreement_timeout=TIMEOUT):
        problems += wrong(first(*inputs), block, inputs)
    with ring(agreement_timeout=TIMEOUT, **changes[rank]):
        second = torch.compile(lambda *args: block(*args), dynamic=False) if changes[rank] else first
        problems += wrong(second(*inputs), block, inputs)
        problems += wrong(second(*inputs), block, inputs)
        compiles = len(all_reports())
        problems += wrong(first(*inputs), block, inputs)
    if len(all_reports()) > compiles:
        problems.append("the first block was compiled again, not called")
    return {"problems": problems, "warnings": heard.texts, "counts": counts()}


def test_a_rank_that_recompiles_alone_to_another_exchange() -> None:
    """The ranks compare plans at every call. So both ranks run the plain program while rank 1's plan differs."""
    results = run_ranks(2, _again, [{}, {"sub_chunks": 2}])
    assert all(r["problems"] == [] for r in results), results
    assert (
        len(results[0]["warnings"]) == 1 and "sub_chunks" in results[0]["warnings"][0] and results[1]["warnings"] == []
    )


@pytest.mark.thorough
def test_a_rank_that_recompiles_alone_to_the_same_exchange() -> None:
    results = run_ranks(2, _again, [{}, UNROLLED])
    assert all(r["problems"] == [] and r["warnings"] == [] for r in results), results


def _trained(rank: int, world_size: int, fields: list[dict[str, Any]]) -> dict[str, Any]:
    compile_anew(kernels=False)
    heard, problems = Heard(), []
    inputs = inputs_of(rank, grad=True)
    exact = [i.detach().double().requires_grad_() for i in inputs]
    with ring(agreement_timeout=TIMEOUT, **fields[rank]):
        compiled = torch.compile(block, dynamic=False)
        for _ in range(2):
            for tensor in (*inputs, *exact):
                tensor.grad = None
            compiled(*inputs).square().sum().backward()
            block(*exact).square().sum().backward()
            for number, (i, e) in enumerate(zip(inputs, exact, strict=True)):
                error = (i.grad.double() - e.grad).abs().max() / e.grad.abs().max()
                if not error < 1e-5:
                    problems.append(f"gradient {number} off by {error:.3g}")
    return {"problems": problems, "warnings": heard.texts, "counts": counts()}


def test_training_where_ranks_differ() -> None:
    """A forward without overlap must save for backward what the overlapped forward would have saved."""
    for result in run_ranks(2, _trained, [{}, {"sub_chunks": 2}]):
        assert result["problems"] == [] and result["counts"]["reason.ranks_differ"] >= 3, result


def _late(rank: int, world_size: int) -> dict[str, Any]:
    """On a mesh, rank 3 uses a new plan one call too early."""
    compile_anew(kernels=False)
    function = block_on_a_mesh()
    heard, inputs, problems = Heard(), inputs_of(rank), []
    compiled = {}
    for parts in (4, 2):
        with ring(agreement_timeout=20, sub_chunks=parts):
            torch._dynamo.reset()
            compiled[parts] = torch.compile(lambda *args, parts=parts: function(*args), dynamic=False)
            if parts == 4:
                problems += wrong(compiled[4](*inputs), function, inputs)
            for turn in range(3 if parts == 2 else 0):
                problems += wrong(compiled[2 if turn or rank == 3 else 4](*inputs), function, inputs)
    return {"problems": problems, "warnings": heard.texts}


def test_a_plan_that_one_rank_of_a_mesh_uses_too_early() -> None:
    """Some ranks compare the early plan and refuse it. The other ranks have not compared this plan, and must not wait
    for the ranks that refused it."""
    results = run_ranks(4, _late)
    assert all(r["problems"] == [] for r in results), results


def _split(rank: int, world_size: int, patterns: tuple[str, ...]) -> dict[str, Any]:
    """Only rank 1's graph is broken between its two collectives."""
    compile_anew(kernels=False)
    heard, inputs = Heard(), inputs_of(rank)

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = torch.relu(all_gather(x, 0, dist.group.WORLD) @ a)
        if rank:
            torch._dynamo.graph_break()
        return all_reduce(y @ b, "sum", dist.group.WORLD)

    begun = time.monotonic()
    with ring(agreement_timeout=TIMEOUT, patterns=patterns):
        compiled = torch.compile(function, dynamic=False)
        problems = [p for _ in range(3) for p in wrong(compiled(*inputs), block, inputs)]
    return {"problems": problems, "warnings": heard.texts, "seconds": time.monotonic() - begun}


@pytest.mark.parametrize(
    "patterns",
    [("all_gather_matmul", "matmul_all_reduce"), pytest.param(("matmul_all_reduce",), marks=pytest.mark.thorough)],
    ids=["both halves", "the second half"],
)
def test_a_graph_that_breaks_on_one_rank_only(patterns: tuple[str, ...]) -> None:
    """The ranks' calls no longer correspond. The group must go on without overlap, and no rank may wait for a plan that
    never comes."""
    results = run_ranks(2, _split, patterns)
    assert all(r["problems"] == [] and r["seconds"] < TIMEOUT for r in results), results
    assert sum(len(r["warnings"]) for r in results) == 1 and "transfers here" in results[0]["warnings"][0], results


def _kept_graphs_are_broken(rank: int, world_size: int, as_on_gpus: bool) -> dict[str, Any]:
    """A graph without overlap is broken between its two collectives on rank 0 only. No rank compares this graph."""
    compile_anew(kernels=False)
    if as_on_gpus:
        compare_as_on_gpus()
    heard, inputs = Heard(), inputs_of(rank)[1:]

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return all_reduce(b @ a, "sum", dist.group.WORLD)

    def kept(x: torch.Tensor) -> torch.Tensor:
        y = all_reduce(x, "sum", dist.group.WORLD)
        if rank == 0:
            torch._dynamo.graph_break()
        return all_reduce(torch.relu(y), "sum", dist.group.WORLD)

    with ring(agreement_timeout=TIMEOUT):
        compiled = torch.compile(function, dynamic=False)
        problems = [p for _ in range(2) for p in wrong(compiled(*inputs), function, inputs)]
        problems += wrong(torch.compile(kept, dynamic=False)(inputs[0]), kept, inputs[:1])
        problems += [p for _ in range(3) for p in wrong(compiled(*inputs), function, inputs)]
    return {"problems": problems, "warnings": heard.texts, "counts": counts()}


@pytest.mark.parametrize("as_on_gpus", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_kept_graphs_that_break_on_one_rank_only(as_on_gpus: bool) -> None:
    """Rank 0 counts one call more than rank 1. Rank 0 must not wait for a call that rank 1 never makes. No graph with
    overlap differs, so overlap must go on."""
    results = run_ranks(2, _kept_graphs_are_broken, as_on_gpus, timeout=120)
    assert all(r["problems"] == [] and r["warnings"] == [] for r in results), results
    assert all("reason.ranks_differ" not in r["counts"] and r["counts"]["sites_overlapped"] == 1 for r in results)


def _graphs_hold_parts_of_others(rank: int, world_size: int) -> dict[str, Any]:
    """Both ranks compare plans of one function: a kept collective, then two overlapped ones. Its graph is broken behind
    the first collective on rank 0, and behind the second on rank 1. No data moves."""
    from overlap_inductor.facts.exchange import ExchangePlan
    from overlap_inductor.runtime import agreement

    kept, site = "g0: all_reduce float32 kept", "g0: all_reduce float32 [4] in matmul_all_reduce by ring"
    steps, groups = (kept, site, site), ((dist.group.WORLD.group_name,),)  # type: ignore[union-attr]
    first = ExchangePlan("1", "on", steps[: 1 + rank], False, groups=groups)
    second = ExchangePlan("1", "on", steps[1 + rank :], True, groups=groups)
    found = [
        agreement.Comparison(plan, [dist.group.WORLD], every_call=True).call()  # type: ignore[list-item]
        for plan in (first, second)
    ]
    dist.barrier()
    return {"overlapped": [f.overlapped for f in found], "why": found[-1].difference}


def test_a_graph_that_holds_a_part_of_another() -> None:
    for result in run_ranks(2, _graphs_hold_parts_of_others):
        assert result["overlapped"] == [False, False], result
        assert "graphs are broken at different places" in result["why"], result


def _alone_in_a_group(rank: int, world_size: int) -> dict[str, Any]:
    """The function has an all-reduce over all ranks, then one in a smaller group: rank 0 alone, or the two other
    ranks."""
    compile_anew(kernels=False)
    first, others = dist.new_group([0]), dist.new_group([1, 2])
    own, inputs, heard = others if rank else first, inputs_of(rank)[1:], Heard()

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return all_reduce(torch.relu(all_reduce(b @ a, "sum", dist.group.WORLD)), "sum", own)

    with ring(agreement_timeout=10):
        compiled = torch.compile(function, dynamic=False)
        problems = [p for _ in range(3) for p in wrong(compiled(*inputs), function, inputs)]
    return {"problems": problems, "warnings": heard.texts}


def test_a_group_of_one_rank_where_others_have_more() -> None:
    """Ranks agree in rounds. In each round, a rank publishes a verdict and reads the verdicts of other ranks. The
    number of rounds depends on the groups in the plan. The group of ranks 1 and 2 is in their plans. Rank 0's own
    group has one rank, so it is in no plan. No rank may wait for a round in which others take no part."""
    results = run_ranks(3, _alone_in_a_group, timeout=120)
    assert all(r["problems"] == [] for r in results) and sum(len(r["warnings"]) for r in results) == 1, results


def _dry(rank: int, world_size: int) -> tuple[tuple[int, ...], int]:
    """The shape of the block's result and the number of overlapped sites."""
    from tests.support.fake_group import fake_group

    compile_anew(kernels=False)
    inputs = inputs_of(0)
    with fake_group(8), ring():
        shape = torch.compile(block, dynamic=False)(*inputs).shape
        report = overlap_inductor.last_report()
        return tuple(shape), report.counters()["sites_overlapped"] if report else 0


def test_a_dry_run_on_the_fake_backend_runs() -> None:
    """Some frameworks plan with a dry run: one process acts as a rank of a group that does not exist."""
    assert run_ranks(1, _dry, grouped=False) == [((8 * 8, 16), 2)]
