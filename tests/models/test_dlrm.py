# SPDX-License-Identifier: Apache-2.0
"""An unchanged DLRM-style model, compiled on gloo ranks. Its tables are divided among the ranks."""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.dlrm import DLRM
from tests.support.dlrm import Batch
from tests.support.dlrm import batch_of
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted

PATTERN = "embedding_all_to_all"
ROWS, TABLES = 50, 3


def _model(rank: int, kind: str, joined: str = "cat") -> DLRM:
    torch.manual_seed(0)
    model = DLRM(TABLES, ROWS, 8, 6, kind, joined)
    torch.manual_seed(rank)
    for table in model.tables:
        torch.nn.init.normal_(table.weight)
    return model


def _sites(report: OverlapReport | None) -> list[tuple[str, str, int]]:
    assert report is not None
    return [(s.facts.pattern, s.decision.status, len(s.facts.matmuls)) for s in report.sites]


def _trained(model: DLRM, call: Any, batches: list[Batch]) -> list[torch.Tensor]:
    """The losses of a few steps, then the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = call(*batch.arguments()).square().mean()
        loss.backward()
        for layer in (model.bottom, model.top):
            for parameter in layer.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def _training(rank: int, world_size: int, kind: str, joined: str) -> list[str]:
    """Train the compiled model and the eager model. Returns the problems on this rank. With two ranks, Inductor's code
    runs. With more, the rewritten graphs are interpreted."""
    compile_anew(kernels=False)
    model = _model(rank, kind, joined)
    eager = _model(rank, kind, joined)
    generator = torch.Generator().manual_seed(rank)
    # The lengths of the bags change, so the second step compiles the graph for any number of indices.
    batches = [batch_of(model, 4, 3, generator) for _ in range(3)]
    reports: list[OverlapReport] = []
    generated, fields = world_size == 2, {"schedule": "ring", "sub_chunks": 2}
    options: dict[str, Any] = {} if generated else {"backend": interpreted(OverlapConfig(**fields), reports)}
    with overlap_inductor.overlap(**fields) if generated else contextlib.nullcontext():
        found = _trained(model, torch.compile(model, fullgraph=True, **options), batches)
        sites = [_sites(overlap_inductor.last_report() if generated else reports[-1])]
        with torch.no_grad():
            torch.compile(model.eval(), fullgraph=True, **options)(*batches[0].arguments())
        sites.append(_sites(overlap_inductor.last_report() if generated else reports[-1]))
    problems = [] if sites == [[(PATTERN, "overlapped", TABLES)]] * 2 else [f"sites {sites}"]
    expected = _trained(eager, eager, batches)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
            problems.append(f"result {i} differs by {(one - other).abs().max()}")
    return problems


@pytest.mark.parametrize(
    ("world_size", "kind", "joined"),
    [
        (2, "mean", "tables first"),
        (4, "sum", "stack"),
        # (Thorough only, because ``tests/numerics/test_embeddings.py`` interprets the graphs of smaller models.)
        pytest.param(3, "sum", "stack", marks=pytest.mark.thorough),
        pytest.param(2, "sum", "cat", marks=pytest.mark.thorough),
        pytest.param(2, "embedding", "stack", marks=pytest.mark.thorough),
    ],
)
def test_training(world_size: int, kind: str, joined: str) -> None:
    """The last training graph (a backward) and the inference graph have one site each. The losses of three steps and
    the parameters after them agree with eager mode."""
    for rank, problems in enumerate(run_ranks(world_size, _training, kind, joined, timeout=400)):
        assert not problems, f"rank {rank}: {problems}"


def _out_of_range(rank: int, world_size: int, kind: str, index: int) -> list[str]:
    """Call the model with an index that is out of range, by ``keep`` and by ``ring``. Returns this rank's two errors.
    If a schedule then gives wrong results for a valid batch, the list also has a text that says so."""
    compile_anew()
    torch.set_grad_enabled(False)
    model = _model(rank, kind)
    batch = batch_of(model, 4, 3, torch.Generator().manual_seed(rank), square=True)
    wrong = copy.deepcopy(batch)
    wrong.indices[-1].view(-1)[-1] = index
    errors = []
    for schedule in ("keep", "ring"):
        torch._dynamo.reset()
        with overlap_inductor.overlap(schedule=schedule):
            call = torch.compile(model, dynamic=False)
            first = call(*batch.arguments())
            try:
                call(*wrong.arguments())
                errors.append("none")
            except (RuntimeError, IndexError) as error:
                errors.append(f"{type(error).__name__}: {error}".split("\n")[0])
            dist.barrier()
            again = call(*batch.arguments())
            if not (torch.equal(first, again) and torch.allclose(first, model(*batch.arguments()), atol=1e-5)):
                errors.append(f"{schedule}: wrong results after the error")
    return errors


@pytest.mark.parametrize(
    ("kind", "index"),
    [("mean", -1), *(pytest.param(kind, ROWS, marks=pytest.mark.thorough) for kind in ("embedding", "sum"))],
)
def test_an_index_out_of_range_is_the_same_error(kind: str, index: int) -> None:
    for plain, overlapped, *others in run_ranks(2, _out_of_range, kind, index, timeout=300):
        assert others == [] and plain != "none"
        assert _without_names(plain) == _without_names(overlapped)


def _without_names(text: str) -> str:
    """``text`` without names of compiled files and numbers of their variables. Inductor's check of an index writes both
    into its error."""
    return re.sub(r"\S+\.cpp:\d+|\btmp\d+", "...", text)
