# SPDX-License-Identifier: Apache-2.0
"""Experts between two exchanges in schedule ``chunked``, on processes that share memory, with the kernels in Triton's
interpreter. A program without grouped matmuls takes the experts' place, so that every result is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.lowerings.chunked import experts_launch
from overlap_inductor.lowerings.chunked import merged_program
from overlap_inductor.lowerings.chunked.gated_pieces import weights_of
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.sites.row_program import HandedOut
from overlap_inductor.sites.row_program import RowProgram
from overlap_inductor.transports.messages import messages_of
from overlap_inductor.transports.messages import needed
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared

WIDTH, CALLS, EXPERTS = 8, 3, 3
ROW_BYTES = WIDTH * 4
PROGRAM = RowProgram(
    (
        ("aten.mul.Tensor", [{"row": 0}, {"row": 1}], {}),
        ("aten.add.Tensor", [{"row": 2}, {"whole": 0}], {}),
    ),
    3,
    WIDTH,
    "float32",
    (HandedOut(2, (WIDTH,), "float32"),),
)
"""``result = x * share + whole``; ``x * share`` is handed out. ``share`` has a row for each arrived row, in the order
of the experts."""


@dataclass(frozen=True)
class Case:
    """``counts[r][p]``: rows that rank ``r`` sends to rank ``p``. ``room``: rows of a message.
    ``arrive_sorted``: the rows of each rank arrive in the order of the experts."""

    counts: list[list[int]]
    room: int
    arrive_sorted: bool = False


CASES = {
    "one round": Case([[3, 5], [4, 2]], 64),
    "several rounds, unequal": Case([[40, 70, 1], [0, 3, 90], [33, 0, 5]], 32),
    "all rows to one rank": Case([[0, 9, 0], [0, 8, 0], [0, 7, 0]], 32),
    "no rows from others": Case([[6, 0], [0, 5]], 32),
    "a rank without rows": Case([[0, 0, 0], [4, 1, 2], [3, 0, 0]], 32),
    "no rows at all": Case([[0, 0], [0, 0]], 32),
    "sorted, several rounds": Case([[40, 70, 1], [0, 3, 90], [33, 0, 5]], 32, True),
    "sorted, two ranks": Case([[3, 5], [4, 2]], 64, True),
    "four ranks": Case([[5, 1, 2, 3], [2, 2, 2, 2], [0, 40, 0, 1], [7, 0, 6, 5]], 32),
}


def _given(case: Case, rank: int, call: int) -> dict[str, Any]:
    """The call's arguments on ``rank``. The numbers of rows change from call to call."""
    ranks = range(len(case.counts))
    counts = case.counts[call % len(ranks) :] + case.counts[: call % len(ranks)]
    drawn = torch.Generator().manual_seed(100 * call + rank)
    received = [counts[s][rank] for s in ranks]
    arrived = sum(received)
    if case.arrive_sorted:
        # Row j of the experts' order comes from a random rank. The rows of each rank keep their order.
        source = torch.repeat_interleave(torch.tensor(received))[torch.randperm(arrived, generator=drawn)]
        index = source.sort(stable=True).indices.sort().indices
    else:
        index = torch.randperm(arrived, generator=drawn)
    index[::2] -= arrived
    ends = torch.randint(0, arrived + 1, (EXPERTS,), generator=drawn).sort().values.int()
    return {
        "x": torch.randn(sum(counts[rank]), WIDTH, generator=drawn),
        "index": index,
        "ends": ends,
        "rows": [torch.randn(arrived, WIDTH, generator=drawn)],
        "whole": [torch.randn(WIDTH, generator=drawn)],
        "sent": counts[rank],
        "arrive_sorted": case.arrive_sorted,
        "received": received,
    }


def _expected(case: Case, rank: int, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(returned rows, handed out value)`` of ``rank``."""
    ranks = range(len(case.counts))
    given = [_given(case, r, call) for r in ranks]
    sent = [g["x"].split(g["sent"]) for g in given]
    results, products = [], []
    for r, g in enumerate(given):
        arrived = torch.cat([sent[s][r] for s in ranks])
        product = arrived[g["index"]] * g["rows"][0]
        result = torch.empty_like(product)
        result[g["index"]] = product + g["whole"][0]
        results.append(result.split(g["received"]))
        products.append(product)
    return torch.cat([results[p][rank] for p in ranks]), products[rank]


def _call(given: dict[str, Any], launch: Launch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    layer = experts_launch.Layer(**given, program=PROGRAM, weights=None)
    return experts_launch.all_to_all_experts(layer, launch, "site_7")


def _rank(rank: int, workspace: SharedWorkspace, case: Case, right: torch.Tensor) -> None:
    launch, run = workspace.launch(rank), RowProgram.run
    for call in range(CALLS):
        given, ends = _given(case, rank, call), []

        def recorded(self: RowProgram, rows: Any, whole: Any, found: torch.Tensor, ends: list[Any] = ends) -> list[Any]:
            ends.append(found.tolist())
            return run(self, rows, whole, found)

        RowProgram.run = recorded  # type: ignore[method-assign]
        returned, (product,) = _call(given, launch)
        launch.faults.check()
        wanted, handed_out = _expected(case, rank, call)
        total = torch.tensor(ends, dtype=torch.long).view(-1, EXPERTS).sum(0).tolist()
        same = torch.equal(returned, wanted) and torch.equal(product, handed_out)
        right[rank, call] = same and (total == given["ends"].tolist() or not len(given["index"]))


@pytest.mark.parametrize("name", CASES)
def test_is_equal_to_exchange_experts_exchange(name: str) -> None:
    """Each piece must get where its experts' rows end: over all pieces, these ends add up to the ends of all rows."""
    case = CASES[name]
    world_size = len(case.counts)
    workspace = SharedWorkspace.of(world_size, *needed(world_size, case.room * ROW_BYTES))
    right = shared(world_size, CALLS)
    run_ranks(world_size, _rank, workspace, case, right)
    assert right.all(), right


INNER, GATED_WIDTH = 24, 16
GATED = RowProgram(
    (
        (merged_program.PRODUCT, [{"row": 0}, {"whole": 1}, {"ends": 0}], {}),
        (merged_program.SILU, [{"row": 1}], {}),
        (merged_program.PRODUCT, [{"row": 0}, {"whole": 0}, {"ends": 0}], {}),
        (merged_program.MUL, [{"row": 2}, {"row": 3}], {}),
        (merged_program.PRODUCT, [{"row": 4}, {"whole": 2}, {"ends": 0}], {}),
    ),
    5,
    GATED_WIDTH,
    "float16",
    (),
)
"""Gated experts. The interpreter cannot multiply bf16."""
SORTED = ("sorted, several rounds", "sorted, two ranks")
EMPTY = {
    "a rank without rows": Case([[0, 0, 0], [4, 1, 2], [3, 0, 0]], 32, True),
    "no rows at all": Case([[0, 0], [0, 0]], 32, True),
    "all rows to one rank": Case([[0, 9, 0], [0, 8, 0], [0, 7, 0]], 32, True),
}


def _gated(case: Case, rank: int, call: int) -> dict[str, Any]:
    """As ``_given``, for ``GATED``."""
    given = _given(case, rank, call)
    drawn = torch.Generator().manual_seed(rank)
    shapes = [(EXPERTS, GATED_WIDTH, INNER)] * 2 + [(EXPERTS, INNER, GATED_WIDTH)]
    whole = [(torch.randn(e, n, k, generator=drawn) / k**0.5).half().transpose(1, 2) for e, k, n in shapes]
    x = torch.randn(given["x"].shape[0], GATED_WIDTH, generator=drawn).half()
    ends = given["ends"].clone()
    ends[-1] = sum(given["received"])
    return given | {"x": x, "rows": [], "whole": whole, "ends": ends}


def _gated_expected(case: Case, rank: int, call: int) -> torch.Tensor:
    ranks = range(len(case.counts))
    given = [_gated(case, r, call) for r in ranks]
    sent = [g["x"].split(g["sent"]) for g in given]
    results = []
    for r, g in enumerate(given):
        arrived = torch.cat([sent[s][r] for s in ranks])[g["index"]]
        parts, start = [], 0
        for end, value, gate, down in zip(g["ends"].tolist(), *(w.float() for w in g["whole"]), strict=True):
            rows = arrived[start:end].float()
            h = torch.nn.functional.silu((rows @ gate).half()) * (rows @ value).half()
            parts.append((h.float() @ down).half())
            start = end
        result = torch.empty(len(arrived), GATED_WIDTH).half()
        result[g["index"]] = torch.cat(parts)
        results.append(result.split(g["received"]))
    return torch.cat([results[p][rank] for p in ranks])


def _gated_rank(rank: int, workspace: SharedWorkspace, case: Case, right: torch.Tensor) -> None:
    launch, program = workspace.launch(rank), merged_program.merged(GATED, 1)
    weights = weights_of(program)
    assert weights == (1, 0, 2)
    for call in range(CALLS):
        layer = experts_launch.Layer(**_gated(case, rank, call), program=program, weights=weights)
        returned, handed_out = experts_launch.all_to_all_experts(layer, launch, "site_7")
        launch.faults.check()
        right[rank, call] = not handed_out and torch.allclose(
            returned, _gated_expected(case, rank, call), rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize("name", [*SORTED, *EMPTY])
def test_gated_experts_are_multiplied_in_two_launches(name: str) -> None:
    case = EMPTY[name] if name in EMPTY else CASES[name]
    world_size = len(case.counts)
    workspace = SharedWorkspace.of(world_size, *needed(world_size, case.room * GATED_WIDTH * 2))
    right = shared(world_size, CALLS)
    run_ranks(world_size, _gated_rank, workspace, case, right)
    assert right.all(), right


def _alone(rank: int, workspace: SharedWorkspace, case: Case, spoilt: torch.Tensor) -> None:
    """Rank 0 calls alone, so its waits end without rows."""
    if rank:
        return
    launch = workspace.launch(rank, patience_ns=200_000)
    returned, (product,) = _call(_given(case, rank, 0), launch)
    spoilt[0] = bool(returned.isnan().all()) and bool(product.isnan().all())
    with pytest.raises(TransferError, match="site_7"):
        launch.faults.check()
    with pytest.raises(TransferError):
        _call(_given(case, rank, 0), launch)


def test_a_missing_rank_spoils_the_results() -> None:
    workspace, spoilt = SharedWorkspace.of(2, *needed(2, 64 * ROW_BYTES)), shared(1)
    run_ranks(2, _alone, workspace, CASES["one round"], spoilt)
    assert spoilt.all()


def test_a_sender_waits_until_its_last_message_is_taken() -> None:
    """Rank 1 takes nothing, so rank 0 may send one message in each lane. Then its wait gives up."""
    launch = SharedWorkspace.of(2, *needed(2, 1024)).launch(0, patience_ns=200_000)
    messages = messages_of(launch)
    messages.begin([1], [])
    messages.begin([], [1])
    launch.faults.check()
    messages.begin([1], [])
    with pytest.raises(TransferError):
        launch.faults.check()


def test_a_message_larger_than_its_room_is_refused() -> None:
    workspace = SharedWorkspace.of(2, *needed(2, 1024))
    messages = messages_of(workspace.launch(0))
    with pytest.raises(UnsupportedError, match="2048 bytes; the workspace has room for 1024"):
        messages.send(0, 1, torch.zeros(512))


@pytest.mark.parametrize(
    ("come", "go", "halves"),
    [
        (True, True, ((4, 7), (7, 9))),
        (True, False, ((4, 9), (9, 9))),
        (False, True, ((4, 4), (4, 9))),
        (False, False, ((4, 4), (4, 9))),
    ],
)
def test_own_rows_hide_what_comes_and_what_returns(come: bool, go: bool, halves: Any) -> None:
    assert experts_launch._halves((4, 9), come, go) == halves
