# SPDX-License-Identifier: Apache-2.0
"""All-to-alls in schedule ``fused``, on processes that share memory, with the kernels in Triton's interpreter.

The operands are small integers, so every product is exact in fp16. Results must equal fp64 bit for bit. (The
interpreter cannot multiply bf16.)
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import pytest
import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.lowerings.fused import calls as fused
from overlap_inductor.lowerings.fused.contraction import contracted_all_to_all_matmul
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.parameters import needed
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import at_rest
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared
from tests.support.shared_memory import SMALL_TILES

CALLS = 3
SENT, RECEIVED, CONTRACTED = "matmul_all_to_all", "all_to_all_matmul", "contraction"


@dataclass(frozen=True)
class Case:
    """``CALLS`` calls in one part (slot) of the workspace. Each call has one band more than the call before. A *slice*
    is what one rank sends to another.

    Attributes:
        rows, columns, inner: rows of a slice, columns of the result, and K. In a contraction, ``inner`` is the part of
            K in one slice.
        by_columns: a slice consists of columns of the product.
        in_rows: the right operand is row-major, not transposed.
        two: the received rows are read after the kernel. Except in a contraction, a second weight also multiplies them.
        settings: parameters of the schedule.
    """

    pattern: str
    world_size: int
    rows: int
    columns: int
    inner: int
    by_columns: bool = False
    bias: bool = False
    in_rows: bool = False
    two: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def parameters(self, call: int) -> FusedParameters:
        settings = {"blocks": 2, "parts": 1, "pieces": 2, "pushers": 1, **SMALL_TILES, **self.settings}
        blocks = settings.pop("blocks")
        return FusedParameters(blocks, **{**settings, "parts": settings["parts"] + call})

    @property
    def planned_as(self) -> str:
        return RECEIVED if self.pattern == CONTRACTED else self.pattern


SLICES = {"slices": 2, "slices_tiles": 2**20, "slices_pushers": 1}
CASES = {
    "sent rows, one block": Case(SENT, 2, 32, 32, 32, settings={"blocks": 1}),
    "sent rows, three ranks, bias, no multiples of a tile": Case(SENT, 3, 40, 24, 40, bias=True),
    "sent rows, bands, in rows, stored in halves": Case(
        SENT, 2, 56, 40, 32, in_rows=True, settings={"parts": 3, "blocks": 3, "halves": True}
    ),
    "sent rows, all copies at the end": Case(SENT, 3, 24, 24, 32, settings={"early": 0, "parts": 2}),
    "sent columns, one block": Case(SENT, 2, 32, 16, 32, by_columns=True, settings={"blocks": 1}),
    "sent columns, three ranks, bias, no multiples of a tile": Case(
        SENT, 3, 40, 24, 40, by_columns=True, bias=True, settings={"parts": 2}
    ),
    "sent columns, in rows": Case(SENT, 2, 24, 40, 32, by_columns=True, in_rows=True, settings={"early": 3}),
    "received rows, one block": Case(RECEIVED, 2, 32, 32, 32, settings={"blocks": 1}),
    "received rows, three ranks, bands, bias": Case(
        RECEIVED, 3, 40, 24, 40, bias=True, settings={"parts": 2, "pieces": 3}
    ),
    "received rows, two weights, read after the kernel": Case(RECEIVED, 3, 24, 24, 32, two=True, in_rows=True),
    "received rows by copies": Case(RECEIVED, 3, 40, 24, 32, settings={"copies_from": 0}),
    "received rows by copies, read after the kernel": Case(
        RECEIVED, 2, 24, 16, 32, two=True, settings={"copies_from": 0}
    ),
    "contracted, one block": Case(CONTRACTED, 2, 32, 32, 32, settings={"blocks": 1}),
    "contracted, three ranks, bands, bias": Case(
        CONTRACTED, 3, 40, 24, 48, bias=True, settings={"parts": 3, "pieces": 3, "halves": True}
    ),
    "contracted, in rows, read after the kernel": Case(CONTRACTED, 3, 24, 40, 16, two=True, in_rows=True),
    "contracted by copies, bands": Case(CONTRACTED, 3, 40, 24, 32, settings={"copies_from": 0, "parts": 2}),
    "contracted by copies, read after the kernel": Case(
        CONTRACTED, 2, 24, 16, 32, two=True, settings={"copies_from": 0}
    ),
    "received rows along K, three ranks": Case(RECEIVED, 3, 24, 24, 72, bias=True, settings=SLICES),
    "received rows along K, read after the kernel": Case(RECEIVED, 2, 40, 24, 40, two=True, settings=SLICES),
}


def _random_cases(count: int) -> dict[str, Case]:
    choose, found = random.Random(26), {}
    for number in range(count):
        pattern = choose.choice([SENT, RECEIVED, CONTRACTED])
        rows, columns, inner = choose.randint(1, 50), 8 * choose.randint(1, 6), 8 * choose.randint(1, 6)
        settings = {
            "blocks": choose.randint(1, 3),
            "parts": choose.randint(1, 3),
            "halves": choose.random() < 0.5,
            **(
                choose.choice([{}, SLICES, {"copies_from": 0}])
                if pattern == RECEIVED
                else {"early": choose.randint(-1, 2)}
            ),
        }
        found[f"random {number}"] = Case(
            pattern,
            choose.choice([2, 3, 4]),
            *(rows, columns, 2 * inner if pattern == CONTRACTED else inner),
            by_columns=pattern == SENT and choose.random() < 0.5,
            bias=choose.random() < 0.5,
            in_rows=choose.random() < 0.5,
            two=pattern != SENT and choose.random() < 0.3,
            settings=settings,
        )
    return found


CASES |= _random_cases(12)


def _integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).half().share_memory_()


def _rank(
    rank: int, workspace: SharedWorkspace, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, case: Case
) -> None:
    launch = workspace.launch(rank)
    right = b[rank].t().contiguous() if case.in_rows else b[rank].t()
    bias = b[rank, :, 0].contiguous() if case.bias else None
    for call in range(CALLS):
        left, p = a[call, rank], case.parameters(call)
        if case.pattern == SENT:
            out[call, rank] = fused.matmul_all_to_all(left, right, launch, p, bias, case.by_columns)
        elif case.pattern == CONTRACTED:
            out[call, rank] = contracted_all_to_all_matmul(left, right, launch, p, bias, keep=case.two)
            if case.two:
                _check_received(case, a[call], launch)
        elif not case.two:
            out[call, rank] = fused.all_to_all_matmul(left, right, launch, p, bias)
        else:
            weights = [right, right * 2]
            out[call, rank], other = fused.all_to_all_matmuls(left, weights, launch, p, [bias, None], keep=True)
            received = _check_received(case, a[call], launch)
            assert torch.equal(other, received @ right * 2)
        launch.faults.check()
        assert at_rest(launch.slot) and launch.slot.calls.tolist() == [call + 1]


def _check_received(case: Case, a: torch.Tensor, launch: Any) -> torch.Tensor:
    """A call with ``keep`` leaves the rows sent to this rank in the workspace. Check these rows, end the call and
    return the rows."""
    gathered = fused.gathered(fused.own_shard(RECEIVED, a[launch.rank], launch), launch)
    received = torch.cat([sent.chunk(case.world_size)[launch.rank] for sent in a])
    assert torch.equal(gathered, received)
    fused.end(launch)
    return received


def _expected(case: Case, a: torch.Tensor, b: torch.Tensor, rank: int) -> torch.Tensor:
    """What ``rank`` gets, computed in fp64. ``a``: left operands of all ranks. ``b``: right operands, transposed."""
    biases = [case.bias * w[:, 0].double() for w in b]
    if case.pattern == CONTRACTED:
        left = torch.cat([sent.chunk(len(a))[rank] for sent in a], dim=1)
        return left.double() @ b[rank].double().t() + biases[rank]
    if case.pattern == RECEIVED:
        return torch.cat([sent.chunk(len(a))[rank] for sent in a]).double() @ b[rank].double().t() + biases[rank]
    products = [x.double() @ w.double().t() + bias for x, w, bias in zip(a, b, biases, strict=True)]
    return torch.cat([p.chunk(len(a), dim=1 if case.by_columns else 0)[rank] for p in products])


REPEATED = [f"random {number}" for number in range(3, 12)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in REPEATED)) for name in CASES]
)
def test_is_equal_to_the_matmul_and_the_exchange(name: str) -> None:
    case = CASES[name]
    w, rows, width = case.world_size, case.rows, case.columns
    all_columns = width * w if case.by_columns else width
    a = _integers(CALLS, w, rows if case.by_columns else rows * w, case.inner, seed=1)
    b = _integers(w, all_columns, case.inner * (w if case.pattern == CONTRACTED else 1), seed=2)
    out = shared(
        CALLS, w, rows if case.pattern == CONTRACTED else rows * w, width, dtype=torch.float16, fill=float("nan")
    )
    needs = [needed(case.planned_as, w, rows, case.inner, width, 2, case.parameters(call)) for call in range(CALLS)]
    workspace = SharedWorkspace.of(w, *map(max, zip(*needs, strict=True)))
    run_ranks(w, _rank, workspace, a, b, out, case)
    for call in range(CALLS):
        for rank in range(w):
            assert torch.equal(out[call, rank].double(), _expected(case, a[call], b, rank)), (call, rank)


def test_room_planned_for_columns_suffices() -> None:
    """The room is planned for slices of rows: a quarter of the rows, and all 96 columns. The call sends slices of
    columns: all rows, and 24 columns. The planned room must suffice for the call."""
    for parts in (0, 1, 4):
        p = FusedParameters(2, parts=parts, **SMALL_TILES)
        for rows in (1, 17, 40, 100):
            planned = needed(SENT, 4, -(-rows // 4), 32, 96, 2, p)
            assert all(a >= b for a, b in zip(planned, needed(SENT, 4, rows, 32, 24, 2, p), strict=True))


P = FusedParameters(2, pieces=1, pushers=1, **SMALL_TILES)


def _call(pattern: str, launch: Any) -> torch.Tensor:
    if pattern == CONTRACTED:
        a, b = torch.ones(48, 32).half(), torch.ones(16, 96).half().t()
        return contracted_all_to_all_matmul(a, b, launch, P)
    return getattr(fused, pattern)(torch.ones(48, 32).half(), torch.ones(16, 32).half().t(), launch, P)


@pytest.mark.parametrize(("pattern", "what"), [(SENT, "finished rows from rank 2"), (RECEIVED, "rows from rank 1")])
def test_a_peer_that_never_comes(pattern: str, what: str) -> None:
    """The call ends, and the peers' slices are NaN. The next call raises an error that names the site and the peer."""
    launch = SharedWorkspace.of(3, 20_000, 8).launch(0, patience_ns=20_000)
    first, *others = _call(pattern, launch).chunk(3)
    assert (first == 32).all() and all(other.isnan().all() for other in others)
    with pytest.raises(TransferError, match=f"site_7 of group 'tp' timed out waiting for {what}: expected call 1"):
        _call(pattern, launch)


@pytest.mark.parametrize("keep", [False, True])
def test_a_contraction_with_a_peer_that_never_comes(keep: bool) -> None:
    """Every element is a sum over the slices of all ranks. If slices are missing, every element must be NaN."""
    launch = SharedWorkspace.of(3, 20_000, 8).launch(0, patience_ns=20_000)
    a, b = torch.ones(48, 32).half(), torch.ones(16, 96).half().t()
    assert contracted_all_to_all_matmul(a, b, launch, P, keep=keep).isnan().all()
    with pytest.raises(TransferError, match="timed out waiting for rows from rank 1: expected call 1"):
        contracted_all_to_all_matmul(a, b, launch, P, keep=keep)


@pytest.mark.parametrize("pattern", [SENT, RECEIVED, CONTRACTED])
def test_nothing_is_written_without_a_credit(pattern: str) -> None:
    workspace = SharedWorkspace.of(3, 20_000, 4)
    launch = workspace.launch(0, patience_ns=20_000)
    launch.slot.calls.fill_(1)
    workspace.flags[0, 3 * FLAG_WORDS :] = 2
    _call(pattern, launch)
    with pytest.raises(TransferError, match="timed out waiting for permission to write into the workspace of rank"):
        _call(pattern, launch)
    assert (workspace.data[1:] == 0x7E).all() and not workspace.flags[1:, 3 * FLAG_WORDS :].any()


def test_unsupported_operands_are_refused() -> None:
    launch, b = SharedWorkspace.of(2, 20_000, 2).launch(0), torch.zeros(16, 32).half().t()
    with pytest.raises(UnsupportedError, match="3 rows cannot be cut into 2 equal slices"):
        fused.matmul_all_to_all(torch.zeros(3, 32).half(), b, launch, P)
    with pytest.raises(UnsupportedError, match="3 rows cannot be cut into 2 equal slices"):
        fused.all_to_all_matmul(torch.zeros(3, 32).half(), b, launch, P)
    with pytest.raises(UnsupportedError, match="64 rows of the right operand are contracted with 2 slices of 24"):
        contracted_all_to_all_matmul(torch.zeros(4, 24).half(), torch.zeros(64, 16).half(), launch, P)
    with pytest.raises(UnsupportedError, match="16 columns cannot be cut into 3 equal slices"):
        three = SharedWorkspace.of(3, 20_000, 2).launch(0)
        fused.matmul_all_to_all(torch.zeros(8, 32).half(), b, three, P, by_columns=True)
    with pytest.raises(UnsupportedError, match="rows of 32 and of 4 elements"):
        four = SharedWorkspace.of(4, 20_000, 2).launch(0)
        fused.matmul_all_to_all(torch.zeros(8, 32).half(), b, four, P, by_columns=True)
    with pytest.raises(UnsupportedError, match="its slot has 20000 and 2"):
        fused.matmul_all_to_all(torch.zeros(2048, 32).half(), b, launch, P)
