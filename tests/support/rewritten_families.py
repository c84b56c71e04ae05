# SPDX-License-Identifier: Apache-2.0
"""Compiles sharded Hugging Face models whose all-reduces the sequence-parallel rewrite replaces. The results are
compared with those of the same models, unsharded and in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report import publish as reporting
from overlap_inductor.report.report import OverlapReport
from tests.support import hugging_face
from tests.support import hugging_face_problems
from tests.support import with_and_without
from tests.support.gloo_ranks import compile_anew
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted

LIMIT = 1e-5
"""The largest allowed error of logits and gradients, relative to the largest element of the exact tensor."""


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        family: a key of ``hugging_face.FAMILIES``.
        all_reduces: the number of all-reduces in the graphs as written. All must be rewritten.
        overlapped: the number of sites that must be overlapped.
        shape: batch and tokens.
        trains: compare gradients, too.
        generated: run Inductor's code, without C++ kernels. Otherwise an interpreter runs the rewritten graphs.
    """

    family: str
    all_reduces: int
    overlapped: int
    shape: tuple[int, int] = (1, 12)
    trains: bool = True
    generated: bool = False


def problems(rank: int, world_size: int, cases: Mapping[str, Case], folder: str) -> list[str]:
    """The problems of all ``cases`` on this rank."""
    return [f"{name}: {text}" for name, case in cases.items() for text in _problems(case, folder)]


def _problems(case: Case, folder: str) -> list[str]:
    model = hugging_face.load(case.family, folder, "cpu")
    reference = hugging_face.whole(case.family, folder, "cpu")
    ids = torch.randint(0, hugging_face.VOCABULARY, case.shape, generator=torch.Generator().manual_seed(1))
    compile_anew(kernels=False)
    torch._dynamo.reset()
    reporting.forget_reports()
    torch._dynamo.utils.counters.clear()
    reports: list[OverlapReport] = []
    fields: dict[str, Any] = {"schedule": "ring", "sequence_parallel": "on", "sub_chunks": 2}
    if case.generated:
        with overlap_inductor.overlap(**fields):
            called = torch.compile(model, fullgraph=True)
            errors = hugging_face_problems.errors(called, model, reference, ids, case.trains)
        reports = reporting.all_reports()
    else:
        called = torch.compile(model, backend=interpreted(OverlapConfig(**fields), reports), fullgraph=True)
        errors = hugging_face_problems.errors(called, model, reference, ids, case.trains)
    found = [f"{name} is off by {error:.2g}" for name, error in errors.items() if not error < LIMIT]
    counts = with_and_without.all_reduces(reports)
    overlapped = sum(s.decision.status == "overlapped" for r in reports for s in r.sites)
    if (counts["all_reduces"], counts["rewritten"], overlapped) != (
        case.all_reduces,
        case.all_reduces,
        case.overlapped,
    ):
        found.append(f"expected {case}, found {counts} and {overlapped} overlapped sites")
    return found + [text for r in reports for text in (*waste(r), *r.notices)]
