# SPDX-License-Identifier: Apache-2.0
"""Compiles a Hugging Face model that is sharded by its own plan, and compares it with the whole model in fp64."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support import hugging_face
from tests.support.gloo_ranks import compile_anew
from tests.support.graph_text import waste
from tests.support.hugging_face import LAYERS
from tests.support.interpreted import interpreted

REDUCE, HEAD = "matmul_all_reduce", "matmul_all_gather"
# The numbers of sites that must be found and overlapped, by pattern. In the forward, o_proj and down_proj of each layer
# are sites, and so is the head. Olmo2 also gathers q and k (for their norms) and v. In llama's backward, the gradients
# of two inputs of each layer are all-reduced: the input of q, k and v, and the input of gate and up. The gradient of
# the head's input is all-reduced, too. Olmo2 has more sites. All-reduces whose results are only added to each other
# are one site. The embedding's all-reduce has no matmul.
FORWARD: dict[str, dict[str, int]] = {
    "llama": {REDUCE: 2 * LAYERS, HEAD: 1},
    "starcoder2, one layer": {REDUCE: 2, HEAD: 1},
    "cohere, one layer": {REDUCE: 2, HEAD: 1},
    "olmo2, one layer": {REDUCE: 2, HEAD: 1 + 3},
    "llama, odd vocabulary": {REDUCE: 2, HEAD: 1},
    "llama, odd vocabulary, ffn of 50": {REDUCE: 2, HEAD: 1},
}
BACKWARD: dict[str, dict[str, int]] = {
    "llama": {REDUCE: 2 * LAYERS + 1},
    "olmo2, one layer": {REDUCE: 5 + 1, HEAD: 1},
    "llama, odd vocabulary": {REDUCE: 2 + 1},
    "llama, odd vocabulary, ffn of 50": {REDUCE: 2 + 1},
}


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert found.shape == exact.shape
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


def problems(
    rank: int, world_size: int, family: str, folder: str, trains: bool, generated: bool, device: str = "cpu"
) -> list[str]:
    """The problems on this rank. With ``generated``, Inductor's code runs. Otherwise an interpreter runs the rewritten
    graphs."""
    import overlap_inductor
    from overlap_inductor.report import publish as reporting

    model = hugging_face.load(family, folder, device)
    reference = hugging_face.whole(family, folder, device)
    ids = hugging_face.ids(device)
    compile_anew(kernels=device != "cpu")
    reports: list[OverlapReport] = []
    reporting.forget_reports()
    torch._dynamo.utils.counters.clear()
    if generated:
        with overlap_inductor.overlap(schedule="ring", sub_chunks=2, sequence_parallel="off"):
            off = errors(torch.compile(model, fullgraph=True), model, reference, ids, trains)
        reports = reporting.all_reports()
    else:
        backend = interpreted(OverlapConfig(schedule="ring", sub_chunks=2, sequence_parallel="off"), reports)
        off = errors(torch.compile(model, backend=backend, fullgraph=True), model, reference, ids, trains)

    found = [f"{name} is off by {error:.2g}" for name, error in off.items() if not error < 1e-5]
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


def errors(compiled: Any, model: Any, reference: Any, ids: torch.Tensor, trains: bool) -> dict[str, float]:
    """Relative errors of the logits and, if ``trains``, of every parameter's gradient."""
    with torch.set_grad_enabled(trains):
        labels = ids if trains else None
        out, exact = compiled(ids, labels=labels), reference(ids, labels=labels)
    found = {"logits": _error(out.logits, exact.logits)}
    if not trains:
        return found
    out.loss.backward()
    exact.loss.backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[f"gradient of {name}"] = _error(grad, q.grad)
    return found
