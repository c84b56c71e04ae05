# SPDX-License-Identifier: Apache-2.0
"""Compiles small DLRMs with schedule ``fused``. The rewritten graphs run on two processes, with the
lookup kernel in Triton's interpreter. Two models run forward and backward, one model runs forward only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.lowerings.fused import table_ops
from overlap_inductor.report.report import OverlapReport
from tests.support.dlrm import DLRM
from tests.support.dlrm import batch_of
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted
from tests.support.shared_memory import use_shared_memory

PATTERN = "embedding_all_to_all"
CASES = (("mean", "cat", True, False), ("sum", "tables first", True, True), ("embedding", "stack", False, False))


def _results(model: DLRM, call: Any, arguments: tuple[object, ...], trained: bool) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.set_grad_enabled(trained):
        out = call(*arguments)
    if trained:
        out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _check(rank: int, world_size: int, folder: str) -> list[str]:
    """Run the cases. Returns the problems on this rank. In a case's last call, the op has no workspace and runs the
    program's own lookups and exchange."""
    use_shared_memory(folder)
    problems, ready = [], table_ops._ready
    for kind, joined, trained, weighted in CASES:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = DLRM(2, 7, 4, 3, kind, joined)
        torch.manual_seed(rank)
        for table in model.tables:
            torch.nn.init.normal_(table.weight)
        reports: list[OverlapReport] = []
        config = OverlapConfig(schedule="fused", patterns=(PATTERN,))
        compiled = torch.compile(model, backend=interpreted(config, reports), dynamic=False, fullgraph=True)
        batch = batch_of(model, 3, 2, torch.Generator().manual_seed(rank), square=True, weighted=weighted)
        expected = _results(model, model, batch.arguments(), trained)
        for use in (ready, lambda *_: None):
            table_ops._ready = use
            found = _results(model, compiled, batch.arguments(), trained)
            for i, (one, other) in enumerate(zip(expected, found, strict=True)):
                if not torch.allclose(one, other, rtol=1e-4, atol=1e-4):
                    problems.append(f"{kind} {joined}, result {i} off by {(one - other).abs().max()}")
        table_ops._ready = ready
        forward = [p.schedule for s in reports[0].sites for p in s.decision.plan]
        if forward != ["fused"] or any(r.notices for r in reports):
            problems.append(f"{kind} {joined}: {forward} {[r.notices for r in reports]}")
    return problems


def test_models_that_train_and_infer(tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _check, str(tmp_path), timeout=400)):
        assert not problems, f"rank {rank}: {problems}"
