# SPDX-License-Identifier: Apache-2.0
"""The workspace that a rank holds for a group. Each part of it that a call uses is a *slot*. Plans that fit get slots,
others get none. A call that fails after it has begun must still be ended."""

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


def test_a_plan_that_failed_in_a_capture_is_prepared_at_the_next_call_outside(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error advises to run the function once before capturing. This advice must help."""
    monkeypatch.setattr(symmetric, "capturing", lambda: True)
    with pytest.raises(OverlapError, match="Run the compiled function once before capturing it"):
        workspace.prepare(group, CPU, requests(a=100), 2**20)
    monkeypatch.setattr(symmetric, "capturing", lambda: False)
    workspace.prepare(group, CPU, requests(a=100), 2**20)
    assert workspace.workspace_of(group, CPU).launch("a", 100, 1) is not None


def test_a_plan_without_room_runs_without_overlap_and_takes_no_slot_from_others(
    group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    workspace.prepare(group, CPU, requests(a=1000), 2**20)
    workspace.prepare(group, CPU, requests(a=2**21, b=10), 2**20)
    place = workspace.workspace_of(group, CPU)
    assert "2 sites of group '0' run without overlap" in caplog.text and "is 1 MiB" in caplog.text
    assert place.launch("a", 1000, 1) is not None, "the earlier graph keeps its slot"
    assert place.launch("a", 2**21, 1) is None and place.launch("b", 10, 1) is None
    workspace.prepare(group, CPU, requests(a=2**21), 2**23)
    assert place.launch("a", 2**21, 1) is not None, "the last plan has a higher limit"


def test_a_site_that_holds_a_slot_is_not_counted_among_those_without_room(
    group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    workspace.prepare(group, CPU, requests(a=1000), 2**20)
    workspace.prepare(group, CPU, requests(a=1000, b=2**21, c=2**21), 2**20)
    place = workspace.workspace_of(group, CPU)
    assert place.launch("a", 1000, 1) is not None
    assert place.launch("b", 2**21, 1) is None and place.launch("c", 2**21, 1) is None
    assert "2 sites of group '0' run without overlap" in caplog.text


def test_what_a_call_needs_is_looked_up_once_for_each_plan(group: Any) -> None:
    """A new plan may give the site another slot, or its first slot. So the slot is looked up again."""
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
    assert place.known("call", make) is found and len(asked) == 2, "all calls of a large model are remembered"
    place.known("one more", lambda: None)
    assert place.known("call", make) is found and len(asked) == 3, "the number of remembered calls is limited"


def test_schedules_of_one_site_have_their_own_parameters(group: Any) -> None:
    """A model may be compiled again with another schedule but equal settings. Each schedule must get its own type of
    parameters."""
    workspace.prepare(group, CPU, requests(a=2**17), 2**21)
    a, b = torch.zeros(256, 64, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)

    def ready(plan: Any, pattern: str = "all_gather_matmul", settings: str = "{}", rows: int = 256) -> Any:
        return site_ops.ready(plan, pattern, rows, a, b, a.dtype, group, "a", settings)

    assert [type(ready(plan)[1]) for plan in (fused_plan, chunked_plan, fused_plan)] == [
        FusedParameters,
        ChunkedParameters,
        FusedParameters,
    ]
    # Other settings and other numbers of rows have their own parameters, too.
    assert [ready(fused_plan, settings=s)[1].warps for s in ("{}", '{"warps": 4}', "{}")] == [
        FusedParameters(1).warps,
        4,
        FusedParameters(1).warps,
    ]
    assert (
        ready(fused_plan, settings='{"min_rows": 513}') is None
        and ready(fused_plan, settings='{"min_rows": 513}', rows=257) is not None
    )
    assert ready(fused_plan, "matmul_all_reduce") is None, (
        "the two legs of an all-reduce need twice the bytes of the slot"
    )


def test_a_site_without_a_prepared_slot_is_an_error(group: Any) -> None:
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


def test_a_call_is_ended_even_if_a_later_matmul_fails(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the failed call were not ended, peers would wait for this rank's credit. In the next call, this rank would
    read the failed call's rows."""
    fused = pytest.importorskip(
        "overlap_inductor.lowerings.fused.calls",
        reason="Triton comes with the package's test extra; an environment without this extra has none",
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


def test_too_many_rows_are_not_a_small_message_even_if_the_slot_holds_them(group: Any) -> None:
    """Several sites share a slot, so it may have room for more rows than the kernels support."""
    workspace.prepare(group, CPU, json.dumps([["small", 2**26, 4096, "halves"]]), 2**30)
    weight = torch.empty(16, 4096, dtype=torch.bfloat16)
    few, many = (torch.empty(rows, 16, dtype=torch.bfloat16) for rows in (1024, 1025))
    assert small_ops._ready(few, weight, "{}", group, "small") is not None
    assert small_ops._ready(many, weight, "{}", group, "small") is None
