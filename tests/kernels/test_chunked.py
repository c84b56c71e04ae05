# SPDX-License-Identifier: Apache-2.0
"""Runs schedule ``chunked`` on processes that share memory, with its kernels in Triton's interpreter.

A CPU has no streams, so work runs in the order of its launch. So before a call waits, it must have sent the rows for
its peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace

import pytest
import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.lowerings.chunked import gather_launch
from overlap_inductor.lowerings.chunked import reduce_launch
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.chunked.parameters import needed
from overlap_inductor.lowerings.chunked.parameters import result_signals
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports.copy_engine import CopyEngine
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import at_rest
from tests.kernels.ranks import exact
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared

CALLS = 3
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
SMALL = ChunkedParameters(2, "copy_engine", 1, grain=8, pushers=2)


@dataclass(frozen=True)
class Case:
    """``CALLS`` calls in one part (slot) of the workspace. If the number of chunks is given, each call has one chunk
    more than the call before. The flags of one slot must serve any number of chunks, because sites with different
    numbers of chunks share a slot.

    Attributes:
        rows: rows of a shard.
        two: a second matmul reads the gathered tensor, and the call returns the gathered tensor.
        missing: rows that the last shard of an all-reduce lacks.
    """

    pattern: str
    world_size: int
    rows: int
    parameters: ChunkedParameters
    columns: int = 24
    inner: int = 16
    average: bool = False
    bias: bool = False
    two: bool = False
    missing: int = 0

    def at(self, call: int) -> ChunkedParameters:
        p = self.parameters
        return p if p.chunks is None else replace(p, chunks=p.chunks + call)


CASES = {
    "gather": Case(GATHER, 2, 16, SMALL),
    "gather, three ranks, pushed": Case(GATHER, 3, 40, replace(SMALL, transport="sm_push")),
    "gather, uneven chunks of one shard, bias": Case(GATHER, 2, 40, replace(SMALL, chunks=2), bias=True),
    "gather, uneven chunks across shards": Case(GATHER, 3, 20, replace(SMALL, chunks=3)),
    "gather, two matmuls, gathered tensor read, pushed": Case(
        GATHER, 3, 16, replace(SMALL, chunks=2, transport="sm_push"), two=True
    ),
    "gather, chunks chosen, matmul-bound": Case(GATHER, 4, 16, replace(SMALL, chunks=None), columns=7200),
    "gather, chunks chosen, link-bound": Case(GATHER, 4, 16, replace(SMALL, chunks=None)),
    "gather, chunks of given sizes": Case(GATHER, 4, 16, replace(SMALL, chunks=None, sizes=(1, 2))),
    "gather, each copy in its turn": Case(GATHER, 4, 16, replace(SMALL, chunks=2, turns_from=0)),
    "scatter, copies of several parts in their turn": Case(SCATTER, 3, 40, replace(SMALL, chunks=4, turns_from=0)),
    "all-reduce, copies of both legs in their turn": Case(
        REDUCE, 4, 24, replace(SMALL, chunks=None, bands=3, turns_from=0)
    ),
    "scatter": Case(SCATTER, 2, 16, SMALL),
    "scatter, chunks chosen, matmul-bound": Case(SCATTER, 4, 16, replace(SMALL, chunks=None), inner=4000, bias=True),
    "scatter, chunks chosen, link-bound": Case(SCATTER, 4, 16, replace(SMALL, chunks=None)),
    "scatter, chunks of given sizes, pushed": Case(
        SCATTER, 4, 16, replace(SMALL, chunks=None, sizes=(2, 1), transport="sm_push")
    ),
    "scatter, three ranks, uneven chunks, bias": Case(SCATTER, 3, 20, replace(SMALL, chunks=3), bias=True),
    "scatter an average, pushed": Case(
        SCATTER, 3, 40, replace(SMALL, chunks=2, transport="sm_push", pushers=3), average=True
    ),
    "scatter an average of parts, bias": Case(
        SCATTER, 3, 40, replace(SMALL, chunks=5, turns_from=0), average=True, bias=True
    ),
    "all-reduce": Case(REDUCE, 2, 16, SMALL),
    "all-reduce, bands in one matmul each": Case(REDUCE, 3, 40, replace(SMALL, chunks=0, bands=3), bias=True),
    "all-reduce, bands, pushed": Case(REDUCE, 3, 40, replace(SMALL, chunks=2, bands=4, transport="sm_push")),
    "all-reduce of uneven rows": Case(REDUCE, 3, 16, replace(SMALL, chunks=0, bands=2, transport="auto"), missing=2),
    "all-reduce, chunks chosen, matmul-bound": Case(REDUCE, 4, 24, replace(SMALL, chunks=None, bands=3), inner=4000),
    "all-reduce, chunks of given sizes": Case(
        REDUCE, 4, 24, replace(SMALL, chunks=None, bands=2, sizes=(1, 2)), bias=True
    ),
    "all-reduce of fewer rows than ranks": Case(REDUCE, 3, 1, replace(SMALL, bands=0), missing=1),
    "all-reduce an average, two bands": Case(REDUCE, 2, 24, replace(SMALL, chunks=1, bands=2), average=True),
}


def _rank(
    rank: int, workspace: SharedWorkspace, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, case: Case
) -> None:
    launch = workspace.launch(rank)
    right, bias = b[rank].t(), b[rank, :, 0].contiguous() if case.bias else None
    for call in range(CALLS):
        left = a[call, rank].contiguous()
        if case.pattern == GATHER:
            rhs = [right, right[:, :8].contiguous()] if case.two else [right]
            matmuls = list(map(VendorMatmul, rhs, [bias, None]))
            out[call, rank], *others = gather_launch.all_gather_matmul(left, matmuls, launch, case.at(call), case.two)
            if case.two:
                everyone = a[call].flatten(0, 1)
                assert torch.equal(others[1], everyone) and torch.allclose(
                    others[0].double(), everyone.double() @ rhs[1].double(), rtol=2e-2, atol=5e-2
                )
        else:
            out[call, rank] = getattr(reduce_launch, case.pattern)(
                left, VendorMatmul(right, bias), launch, case.at(call), case.average
            )
        launch.faults.check()
        assert at_rest(launch.slot) and launch.slot.calls.tolist() == [call + 1]


REPEATED = (
    "gather, uneven chunks across shards",
    "gather, chunks chosen, link-bound",
    "scatter, chunks chosen, link-bound",
    "scatter, copies of several parts in their turn",
    "scatter an average of parts, bias",
    "all-reduce, bands in one matmul each",
    "all-reduce, chunks of given sizes",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in REPEATED)) for name in CASES]
)
def test_agrees_with_fp64(name: str) -> None:
    case = CASES[name]
    w, gathers = case.world_size, case.pattern == GATHER
    all_rows = w * case.rows - case.missing
    generator = torch.Generator().manual_seed(1)
    a = (
        torch.randn(CALLS, w, case.rows if gathers else all_rows, case.inner, generator=generator)
        .half()
        .share_memory_()
    )
    b = torch.randn(w, case.columns, case.inner, generator=generator).half().share_memory_()
    out = shared(
        CALLS,
        w,
        case.rows if case.pattern == SCATTER else all_rows,
        case.columns,
        dtype=torch.float16,
        fill=float("nan"),
    )
    needs = [needed(case.pattern, w, case.rows, case.inner, case.columns, 2, case.at(call)) for call in range(CALLS)]
    workspace = SharedWorkspace.of(w, max(nbytes for nbytes, _ in needs), max(signals for _, signals in needs))
    run_ranks(w, _rank, workspace, a, b, out, case)
    for call in range(CALLS):
        for rank, expected in enumerate(exact(case.pattern, a[call], b, case.bias, case.average, case.rows)):
            assert torch.allclose(
                out[call, rank].double(), expected, rtol=2e-2, atol=max(5e-2, 1e-3 * float(expected.abs().max()))
            ), (call, rank)


def test_partial_sums_are_rounded_once() -> None:
    """The sum 2048 + 1 + 1 must be 2050. With a rounding to fp16 after each addition, both ones would be lost."""
    out = shared(3, 8, 8, dtype=torch.float16)
    workspace = SharedWorkspace.of(3, 3 * 8 * 8 * 2, 1)
    run_ranks(3, _round_once, workspace, out)
    assert torch.equal(out, torch.full_like(out, 2050.0))


def _round_once(rank: int, workspace: SharedWorkspace, out: torch.Tensor) -> None:
    a = torch.eye(24, 8).half()
    a[:] = 0
    a[:, 0] = 2048.0 if rank == 0 else 1.0
    b = torch.zeros(8, 8).half()
    b[0] = 1
    out[rank] = reduce_launch.matmul_reduce_scatter(a, VendorMatmul(b), workspace.launch(rank), SMALL)


@pytest.mark.parametrize(
    ("pattern", "what", "peer"), [(GATHER, "rows", 1), (SCATTER, "partial sums", 2), (REDUCE, "partial sums", 2)]
)
def test_a_peer_that_never_comes(pattern: str, what: str, peer: int) -> None:
    """The call ends. The next call raises an error that names the group and the peer, and runs nothing."""
    launch = SharedWorkspace.of(3, 20_000, 8).launch(0, patience_ns=20_000)
    a, b = torch.zeros(48, 32).half(), torch.zeros(16, 32).half().t()

    def call() -> None:
        if pattern == GATHER:
            gather_launch.all_gather_matmul(a, [VendorMatmul(b)], launch, SMALL)
        else:
            getattr(reduce_launch, pattern)(a, VendorMatmul(b), launch, SMALL)

    call()
    with pytest.raises(
        TransferError,
        match=f"site_7 of group 'tp' timed out waiting for {what} from rank {peer}: expected call 1, saw call 0",
    ):
        call()
    assert launch.slot.calls.tolist() == [1]


class _Side:
    """A fake side stream. ``inside`` is True while it is the current stream."""

    inside = False

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *_: object) -> None:
        self.inside = False

    def join(self) -> None:
        pass


@pytest.mark.parametrize(("pattern", "before"), [(GATHER, 0), (SCATTER, 1), (REDUCE, 1)])
def test_credits_are_awaited_on_the_stream_of_the_matmuls(
    monkeypatch: pytest.MonkeyPatch, pattern: str, before: int
) -> None:
    """A call waits once for its peers' credits, before its first transfer. It waits on the matmuls' stream, so the wait
    has ended before the next matmul begins. On another stream, the waiting kernel would run beside a matmul, and could
    hold an SM that the matmul needs."""
    launch, side, events = SharedWorkspace.of(2, 20_000, 8).launch(0, patience_ns=20_000), _Side(), []
    a, b = torch.zeros(48, 32).half(), torch.zeros(16, 32).half().t()
    plain = CopyEngine()

    class Matmul(VendorMatmul):
        def __call__(self, *arguments: object) -> None:
            events.append("matmul")
            super().__call__(*arguments)  # type: ignore[arg-type]

    class Transport:
        def prepare(self, *arguments: object, **keywords: object) -> object:
            send = plain.prepare(*arguments, **keywords)  # type: ignore[arg-type]
            return lambda source: (
                events.append("send" if side.inside else "send on the stream of the matmuls"),
                send(source),
            )

    module = gather_launch if pattern == GATHER else reduce_launch
    monkeypatch.setattr(module, "side_stream", lambda device: side)
    monkeypatch.setattr(module, "transport_named", lambda protocol, name: Transport())
    monkeypatch.setattr(
        module,
        "credit_kernel",
        lambda launch: lambda: events.append("beside the matmuls" if side.inside else "credit"),
    )
    matmul = Matmul(b)
    getattr(module, pattern)(a, [matmul] if pattern == GATHER else matmul, launch, SMALL)
    assert events[: before + 2] == [*["matmul"] * before, "credit", "send"] and events.count("credit") == 1, events


def test_the_gathered_tensor_is_copied_during_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last matmul must hide the copy. So the copy starts after the wait for the last rows, and before the last
    matmul."""
    launch, side, events = SharedWorkspace.of(2, 20_000, 8).launch(0, patience_ns=20_000), _Side(), []
    plain_hand_out, plain_wait = gather_launch._hand_out, gather_launch.wait_kernel

    class Matmul(VendorMatmul):
        def __call__(self, *arguments: object) -> None:
            events.append("matmul")
            super().__call__(*arguments)  # type: ignore[arg-type]

    def hand_out(*arguments: object) -> None:
        events.append("hand out" if side.inside else "hand out on the stream of the matmuls")
        plain_hand_out(*arguments)  # type: ignore[arg-type]

    def wait_kernel(*arguments: object) -> object:
        wait = plain_wait(*arguments)  # type: ignore[arg-type]
        return lambda: (events.append("wait"), wait())

    monkeypatch.setattr(gather_launch, "side_stream", lambda device: side)
    monkeypatch.setattr(gather_launch, "_hand_out", hand_out)
    monkeypatch.setattr(gather_launch, "wait_kernel", wait_kernel)
    gather_launch.all_gather_matmul(
        torch.zeros(48, 32).half(),
        [Matmul(torch.zeros(16, 32).half().t())],
        launch,
        replace(SMALL, chunks=3),
        gathered_used=True,
    )
    assert events == ["matmul", *["wait", "matmul"] * 2, "wait", "hand out", "matmul"], events


@pytest.mark.parametrize(
    ("queues", "what"), [("", "the rank that it sends to next to get rows from rank 2"), ("2", "rows from rank 1")]
)
def test_a_turn_that_never_comes(monkeypatch: pytest.MonkeyPatch, queues: str, what: str) -> None:
    """Rank 0 sends to rank 1 only after rank 1 has the rows of rank 2. Here rank 2 sends nothing, so rank 0's wait for
    its turn times out. With too few hardware queues, there are no turns, and the wait for rows of rank 1 times out."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    monkeypatch.setattr(symmetric, "hardware_queues", symmetric.hardware_queues.__wrapped__)
    workspace = SharedWorkspace.of(3, 20_000, 8)
    launch = workspace.launch(0, patience_ns=20_000)
    gather_launch.all_gather_matmul(
        torch.ones(16, 32).half(), [VendorMatmul(torch.ones(32, 16).half())], launch, replace(SMALL, turns_from=0)
    )
    with pytest.raises(TransferError, match=f"timed out waiting for {what}: expected call 1, saw call 0"):
        launch.faults.check()


@pytest.mark.parametrize("transport", ["sm_push", "copy_engine"])
def test_finished_rows_are_not_signalled_if_a_peer_never_comes(transport: str) -> None:
    """An all-reduce whose peers never come must not signal finished rows. A second call may be queued before the host
    sees the timeout. The second call must not signal finished rows either, because a peer may wait for this signal."""
    workspace = SharedWorkspace.of(3, 20_000, 8)
    launch, p = workspace.launch(0, patience_ns=20_000), replace(SMALL, transport=transport, chunks=2, bands=3)
    a, matmul, out = torch.ones(72, 32).half(), VendorMatmul(torch.ones(32, 16).half()), torch.empty(72, 16).half()
    first = result_signals(3, p)
    for call in range(2):
        reduce_launch._reduce_into("matmul_all_reduce", a, matmul, launch, p, False, out, out)
        for peer in (1, 2):
            signals = workspace.flags[peer, 3 * FLAG_WORDS :: FLAG_WORDS].view(3, 8)[0]
            assert (
                (call == 1 or (signals[:first] == 1).any())
                and (signals[:first] <= 1).all()
                and (signals[first:] <= 0).all()
            ), signals


@pytest.mark.parametrize("transport", ["sm_push", "copy_engine"])
def test_no_rows_are_signalled_before_the_peer_has_read(transport: str) -> None:
    """A second call waits for the credit of a peer that has not ended its first call, and times out. ``sm_push`` must
    not write the rows. A copy engine still copies them, but sets the flag to a number for which no rank waits."""
    workspace = SharedWorkspace.of(2, 20_000, 4)
    launch = workspace.launch(0, patience_ns=20_000)
    launch.slot.calls.fill_(1)
    workspace.data.fill_(0)
    gather_launch.all_gather_matmul(
        torch.ones(16, 32).half(),
        [VendorMatmul(torch.ones(32, 16).half())],
        launch,
        replace(SMALL, transport=transport),
    )
    assert (workspace.flags[1, 2 * FLAG_WORDS :] <= 0).all() and (
        transport == "copy_engine" or not workspace.data[1].any()
    )
    with pytest.raises(
        TransferError,
        match="timed out waiting for permission to write into the workspace of rank 1: expected call 1, saw call 0",
    ):
        launch.faults.check()


def test_a_matmul_that_fails_aborts_the_group() -> None:
    """If a matmul fails, its rank does not finish the call, and peers may wait for this rank. So the group is
    aborted."""
    launch = SharedWorkspace.of(2, 20_000, 4).launch(0, patience_ns=20_000)
    with pytest.raises(RuntimeError):
        gather_launch.all_gather_matmul(
            torch.ones(16, 32).half(), [VendorMatmul(torch.ones(32, 16).half(), torch.ones(3).half())], launch, SMALL
        )
    assert launch.faults.told and launch.slot.calls.tolist() == [0]
    with pytest.raises(TransferError, match="was aborted"):
        gather_launch.all_gather_matmul(
            torch.ones(16, 32).half(), [VendorMatmul(torch.ones(32, 16).half())], launch, SMALL
        )


def test_unsupported_operands_are_refused() -> None:
    launch = SharedWorkspace.of(2, 4096, 2).launch(0)
    a, b = torch.zeros(32, 32).half(), torch.zeros(32, 16).half()
    with pytest.raises(UnsupportedError, match="fp16 or bf16"):
        gather_launch.all_gather_matmul(a.float(), [VendorMatmul(b.float())], launch, SMALL)
    with pytest.raises(UnsupportedError, match=r"right operand is torch.float16\[16, 16\]; expected 32 rows of"):
        reduce_launch.matmul_reduce_scatter(a, VendorMatmul(b[:16]), launch, SMALL)
    with pytest.raises(UnsupportedError, match="of 32 and of 12 elements"):
        gather_launch.all_gather_matmul(a, [VendorMatmul(b[:, :12])], launch, SMALL)
    with pytest.raises(UnsupportedError, match="expected it contiguous and aligned to 16 bytes"):
        gather_launch.all_gather_matmul(a.t(), [VendorMatmul(b)], launch, SMALL)
    with pytest.raises(
        UnsupportedError, match="needs 8192 bytes and 1 signals with protocol credits; its slot has 4096"
    ):
        gather_launch.all_gather_matmul(torch.zeros(64, 32).half(), [VendorMatmul(b)], launch, SMALL)
    for other, right in ((a[:16], b), (a.float(), b.float()), (a[:, :16], b), (a, b[:, :8])):
        with pytest.raises(UnsupportedError, match="expected products of one dtype and shape|fp16 or bf16"):
            reduce_launch.matmul_reduce_scatter(a, VendorMatmul(b, added=((other, right),)), launch, SMALL)
    with pytest.raises(UnsupportedError, match="3 rows cannot be cut"):
        reduce_launch.matmul_reduce_scatter(a[:3], VendorMatmul(b), launch, SMALL)
