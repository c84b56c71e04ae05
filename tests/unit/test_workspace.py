# SPDX-License-Identifier: Apache-2.0
"""The workspace of a group on a rank: slots for the plans that fit, none for others, and an end to every call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from overlap_inductor.errors import OverlapError
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.fused import ops as fused_ops  # noqa: F401  (defines the ops)
from overlap_inductor.lowerings.fused import parameters as fused_plan
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.one_op import ops as site_ops
from overlap_inductor.lowerings.small_message import ops as small_ops
from overlap_inductor.runtime import group_state
from overlap_inductor.runtime import workspace
from overlap_inductor.torch_compat import symmetric
from tests.support.fake_group import fake_group

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plain:
    local: torch.Tensor

    @property
    def pointers(self) -> torch.Tensor:
        return torch.tensor([self.local.data_ptr()])


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(
        symmetric, "allocate", lambda n, dtype, device, group, together: Plain(torch.zeros(n, dtype=dtype))
    )
    with fake_group(2) as made:
        yield made


def requests(**sizes: int) -> str:
    return json.dumps([[site, nbytes, 1] for site, nbytes in sizes.items()])


def test_a_plan_that_failed_in_a_capture_is_prepared_when_it_runs_outside(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the error's advice, to run once before capturing, would not help."""
    monkeypatch.setattr(symmetric, "capturing", lambda: True)
    with pytest.raises(OverlapError, match="Run the compiled function once before capturing it"):
        workspace.prepare(group, CPU, requests(a=100), 2**20)
    monkeypatch.setattr(symmetric, "capturing", lambda: False)
    workspace.prepare(group, CPU, requests(a=100), 2**20)
    assert workspace.workspace_of(group, CPU).launch("a", 100, 1) is not None


def test_a_plan_without_room_runs_as_it_stood_and_takes_nothing_from_others(
    group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    workspace.prepare(group, CPU, requests(a=1000), 2**20)
    workspace.prepare(group, CPU, requests(a=2**21, b=10), 2**20)
    place = workspace.workspace_of(group, CPU)
    assert "2 sites of group '0' run without overlap" in caplog.text and "is 1 MiB" in caplog.text
    assert place.launch("a", 1000, 1) is not None, "the graph before has its slot"
    assert place.launch("a", 2**21, 1) is None and place.launch("b", 10, 1) is None
    workspace.prepare(group, CPU, requests(a=2**21), 2**23)
    assert place.launch("a", 2**21, 1) is not None, "a plan with a higher limit"


def test_what_a_call_needs_is_found_once_and_again_behind_a_plan(group: Any) -> None:
    """A new plan may give the site another slot, or room that it did not have."""
    place, asked = workspace.workspace_of(group, CPU), []

    def make() -> Any:
        asked.append(place.launch("a", 100, 1))
        return asked[-1]

    workspace.prepare(group, CPU, requests(a=2**21), 2**20)
    assert [place.known("call", make) for _ in range(2)] == [None, None] and len(asked) == 1
    workspace.prepare(group, CPU, requests(a=100), 2**20)
    found = place.known("call", make)
    assert found is not None and place.known("call", make) is found and len(asked) == 2
    for number in range(workspace.MOST_KNOWN - 1):
        place.known(number, lambda: None)
    assert place.known("call", make) is found and len(asked) == 2, "as many as a large model has"
    place.known("one more", lambda: None)
    assert place.known("call", make) is found and len(asked) == 3, "not kept for ever"


def test_schedules_of_one_site_have_their_own_parameters(group: Any) -> None:
    """The same model compiled again by another schedule, with equal settings."""
    workspace.prepare(group, CPU, requests(a=2**17), 2**21)
    a, b = torch.zeros(256, 64, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)

    def ready(plan: Any, pattern: str = "all_gather_matmul", settings: str = "{}", rows: int = 256) -> Any:
        return site_ops.ready(plan, pattern, rows, a, b, a.dtype, group, "a", settings)

    assert [type(ready(plan)[1]) for plan in (fused_plan, chunked_plan, fused_plan)] == [
        FusedParameters,
        ChunkedParameters,
        FusedParameters,
    ]
    # Any other change of the plan or the call has its own answer, too.
    assert [ready(fused_plan, settings=s)[1].warps for s in ("{}", '{"warps": 4}', "{}")] == [
        FusedParameters(1).warps,
        4,
        FusedParameters(1).warps,
    ]
    assert (
        ready(fused_plan, settings='{"min_rows": 513}') is None
        and ready(fused_plan, settings='{"min_rows": 513}', rows=257) is not None
    )
    assert ready(fused_plan, "matmul_all_reduce") is None, "its two legs take twice as much as the site has"


def test_a_site_that_was_not_prepared_for_is_an_error(group: Any) -> None:
    with pytest.raises(OverlapError, match="site x has no workspace"):
        workspace.workspace_of(group, CPU).launch("x", 1, 1)


def test_a_destroyed_group_leaves_nothing() -> None:
    for _ in range(2):
        with fake_group(2) as group:
            before = workspace.workspace_of(group, CPU)
            assert workspace.workspace_of(group, CPU) is before
        destroyed = group
    with fake_group(2) as group:
        assert workspace.workspace_of(group, CPU) is not before
        assert not group_state.held_by(destroyed)
        with pytest.raises(OverlapError, match="process group '0' was destroyed, and its workspace with it"):
            workspace.workspace_of(destroyed, CPU)


def test_a_call_ends_also_where_a_later_reader_fails(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise peers would wait for leave to write, and this rank would take the last call's rows for the next
    one's."""
    fused = pytest.importorskip(
        "overlap_inductor.lowerings.fused.calls",
        reason="Triton is not installed here; it is where the kernels' tests run",
    )
    ended = []
    monkeypatch.setattr(site_ops, "ready", lambda *args: ("launch", FusedParameters(1)))
    monkeypatch.setattr(fused, "all_gather_matmuls", lambda a, rhs, *rest: [a @ b for b in rhs])
    monkeypatch.setattr(fused, "gathered", lambda a, launch: a)
    monkeypatch.setattr(fused, "end", ended.append)
    x, w = torch.zeros(4, 8), torch.zeros(8, 24)
    with pytest.raises(RuntimeError):
        op = torch.ops.overlap_inductor.fused_all_gather_matmul
        op(torch.zeros(1), x, [w, torch.zeros(8, 16).t()], [None, None], False, "{}", group.group_name, "site")
    assert ended == ["launch"]


def test_rows_that_are_no_small_message_are_not_sent_as_one_where_the_slot_would_hold_them(group: Any) -> None:
    """A slot is as large as the largest of its sites."""
    workspace.prepare(group, CPU, json.dumps([["small", 2**26, 4096, "halves"]]), 2**30)
    weight = torch.empty(16, 4096, dtype=torch.bfloat16)
    few, many = (torch.empty(rows, 16, dtype=torch.bfloat16) for rows in (1024, 1025))
    assert small_ops._ready(few, weight, "{}", group, "small") is not None
    assert small_ops._ready(many, weight, "{}", group, "small") is None
