# SPDX-License-Identifier: Apache-2.0
"""All-to-alls in schedule ``chunked``, on processes that share memory, with the kernels in Triton's interpreter.

The operands are small integers, so every product is exact in fp16 and bf16. Results must equal fp64 bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import pytest
import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.lowerings.chunked import contracted_launch
from overlap_inductor.lowerings.chunked import exchange_launch
from overlap_inductor.lowerings.chunked import gather_launch
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.chunked.parameters import needed
from overlap_inductor.lowerings.one_op.vendor_matmul import SlicedMatmul
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import at_rest
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared

CALLS, K, N = 2, 16, 24
SENT, RECEIVED, CONTRACTED = "matmul_all_to_all", "all_to_all_matmul", "contracted"
"""``CONTRACTED``: an all-to-all whose received slices stand side by side along K of the matmul."""
SMALL = ChunkedParameters(2, "copy_engine", 1, grain=8, pushers=2)


@dataclass(frozen=True)
class Case:
    """``CALLS`` calls in one part (slot) of the workspace. A *slice* is what one rank sends to another.

    Attributes:
        rows: rows of a slice.
        columns: a slice consists of columns of the product. By default, it consists of rows.
        two: a second matmul reads the received tensor, and the call also returns this tensor.
    """

    pattern: str
    world_size: int
    rows: int
    parameters: ChunkedParameters
    columns: bool = False
    bias: bool = False
    two: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "sent rows, uneven parts, pushed, bias": Case(
        SENT, 3, 20, replace(SMALL, chunks=5, transport="sm_push"), bias=True, dtype=torch.float16
    ),
    "sent rows, chunks chosen, in turns": Case(SENT, 4, 16, replace(SMALL, chunks=None, turns_from=0)),
    "sent rows, one matmul": Case(SENT, 2, 8, replace(SMALL, chunks=0)),
    "sent columns, bias, chunks chosen": Case(SENT, 4, 16, replace(SMALL, chunks=None), columns=True, bias=True),
    "sent columns, uneven parts, pushed": Case(
        SENT, 3, 20, replace(SMALL, chunks=5, transport="sm_push"), columns=True, dtype=torch.float16
    ),
    "contracted columns, three bands of unequal rows, in turns": Case(
        CONTRACTED, 4, 20, replace(SMALL, bands=3, turns_from=0), bias=True
    ),
    "contracted columns, two bands, pushed, two matmuls": Case(
        CONTRACTED, 3, 24, replace(SMALL, bands=2, transport="sm_push"), two=True, dtype=torch.float16
    ),
    "contracted columns, one band": Case(CONTRACTED, 2, 8, SMALL),
    "contracted columns, bands chosen": Case(
        CONTRACTED, 2, 24, replace(SMALL, sms=1, transport="auto", bands=0, grain=8), two=True
    ),
    "received rows, chunks chosen, in turns": Case(RECEIVED, 4, 16, replace(SMALL, chunks=None, turns_from=0)),
    "received rows, uneven parts, pushed, two matmuls, bias": Case(
        RECEIVED, 3, 20, replace(SMALL, chunks=5, transport="sm_push"), bias=True, two=True, dtype=torch.float16
    ),
}


def _integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype).share_memory_()


def _rank(
    rank: int, workspace: SharedWorkspace, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, case: Case
) -> None:
    launch = workspace.launch(rank)
    right, bias = b[rank].t(), b[rank, :, 0].contiguous() if case.bias else None
    receive = (
        contracted_launch.contracted_all_to_all_matmul
        if case.pattern == CONTRACTED
        else gather_launch.all_to_all_matmul
    )
    for call in range(CALLS):
        left = a[call, rank]
        if case.pattern == SENT:
            matmul = SlicedMatmul(right, bias, count=case.world_size) if case.columns else VendorMatmul(right, bias)
            out[call, rank] = exchange_launch.matmul_all_to_all(left, matmul, launch, case.parameters)
        else:
            matmuls = [VendorMatmul(right, bias), VendorMatmul(right[:, :8].contiguous())][: 1 + case.two]
            out[call, rank], *others = receive(left, matmuls, launch, case.parameters, case.two)
            if case.two:
                slices = [sent.chunk(case.world_size)[rank] for sent in a[call]]
                received = torch.cat(slices, 1 if case.pattern == CONTRACTED else 0)
                assert torch.equal(others[1], received) and torch.equal(others[0], received @ right[:, :8])
        launch.faults.check()
        assert at_rest(launch.slot) and launch.slot.calls.tolist() == [call + 1]


def _expected(case: Case, a: torch.Tensor, b: torch.Tensor, rank: int) -> torch.Tensor:
    """What ``rank`` gets, computed in fp64. ``a``: left operands of all ranks. ``b``: right operands, transposed."""
    biases = [case.bias * w[:, 0].double() for w in b]
    if case.pattern == CONTRACTED:
        joined = torch.cat([sent.chunk(len(a))[rank] for sent in a], 1)
        return joined.double() @ b[rank].double().t() + biases[rank]
    if case.pattern == RECEIVED:
        return torch.cat([sent.chunk(len(a))[rank] for sent in a]).double() @ b[rank].double().t() + biases[rank]
    products = [x.double() @ w.double().t() + bias for x, w, bias in zip(a, b, biases, strict=True)]
    return torch.cat([p.chunk(len(a), dim=1 if case.columns else 0)[rank] for p in products])


@pytest.mark.parametrize("name", CASES)
def test_is_equal_to_the_matmul_and_the_exchange(name: str) -> None:
    case = CASES[name]
    w, rows = case.world_size, case.rows
    columns = N * w if case.columns else N
    a = _integers(CALLS, w, rows if case.columns else rows * w, K, dtype=case.dtype, seed=1)
    contracted = case.pattern == CONTRACTED
    b = _integers(w, columns, K * w if contracted else K, dtype=case.dtype, seed=2)
    out = shared(CALLS, w, rows if contracted else rows * w, N, dtype=case.dtype, fill=float("nan"))
    pattern = RECEIVED if contracted else case.pattern
    workspace = SharedWorkspace.of(w, *needed(pattern, w, rows, K, N, 2, case.parameters))
    run_ranks(w, _rank, workspace, a, b, out, case)
    for call in range(CALLS):
        for rank in range(w):
            assert torch.equal(out[call, rank].double(), _expected(case, a[call], b, rank)), (call, rank)


def _call(pattern: str, launch: Any) -> torch.Tensor:
    a, matmul = torch.ones(48, K).half(), VendorMatmul(torch.ones(K, N).half())
    if pattern == SENT:
        return exchange_launch.matmul_all_to_all(a, matmul, launch, SMALL)
    if pattern == CONTRACTED:
        joined = VendorMatmul(torch.ones(3 * K, N).half())
        return contracted_launch.contracted_all_to_all_matmul(a, [joined], launch, SMALL)[0]
    return gather_launch.all_to_all_matmul(a, [matmul], launch, SMALL)[0]


@pytest.mark.parametrize(
    ("pattern", "what"),
    [(SENT, "finished rows from rank 2"), (RECEIVED, "rows from rank 1"), (CONTRACTED, "rows from rank 1")],
)
def test_a_peer_that_never_comes(pattern: str, what: str) -> None:
    """The call ends, and its result is NaN. The next call raises an error that names the site and the peer."""
    launch = SharedWorkspace.of(3, 20_000, 8).launch(0, patience_ns=20_000)
    assert _call(pattern, launch).isnan().all()
    with pytest.raises(TransferError, match=f"site_7 of group 'tp' timed out waiting for {what}: expected call 1"):
        _call(pattern, launch)


class _Side:
    """A fake side stream. ``inside`` is True while it is the current stream."""

    inside, joined = False, False

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *_: object) -> None:
        self.inside = False

    def join(self) -> None:
        self.joined = True


def test_received_slices_replace_the_sent_ones_only_after_the_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result takes the product's memory. So received slices are copied there only after the side stream has sent
    the product's slices. The rank's own slice is multiplied last, under the transfers."""
    launch, side, events = SharedWorkspace.of(2, 20_000, 8).launch(0, patience_ns=20_000), _Side(), []
    plain, plain_receive = exchange_launch.sent_chunks, exchange_launch.receive_kernel

    class Matmul(VendorMatmul):
        def __call__(self, *arguments: object) -> None:
            events.append("matmul")
            super().__call__(*arguments)  # type: ignore[arg-type]

    def chunks(*arguments: Any) -> list[tuple[list[tuple[int, int]], Any]]:
        return [
            (rows, lambda source, send=send: (events.append("send" if side.inside else "not beside"), send(source)))
            for rows, send in plain(*arguments)
        ]

    def receive(*arguments: Any) -> Any:
        kernel = plain_receive(*arguments)
        return lambda out: (events.append("receive" if side.joined else "receive too early"), kernel(out))

    monkeypatch.setattr(exchange_launch, "side_stream", lambda device: side)
    monkeypatch.setattr(exchange_launch, "sent_chunks", chunks)
    monkeypatch.setattr(exchange_launch, "receive_kernel", receive)
    exchange_launch.matmul_all_to_all(torch.ones(32, K).half(), Matmul(torch.ones(K, N).half()), launch, SMALL)
    assert events == ["matmul", "send", "matmul", "receive"]


def test_unsupported_operands_are_refused() -> None:
    launch, b = SharedWorkspace.of(2, 20_000, 2).launch(0), torch.zeros(K, N).half()
    with pytest.raises(UnsupportedError, match="3 rows cannot be cut into 2 equal slices"):
        exchange_launch.matmul_all_to_all(torch.zeros(3, K).half(), VendorMatmul(b), launch, SMALL)
    with pytest.raises(UnsupportedError, match="3 rows cannot be cut into 2 equal slices"):
        gather_launch.all_to_all_matmul(torch.zeros(3, K).half(), [VendorMatmul(b)], launch, SMALL)
    with pytest.raises(UnsupportedError, match="24 columns cannot be cut into 5 equal slices"):
        five = SharedWorkspace.of(5, 20_000, 2).launch(0)
        exchange_launch.matmul_all_to_all(torch.zeros(8, K).half(), SlicedMatmul(b, count=5), five, SMALL)
    with pytest.raises(UnsupportedError, match="rows of 16 and of 12 elements"):
        exchange_launch.matmul_all_to_all(torch.zeros(8, K).half(), SlicedMatmul(b, count=2), launch, SMALL)
    with pytest.raises(UnsupportedError, match="3 rows cannot be cut into 2 equal slices"):
        contracted_launch.contracted_all_to_all_matmul(torch.zeros(3, K).half(), [VendorMatmul(b)], launch, SMALL)
    with pytest.raises(UnsupportedError, match="the right operand is torch.float16\\[16, 24\\]; expected 32 rows"):
        contracted_launch.contracted_all_to_all_matmul(torch.zeros(8, K).half(), [VendorMatmul(b)], launch, SMALL)
    with pytest.raises(UnsupportedError, match="rows of 4 and of 24 elements"):
        narrow = VendorMatmul(torch.zeros(8, N).half())
        contracted_launch.contracted_all_to_all_matmul(torch.zeros(8, 4).half(), [narrow], launch, SMALL)
    with pytest.raises(UnsupportedError, match="expected it contiguous"):
        contracted_launch.contracted_all_to_all_matmul(torch.zeros(K, 8).half().t(), [VendorMatmul(b)], launch, SMALL)
    with pytest.raises(UnsupportedError, match="fp16 or bf16"):
        gather_launch.all_to_all_matmul(torch.zeros(8, K), [VendorMatmul(b.float())], launch, SMALL)
