# SPDX-License-Identifier: Apache-2.0
"""Gathers of a matmul's result in schedule ``chunked``, on processes that share memory, with the kernels in Triton's
interpreter.

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
from overlap_inductor.lowerings.chunked import output_launch
from overlap_inductor.lowerings.chunked import output_sizes
from overlap_inductor.lowerings.chunked.output_launch import PATTERN
from overlap_inductor.lowerings.chunked.output_launch import matmul_all_gather
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.chunked.parameters import fitted_bands
from overlap_inductor.lowerings.chunked.parameters import fitted_output
from overlap_inductor.lowerings.chunked.parameters import needed
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.runtime.arena import CREDITS
from overlap_inductor.runtime.arena import READS
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.transports.transport import Reads
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import at_rest
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared

CALLS, K, N = 3, 16, 24
SMALL = ChunkedParameters(1, "copy_engine", grain=8, pushers=2)
READING = ChunkedParameters(1, "auto", grain=8, reads=True)


@dataclass(frozen=True)
class Case:
    """``CALLS`` calls in one part (slot) of the workspace. Calls with an odd number put the ranks' slices side by side,
    if ``turns``; so both layouts share a slot."""

    world_size: int
    rows: int
    parameters: ChunkedParameters
    side_by_side: bool = False
    turns: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    def beside(self, call: int) -> bool:
        return self.side_by_side ^ (self.turns and call % 2 == 1)


CASES = {
    "one band": Case(2, 16, SMALL),
    "rows that the ranks do not divide, bands of unequal rows": Case(3, 20, replace(SMALL, bands=2), bias=True),
    "side by side, three bands, in turns": Case(4, 24, replace(SMALL, bands=3, turns_from=0), side_by_side=True),
    "both layouts, bands chosen, pushed, fp16": Case(
        3, 40, replace(SMALL, bands=0, transport="sm_push"), turns=True, bias=True, dtype=torch.float16
    ),
    "read, one band": Case(2, 16, READING),
    "read, side by side, three bands": Case(4, 24, replace(READING, bands=3), side_by_side=True),
    "read, both layouts, bands chosen, bias, fp16": Case(
        3, 40, replace(READING, bands=0), turns=True, bias=True, dtype=torch.float16
    ),
    "side by side, bands and transport chosen": Case(
        2, 33, replace(SMALL, bands=0, transport="auto"), side_by_side=True, bias=True
    ),
}


def _integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype).share_memory_()


def _launch(workspace: SharedWorkspace, rank: int, parameters: ChunkedParameters, patience_ns: int = 10**9) -> Launch:
    launch = workspace.launch(rank, patience_ns)
    return replace(launch, slot=replace(launch.slot, protocol=READS if parameters.reads else CREDITS))


def _rank(
    rank: int, workspace: SharedWorkspace, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, case: Case
) -> None:
    launch = _launch(workspace, rank, case.parameters)
    matmul = VendorMatmul(b[rank].t(), b[rank, :, 0].contiguous() if case.bias else None)
    for call in range(CALLS):
        found = matmul_all_gather(a[call, rank], matmul, launch, case.parameters, case.beside(call))
        launch.faults.check()
        assert at_rest(launch.slot) and launch.slot.calls.tolist() == [call + 1]
        wide = case.rows, case.world_size * N
        assert found.shape == (wide if case.beside(call) else (case.world_size * case.rows, N))
        out[call, rank] = found.view(-1)


@pytest.mark.parametrize("name", CASES)
def test_is_equal_to_the_matmul_and_the_gather(name: str) -> None:
    case = CASES[name]
    w, rows = case.world_size, case.rows
    a = _integers(CALLS, w, rows, K, dtype=case.dtype, seed=1)
    b = _integers(w, N, K, dtype=case.dtype, seed=2)
    out = shared(CALLS, w, w * rows * N, dtype=case.dtype, fill=float("nan"))
    nbytes, signals, *_ = needed(PATTERN, w, -(-rows // w), K, N, 2, case.parameters)
    workspace = SharedWorkspace.of(w, nbytes, signals)
    run_ranks(w, _rank, workspace, a, b, out, case)
    for call in range(CALLS):
        products = [x.double() @ y.double().t() + case.bias * y[:, 0].double() for x, y in zip(a[call], b, strict=True)]
        expected = torch.cat(products, dim=1 if case.beside(call) else 0).reshape(-1)
        for rank in range(w):
            assert torch.equal(out[call, rank].double(), expected), (call, rank)


@pytest.mark.parametrize("parameters", [SMALL, READING], ids=["sent", "read"])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_peer_that_never_comes(side_by_side: bool, parameters: ChunkedParameters) -> None:
    """The call ends, and its result is NaN. The next call raises an error that names the site and the peer."""
    launch = _launch(SharedWorkspace.of(3, 20_000, 8), 0, parameters, patience_ns=20_000)
    a, matmul = torch.ones(48, K).half(), VendorMatmul(torch.ones(K, N).half())
    assert matmul_all_gather(a, matmul, launch, parameters, side_by_side).isnan().all()
    with pytest.raises(TransferError, match="timed out waiting for finished rows from rank 1: expected call 1"):
        matmul_all_gather(a, matmul, launch, parameters, side_by_side)


class _Side:
    """A fake side stream. ``inside`` is True while it is the current stream."""

    inside = False

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *_: object) -> None:
        self.inside = False

    def join(self) -> None:
        return None


ORDERS = {
    "sent": (SMALL, ["matmul", "credits", "send", "matmul", "send", "wait", "wait"]),
    "read": (READING, ["credits", *["matmul", "announce", "wait beside", "read"] * 2]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_no_matmul_stands_behind_a_wait_for_a_peers_band(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Bands that are sent are waited for after the last matmul. Bands that are read are waited for beside the next
    matmul, and credits come before the first one, because peers may still read the previous product."""
    parameters, expected = ORDERS[name]
    launch, side = _launch(SharedWorkspace.of(2, 20_000, 8), 0, parameters, patience_ns=20_000), _Side()
    events: list[str] = []
    prepare, credits = output_launch._prepare, output_launch.credit_kernel

    class Matmul(VendorMatmul):
        def __call__(self, *arguments: object) -> None:
            events.append("matmul")
            super().__call__(*arguments)  # type: ignore[arg-type]

    def logged(word: str, function: Any, beside: bool) -> Any:
        def call(*given: object) -> None:
            events.append(word if side.inside == beside else f"{word} beside" if side.inside else f"{word} not beside")
            function(*given)

        return call

    def prepared(*arguments: Any) -> Any:
        call = prepare(*arguments)
        bands = []
        for band in call.bands:
            band = replace(band, wait=logged("wait", band.wait, False))
            if band.send is not None:
                band = replace(band, send=logged("send", band.send, True))
            if band.reads is not None:
                functions = logged("announce", band.reads.announce, True), logged("read", band.reads.read, True)
                band = replace(band, reads=Reads(*functions))
            bands.append(band)
        return replace(call, bands=bands)

    monkeypatch.setattr(output_launch, "side_stream", lambda device: side)
    monkeypatch.setattr(output_launch, "_prepare", prepared)
    monkeypatch.setattr(output_launch, "credit_kernel", lambda launch: logged("credits", credits(launch), False))
    matmul = Matmul(torch.ones(K, N).half())
    matmul_all_gather(torch.ones(32, K).half(), matmul, launch, replace(parameters, bands=2))
    assert events == expected


def test_unsupported_operands_are_refused() -> None:
    launch, b = SharedWorkspace.of(2, 2_000, 8).launch(0), torch.zeros(K, N).half()
    with pytest.raises(UnsupportedError, match="fp16 or bf16"):
        matmul_all_gather(torch.zeros(8, K), VendorMatmul(b.float()), launch, SMALL)
    with pytest.raises(UnsupportedError, match="rows of 16 and of 12 elements"):
        matmul_all_gather(torch.zeros(8, K).half(), VendorMatmul(b[:, :12]), launch, SMALL)
    with pytest.raises(UnsupportedError, match="the call needs 3072 bytes and 1 signals"):
        matmul_all_gather(torch.zeros(32, K).half(), VendorMatmul(b), launch, SMALL)
    with pytest.raises(UnsupportedError, match="the call needs 384 bytes and 1 signals with protocol reads"):
        matmul_all_gather(torch.zeros(8, K).half(), VendorMatmul(b), launch, READING)


def test_ranks_on_different_gpus_choose_the_same_bands() -> None:
    """A band's flag says which rows have arrived, so ranks with fewer SMs must not cut in another way."""
    few, many = ChunkedParameters(78, bands=0), ChunkedParameters(132, bands=0)
    for rows in (1000, 4096, 8192):
        assert fitted_output(4, rows, 8000, 2, few)[1] == fitted_output(4, rows, 8000, 2, many)[1]
        assert fitted_bands(4, rows, 8192, 4096, few).bands == fitted_bands(4, rows, 8192, 4096, many).bands


def test_bands_are_chosen_by_their_estimate() -> None:
    """The last band is not larger than the others. Few rows are one band, because a band has a fixed cost."""
    for rows in (1, 100, 128, 1000, 4096, 8192, 16000):
        for peers in (1, 3, 7):
            bands = output_sizes.band_rows(rows, 32000 // (peers + 1), peers, 2, 128)
            assert sum(bands) == rows and min(bands) > 0 and len(bands) <= output_sizes.MOST_BANDS
            assert all(size % 128 == 0 for size in bands[:-1]) and max(bands) == bands[0]
            alone = output_sizes.seconds((rows,), 32000 // (peers + 1), peers, 2)
            assert output_sizes.seconds(bands, 32000 // (peers + 1), peers, 2) <= alone
    assert output_sizes.band_rows(128, 8000, 3, 2, 128) == (128,)
    assert len(output_sizes.band_rows(8192, 8000, 3, 2, 128)) > 3
