# SPDX-License-Identifier: Apache-2.0
"""Inductor's partitions for CUDA graphs. Partitions must take tensors and numbers only, and no CUDA graph may capture
only a part of a transfer. CPU kernels take the place of GPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor import ir
from torch._inductor import utils
from torch._inductor.scheduler import BaseSchedulerNode

import overlap_inductor
from overlap_inductor.inductor import partitions
from overlap_inductor.inductor import rank_symbol
from overlap_inductor.inductor.rank_symbol import GroupRank
from overlap_inductor.runtime import agreement
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_to_all
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from overlap_inductor.torch_compat.ordering import MEMBERS
from overlap_inductor.torch_compat.ordering import STARTS
from tests.support.fake_group import fake_group
from tests.support.generated_code import without_kernels


@torch.library.custom_op("overlap_test::beside_graphs", mutates_args=())
def beside_graphs(x: torch.Tensor) -> torch.Tensor:
    """An op that no CUDA graph can hold."""
    return x + 1


@beside_graphs.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[type]]]:
    """The types of the arguments of each partition, one list for each call."""
    seen: list[list[type]] = []

    def recorded(function: Callable[..., Any], _: Any) -> Callable[..., Any]:
        def call(arguments: list[Any]) -> Any:
            seen.append([type(a) for a in arguments])
            return function(arguments)

        return call

    # No other rank publishes a plan to compare.
    monkeypatch.setattr(agreement, "require", lambda group, plan: None)
    monkeypatch.setattr(
        BaseSchedulerNode, "is_gpu", lambda node: not isinstance(node.node, GroupRank | ir.AssertScalar)
    )
    utils.set_customized_partition_wrappers(recorded)
    yield seen
    utils.set_customized_partition_wrappers(None)  # type: ignore[arg-type]


def compiled(function: Callable[..., Any], *shapes: tuple[int, ...], reorders: bool = True, **fields: Any) -> Any:
    """Compile and run ``function``, and return the report. ``reorders``: turn on ``triton.cudagraphs``. Inductor then
    may move ops that no CUDA graph can hold."""
    settings = {
        "custom_should_partition_ops": ["overlap_test::beside_graphs"],
        "triton.cudagraphs": reorders,
    }
    with (
        fake_group(4, 1),
        torch.no_grad(),
        without_kernels(),
        torch._inductor.config.patch(settings),
        overlap_inductor.overlap(schedule="ring", mode="strict", **fields),
    ):
        torch.compile(function)(*[torch.randn(s) for s in shapes])
    return overlap_inductor.last_report()


def gathered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return all_gather(x, 0, dist.group.WORLD) @ w


def scattered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return reduce_scatter(x @ w, "sum", 0, dist.group.WORLD)


def gathered_for_a_late_weight(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The second weight waits for an op that no CUDA graph can hold. Meanwhile Inductor schedules ready ops, for
    example the start of the transfer."""
    whole = all_gather(x, 0, dist.group.WORLD)
    return whole @ w, whole @ beside_graphs(w.cos())


def scattered_behind(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = reduce_scatter(x @ w, "sum", 0, dist.group.WORLD)
    return y, beside_graphs(y * 2).cos()


@pytest.mark.parametrize("reorders", [True, False])
@pytest.mark.parametrize("function", [gathered, scattered])
def test_a_partition_is_given_tensors_and_numbers(
    given: list[list[type]], function: Callable[..., Any], reorders: bool
) -> None:
    """The rank's symbol, a symbolic integer for the rank, comes from a kernel without a result. But Inductor lists the
    kernel's name among a partition's inputs. CUDA graph trees fail on inputs that are neither tensors nor numbers."""
    report = compiled(function, (64, 32), (32, 24), reorders=reorders)
    assert given and all(issubclass(kind, torch.Tensor | int) for kinds in given for kind in kinds), given
    assert int in {kind for kinds in given for kind in kinds}
    assert report.notices == []


@pytest.mark.parametrize("function", [gathered, scattered])
def test_the_rank_is_passed_to_kernels_that_do_not_report_their_symbols(
    given: list[list[type]], function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's templates do not report the symbols of their views. Their partition must still get the rank."""
    monkeypatch.setattr(ir.ExternKernelOut, "get_free_symbol_uses", lambda *_, **__: ir.OrderedSet())
    compiled(function, (64, 32), (32, 24))
    assert int in {kind for kinds in given for kind in kinds}


@pytest.mark.parametrize("function", [gathered, scattered])
def test_the_rank_comes_before_kernels_that_do_not_report_their_symbols(
    given: list[list[type]], function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank must be computed before its readers, in every order that the dependencies allow. Here the scheduler
    computes it as late as possible."""
    monkeypatch.setattr(ir.ExternKernelOut, "get_free_symbol_uses", lambda *_, **__: ir.OrderedSet())
    moved = []

    def rank_late(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        (rank,) = (n for n in nodes if isinstance(n.node, GroupRank))
        checks = [n for n in nodes if isinstance(n.node, ir.AssertScalar)]
        others = [n for n in nodes if n is not rank and n not in checks]
        first = next((i for i, n in enumerate(others) if rank.get_name() in n.ancestors), len(others))
        moved.append(first)
        return [*others[:first], rank, *others[first:], *checks]

    with torch._inductor.config.patch(_post_fusion_custom_pass=rank_late):
        compiled(function, (64, 32), (32, 24), reorders=False)
    assert moved and moved[0] > 0


@pytest.mark.parametrize("sub_chunks", [1, 2])
def test_a_transfer_that_would_be_cut_is_not_captured(given: list[list[type]], sub_chunks: int) -> None:
    report = compiled(gathered_for_a_late_weight, (64, 32), (32, 24), sub_chunks=sub_chunks)
    crossing = [s for s in report.sites if s.decision.status == "overlapped"]
    assert crossing and given == [] and report.notices == [partitions.NOTICE]


@pytest.mark.parametrize("budget", [4000, 30], ids=["both unrolled", "a looping op, then an unrolled one"])
def test_the_rank_is_made_before_all_transfers_of_its_group(given: list[list[type]], budget: int) -> None:
    """The kernel that computes the rank comes before the transfers, even if another op of the chain stands before a
    transfer. If this kernel stood inside a transfer, it would cut the transfer into two partitions."""

    def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return gathered(torch.relu(scattered(x, w)), v)

    report = compiled(block, (64, 32), (32, 24), (24, 8), reorders=False, step_node_budget=budget, sub_chunks=1)
    unrolled = [s.decision.moving.parameters["unrolled"] for s in report.sites]
    assert unrolled == [budget > 30, True] and given and report.notices == []


@pytest.mark.parametrize(
    ("places", "uncaptured", "expected"),
    [
        ([["a"], ["a"]], [False, False], True),
        ([["a"], ["a"]], [False, True], True),
        ([["a"], ["a"]], [True, True], False),
        ([["a", "a"], ["b"]], [False, False], False),
        ([["a"], ["b"], ["b"]], [False, True, True], False),
    ],
)
def test_a_transfer_is_cut_unless_one_partition_or_the_host_runs_it(
    places: list[list[str]], uncaptured: list[bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer is cut if its ops lie in several partitions and a CUDA graph captures at least one of them."""

    class Scheduled:
        def __init__(self, name: str) -> None:
            self.node = name

        def get_nodes(self) -> list[Scheduled]:
            return [self]

    monkeypatch.setattr(partitions, "_transfer", lambda kernel: kernel)
    assert partitions.cut([[Scheduled(name) for name in names] for names in places], uncaptured) is expected


def sent_and_received(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return all_to_all(all_to_all(x @ w, dist.group.WORLD).relu(), dist.group.WORLD) @ v


@pytest.mark.parametrize(
    ("function", "shapes", "writes"),
    [
        (gathered, ((64, 32), (32, 24)), {"gather_step"}),
        (scattered, ((64, 32), (32, 24)), {"exchange_send", "exchange_wait"}),
        (sent_and_received, ((64, 32), (32, 24), (24, 8)), {"exchange_send", "exchange_keep", "exchange_wait"}),
    ],
)
def test_every_write_belongs_to_the_transfer_of_its_buffer(
    given: list[list[type]],
    function: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    writes: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``exchange_keep`` takes the buffer as its first argument, the other ops as their second. An op that counts as
    part of another transfer would make that transfer seem cut."""
    transfers: dict[str, set[str]] = {}
    cut = partitions.cut

    def noted(parts: Any, uncaptured: Any) -> bool:
        for kernel in (node.node for part in parts for scheduled in part for node in scheduled.get_nodes()):
            name = str(getattr(kernel, "op_overload", "")).split(".")[1:2]
            if name and name[0] in (*STARTS, *MEMBERS):
                transfers.setdefault(name[0], set()).add(partitions._transfer(kernel))
        return cut(parts, uncaptured)

    monkeypatch.setattr(partitions, "cut", noted)
    compiled(function, *shapes, reorders=False, sub_chunks=1)
    started = set.union(*(transfers.pop(name, set()) for name in STARTS))
    assert transfers.keys() == writes and all(found == started for found in transfers.values()), (started, transfers)


def test_a_kernel_that_writes_to_a_rotated_place_needs_the_rank(
    given: list[list[type]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotated place is a slice whose offset depends on the rank's symbol. If a kernel writes to such a place,
    Inductor does not find the symbol. So ``rank_symbol`` looks at inputs and results with such an offset."""
    found: dict[str, set[str]] = {"inputs": set(), "results": set()}
    views = rank_symbol._views

    def noted(kernel: Any) -> Iterator[Any]:
        read = {id(i) for i in getattr(kernel, "inputs", ()) if isinstance(i, ir.ReinterpretView)}
        for view in views(kernel):
            found["inputs" if id(view) in read else "results"].add(kernel.get_operation_name())
            yield view

    monkeypatch.setattr(rank_symbol, "_views", noted)
    compiled(gathered, (64, 32), (32, 24))
    assert found["inputs"] and found["results"], found


def test_a_graph_that_is_cut_outside_its_transfers_is_captured(given: list[list[type]]) -> None:
    report = compiled(scattered_behind, (64, 32), (32, 24))
    assert len(given) > 1 and report.notices == []
