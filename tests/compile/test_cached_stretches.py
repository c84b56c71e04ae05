# SPDX-License-Identifier: Apache-2.0
"""The sequence-parallel rewrite and torch's compile caches. On a cache hit, no pass runs. The report then equals the
report of the compile that filled the caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import overlap_inductor
from overlap_inductor.passes import overlap_pass
from overlap_inductor.passes import sequence_parallel
from overlap_inductor.report import publish as reporting
from tests.support import reduced_blocks
from tests.support.fake_group import fake_group


def test_a_hit_has_the_stretches_and_the_inputs_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    runs = []
    for module, name in ((overlap_pass, "run_overlap_pass"), (sequence_parallel, "run_sequence_parallel")):
        original = getattr(module, name)

        def counted(*args: Any, original: Any = original, **keywords: Any) -> Any:
            runs.append(original.__name__)
            return original(*args, **keywords)

        monkeypatch.setattr(module, name, counted)
    outcomes = []
    for _ in range(2):
        reporting.forget_reports()
        runs.clear()
        with (
            fake_group(2),
            # Generated code calls ATen for each op, so that no C++ kernel is built.
            inductor_config.patch(fx_graph_cache=True, fallback_by_default=True),
            functorch_config.patch(enable_autograd_cache=True),
            overlap_inductor.overlap(schedule="ring", sequence_parallel="on"),
            torch.no_grad(),
        ):
            model, x = reduced_blocks.Layers(2), reduced_blocks.input_of(reduced_blocks.TOKENS, reduced_blocks.HIDDEN)
            torch.compile(model, fullgraph=True)(x)
            outcomes.append(([r.to_json(graphs=True) for r in reporting.all_reports()], list(runs)))
    (cold, first), (warm, second) = outcomes
    assert sorted(set(first)) == ["run_overlap_pass", "run_sequence_parallel"] and second == []
    assert warm == cold
    report = json.loads(warm[0])
    assert [s["status"] for s in report["stretches"]] == ["rewritten"] and len(report["same_inputs"]) == 2
