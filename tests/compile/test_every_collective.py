# SPDX-License-Identifier: Apache-2.0
"""Every collective of a program is in a report: as a site, a near miss, or a call that broke the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory  # noqa: F401  (defines operators)
import torch.distributed.tensor  # noqa: F401  (defines operators)
from torch import fx

import overlap_inductor
from overlap_inductor.report import publish as reporting
from overlap_inductor.sites import collectives
from tests.compile.readings import facts
from tests.compile.readings import misses
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.spellings import world


def in_a_list(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return torch.cat(parts) @ w


def asynchronous(y: torch.Tensor) -> torch.Tensor:
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    return y.relu()


def broadcast(y: torch.Tensor) -> torch.Tensor:
    dist.broadcast(y, 0)
    return y.relu()


def scattered_list(y: torch.Tensor) -> torch.Tensor:
    out = torch.empty(2, 8)
    dist.reduce_scatter(out, list(y.chunk(2)))
    return out


def all_to_all_list(y: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty(2, 8) for _ in range(2)]
    dist.all_to_all(parts, list(y.chunk(2)))
    return parts[0]


def sent(y: torch.Tensor) -> torch.Tensor:
    dist.send(y, 1)
    return y.relu()


def barrier(y: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    return y.relu()


BREAKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce(async_op=True)": asynchronous,
    "broadcast": broadcast,
    "reduce_scatter": scattered_list,
    "all_to_all": all_to_all_list,
    "send": sent,
    "barrier": barrier,
}


def notices(reports: list[Any]) -> list[str]:
    return [n for r in reports for n in r.notices]


@pytest.mark.parametrize("call", BREAKS)
@pytest.mark.usefixtures("two")
def test_calls_that_break_the_graph_are_reported(call: str) -> None:
    """No graph holds such a call, so a notice must name the call and its line."""
    function = BREAKS[call]
    found = notices(reports_of(lambda x, w: function(x @ w), torch.randn(4, 16), torch.randn(16, 8)))
    assert len(found) == 1 and found[0].startswith(f"torch.distributed.{call} breaks the graph")
    code = function.__code__
    assert any(
        f"{Path(__file__).name}:{line} in {function.__name__}" in found[0]
        for line in range(code.co_firstlineno, code.co_firstlineno + 6)
    )


@pytest.mark.usefixtures("two")
def test_other_breaks_are_not_reported() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        torch._dynamo.graph_break()
        return y.relu()

    found = reports_of(fn, torch.randn(4, 16), torch.randn(16, 8))
    assert len(found) == 2 and notices(found) == []


def test_a_compiled_program_reports_each_break_once() -> None:
    """A program loaded from a cache also reports the break. The report of the next graph does not repeat it."""
    with fake_group(2), torch.no_grad(), overlap_inductor.overlap():
        for _ in range(2):
            torch.compiler.reset()
            reporting.forget_reports()
            torch.compile(lambda x, w: asynchronous(x @ w))(torch.randn(4, 16), torch.randn(16, 8))
            found = reporting.all_reports()
            assert len(found) == 2 and len(notices(found)) == 1 and found[0].notices


@pytest.mark.usefixtures("two")
def test_broadcast_is_listed() -> None:
    """No pattern has a broadcast, so the broadcast is a near miss."""
    (report,) = reports_of(lambda x, w: funcol.broadcast(x @ w, 0, world()), torch.randn(4, 16), torch.randn(16, 8))
    assert misses(report) == [("broadcast", "pattern_not_available")] and report.before == report.after != ""


@pytest.mark.usefixtures("two")
def test_list_of_shards_is_a_gather() -> None:
    (report,) = reports_of(in_a_list, torch.randn(4, 16), torch.randn(16, 8))
    assert facts(report) == [("all_gather_matmul", ["mm M"], "overlapped")]


NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "_dtensor", "symm_mem")


def test_every_operator_that_moves_data_is_a_collective() -> None:
    """An operator with a group counts as a collective, unless ``_NOT_MOVING`` lists it. This also holds for operators
    that a later torch adds to these namespaces."""
    graph, names = fx.Graph(), set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        operator = rest.partition(".")[0]
        if namespace not in NAMESPACES or "wait" in operator:
            continue
        for overload in getattr(getattr(torch.ops, namespace), operator)._schemas:
            packet = getattr(getattr(torch.ops, namespace), operator)
            target = getattr(packet, overload or "default")
            if any(a.name in ("group_name", "process_group") for a in target._schema.arguments):
                names.add(name)
                assert (
                    collectives._kind(graph.call_function(target)) is not None or operator in collectives._NOT_MOVING
                ), name
    assert {"_c10d_functional::broadcast", "c10d::allreduce_", "symm_mem::one_shot_all_reduce"} <= names


@pytest.mark.skipif(not hasattr(torch.ops._c10d_functional, "isend"), reason="torch 2.11 has no functional send")
@pytest.mark.usefixtures("two")
def test_plans_do_not_name_a_functional_send_or_receive() -> None:
    """One rank's graph sends, another's receives. If plans named these calls, the ranks would seem to differ."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    calls = {
        name: graph.call_function(getattr(torch.ops._c10d_functional, name).default, (x, 0, 0, world().group_name))
        for name in ("isend", "irecv", "broadcast")
    }
    assert {name: collectives.kept_kind(node) for name, node in calls.items()} == {
        "isend": None,
        "irecv": None,
        "broadcast": "broadcast float32",
    }
