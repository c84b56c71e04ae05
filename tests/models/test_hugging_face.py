"""Hugging Face models, sharded by their own plan and not changed: every site is found, and logits and gradients are
those of fp64."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.graph_text import waste
from tests.models import hugging_face
from tests.models.hugging_face import LAYERS
from tests.numerics.interpreted import interpreted
from tests.numerics.ranks import compile_anew
from tests.numerics.ranks import run_ranks

REDUCE, HEAD = "matmul_all_reduce", "matmul_all_gather"
# Sites that must be found and overlapped. Forward: o_proj and down_proj of each layer and the head; Olmo2 gathers q, k
# and v for their norms too. Backward: the gradients of what q, k and v, of what gate and up read, and the head's; those
# that autograd adds to nothing but each other are one site. The embedding's all-reduce has no matmul.
FORWARD: dict[str, dict[str, int]] = {
    "llama": {REDUCE: 2 * LAYERS, HEAD: 1},
    "starcoder2": {REDUCE: 2 * LAYERS, HEAD: 1},
    "cohere": {REDUCE: 2 * LAYERS, HEAD: 1},
    "olmo2": {REDUCE: 2 * LAYERS, HEAD: 1 + 3 * LAYERS},
    "llama, odd vocabulary": {REDUCE: 2 * LAYERS, HEAD: 1},
    "llama, odd vocabulary and ffn": {REDUCE: 2 * LAYERS, HEAD: 1},
}
BACKWARD: dict[str, dict[str, int]] = {
    "llama": {REDUCE: 2 * LAYERS + 1},
    "olmo2": {REDUCE: 5 * LAYERS + 1, HEAD: LAYERS},
    "llama, odd vocabulary": {REDUCE: 2 * LAYERS + 1},
    "llama, odd vocabulary and ffn": {REDUCE: 2 * LAYERS + 1},
}


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert found.shape == exact.shape
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


def problems(
    rank: int, world_size: int, family: str, folder: str, trains: bool, generated: bool, device: str = "cpu"
) -> list[str]:
    """What is wrong on this rank; ``generated`` runs Inductor's code, else the rewritten graphs are interpreted."""
    import overlap_inductor
    from overlap_inductor.report import publish as reporting

    model = hugging_face.load(family, folder, device)
    reference = hugging_face.whole(family, folder, device)
    ids = hugging_face.ids(device)
    compile_anew()
    reports: list[OverlapReport] = []
    reporting.forget_reports()
    torch._dynamo.utils.counters.clear()
    if generated:
        with overlap_inductor.overlap(schedule="ring"):
            errors = _run(torch.compile(model, fullgraph=True), model, reference, ids, trains)
        reports = reporting.all_reports()
    else:
        backend = interpreted(OverlapConfig(schedule="ring"), reports)
        errors = _run(torch.compile(model, backend=backend, fullgraph=True), model, reference, ids, trains)

    found = [f"{name} is off by {error:.2g}" for name, error in errors.items() if not error < 1e-5]
    expected = {"forward": FORWARD[family], "backward": BACKWARD[family]} if trains else {"inference": FORWARD[family]}
    for status in ("overlapped", "found"):
        counts = {
            r.phase: dict(Counter(s.facts.pattern for s in r.sites if status in ("found", s.decision.status)))
            for r in reports
        }
        if counts != expected:
            found.append(f"sites {status}: {counts}, expected {expected}")
    found += [text for r in reports for text in waste(r)]
    breaks = torch._dynamo.utils.counters["graph_break"]
    return found + [f"graph breaks: {dict(breaks)}"] * bool(breaks)


def _run(compiled: Any, model: Any, reference: Any, ids: torch.Tensor, trains: bool) -> dict[str, float]:
    """Relative errors of the logits and, where ``trains``, of every parameter's gradient."""
    with torch.set_grad_enabled(trains):
        labels = ids if trains else None
        out, exact = compiled(ids, labels=labels), reference(ids, labels=labels)
    errors = {"logits": _error(out.logits, exact.logits)}
    if not trains:
        return errors
    out.loss.backward()
    exact.loss.backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        errors[f"gradient of {name}"] = _error(grad, q.grad)
    return errors


@pytest.mark.parametrize(
    ("family", "trains", "generated"),
    [("llama", True, True), ("starcoder2", False, True), ("cohere", False, False), ("olmo2", True, False)],
    ids=["llama, trained, generated code", "starcoder2, generated code", "cohere", "olmo2, trained"],
)
def test_family(family: str, trains: bool, generated: bool, tmp_path: Path) -> None:
    """A plan's spelling that is no longer seen through, a site counted twice, a wrong slice of logits or gradients."""
    for rank, found in enumerate(run_ranks(2, problems, family, str(tmp_path), trains, generated, timeout=500)):
        assert not found, f"rank {rank}: {found}"


@pytest.mark.parametrize(
    ("family", "world_size", "generated"),
    [("llama, odd vocabulary", 2, True), ("llama, odd vocabulary and ffn", 3, False)],
    ids=["vocabulary of 101 on 2 ranks, generated code", "vocabulary of 101 and ffn of 50 on 3 ranks"],
)
def test_sizes_that_the_group_does_not_divide(family: str, world_size: int, generated: bool, tmp_path: Path) -> None:
    """Ranks whose shards differ: a head that pads its columns, weights of other widths."""
    for rank, found in enumerate(run_ranks(world_size, problems, family, str(tmp_path), True, generated, timeout=500)):
        assert not found, f"rank {rank}: {found}"
