# SPDX-License-Identifier: Apache-2.0
"""Rank 1 copies rows into rank 0's workspace without a credit, over rows that rank 0 has not read yet. Rank 0 must
return NaN.

One process acts as both ranks, in Triton's interpreter:

1. Rank 1 sends and signals its rows of one call.
2. Before rank 0 reads them, rank 1 begins its next call. Rank 1's wait ends without a credit, but its copy engine still
   copies.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from overlap_inductor.lowerings.chunked import gather_launch
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked import reduce_launch
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.fused import calls as fused
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.transports import credits
from overlap_inductor.transports.copy_engine import CopyEngine
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import Share
from tests.kernels.ranks import SharedWorkspace
from tests.support.shared_memory import SMALL_TILES

ROWS, INNER, COLUMNS = 16, 16, 16
IMPATIENT_NS = 20_000


class Sender:
    """Rank 1. In each call, it waits for its peer's credit, then sends the rows of ``transfer``."""

    def __init__(self, launch: Launch, transfer: Transfer, source: torch.Tensor) -> None:
        self.launch, self.source = launch, source
        self.send = CopyEngine().prepare(launch, transfer, range(transfer.parts), source, Share())

    def call(self, value: float) -> None:
        self.source.fill_(value)
        credits.credit_kernel(self.launch)()
        self.send(self.source)
        credits.end_kernel(self.launch)()


Read = Callable[[Launch, Sender | None], Sequence[torch.Tensor]]


def _behind(wait: Callable[..., Any], sender: Sender | None) -> Callable[..., Any]:
    """Wrap ``wait``, which returns a prepared kernel. After each run of the kernel, the sender begins its next call."""

    def made(*arguments: Any) -> Callable[[], None]:
        kernel = wait(*arguments)

        def waited() -> None:
            kernel()
            if sender is not None:
                sender.call(100.0)

        return waited

    return made


def _chunked(pattern: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Transfer, int, Read]:
    p = ChunkedParameters(1, chunks=1, transport="copy_engine", bands=1, turns_from=None)
    gathers = pattern == "all_gather_matmul"
    rows = ROWS if gathers else 2 * ROWS
    transfer = Transfer(
        ROWS, INNER if gathers else COLUMNS, chunked_plan.part_rows_of(ROWS, 2, p), scattered=not gathers
    )
    module: Any = gather_launch if gathers else reduce_launch
    wait_kernel = module.wait_kernel

    def read(launch: Launch, sender: Sender | None) -> Sequence[torch.Tensor]:
        a, matmul = torch.ones(rows, INNER).half(), VendorMatmul(torch.ones(INNER, COLUMNS).half(), None)
        with monkeypatch.context() as patched:
            patched.setattr(module, "wait_kernel", _behind(wait_kernel, sender))
            if gathers:
                return gather_launch.all_gather_matmul(a, [matmul] * 4, launch, p, gathered_used=True)
            return [reduce_launch.matmul_reduce_scatter(a, matmul, launch, p)]

    return transfer, rows if gathers else 2 * ROWS, read


def _fused(keep: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Transfer, int, Read]:
    p = FusedParameters(1, pieces=1, pushers=1, copies_from=0, **SMALL_TILES)
    prepare = CopyEngine.prepare

    def read(launch: Launch, sender: Sender | None) -> Sequence[torch.Tensor]:
        def copies(*arguments: Any) -> Callable[[torch.Tensor], None]:
            send = prepare(*arguments)

            def sent(source: torch.Tensor) -> None:
                send(source)
                # The fused kernel starts after this. It finds the flags of rank 1's first call, but the rows of the
                # next call.
                if sender is not None:
                    sender.call(100.0)

            return sent

        a, b = torch.ones(ROWS, INNER).half(), torch.ones(COLUMNS, INNER).half().t()
        with monkeypatch.context() as patched:
            patched.setattr(CopyEngine, "prepare", copies)
            outs = fused.all_gather_matmuls(a, [b], launch, p, [None], keep)
            if keep:
                outs.append(fused.gathered(a, launch).clone())
                fused.end(launch, outs)
        return outs

    return Transfer(ROWS, INNER, ROWS, scattered=False), ROWS, read


CASES = {
    "chunked gather, four results and the gathered tensor": lambda patch: _chunked("all_gather_matmul", patch),
    "chunked scatter": lambda patch: _chunked("matmul_reduce_scatter", patch),
    "fused gather": lambda patch: _fused(False, patch),
    "fused gather, gathered tensor read": lambda patch: _fused(True, patch),
}


@pytest.mark.parametrize("stopped", [False, True], ids=["patience is over", "stopped by a peer"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_results_of_rows_that_were_copied_over_without_a_credit_are_nan(
    case: Any, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, source_rows, read = case(monkeypatch)
    workspace = SharedWorkspace.of(2, 20_000, 4)
    reader, other = workspace.launch(0, 2_000_000), workspace.launch(1)
    sender = Sender(replace(other, patience_ns=IMPATIENT_NS), transfer, torch.zeros(source_rows, transfer.width).half())
    sender.call(1.0)
    if stopped:
        # A peer that gave up has already told rank 1 of it (by the word ``stop[0]``), but not yet rank 0.
        begin = sender.call
        monkeypatch.setattr(sender, "call", lambda value: (other.faults.stop.__setitem__(0, 1), begin(value)))
    results = read(reader, sender)
    rows = reader.slot.data.local[: 2 * ROWS * transfer.width * 2].view(torch.half)
    assert (rows == 100).any(), "rank 1's next rows are not where rank 0 reads"
    assert len(results) in (1, 2, 5) and all(result.isnan().all() for result in results)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_results_of_calls_with_credits_are_not_spoilt(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, source_rows, read = case(monkeypatch)
    workspace = SharedWorkspace.of(2, 20_000, 4)
    reader, sender = (
        workspace.launch(0),
        Sender(workspace.launch(1), transfer, torch.zeros(source_rows, transfer.width).half()),
    )
    for _ in range(2):
        sender.call(1.0)
        for result in read(reader, None):
            assert result.unique().tolist() in ([16.0], [1.0], [17.0])
    assert sender.launch.faults.error() is None and not workspace.stop[:, 0].any()
