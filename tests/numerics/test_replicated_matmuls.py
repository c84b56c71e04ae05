# SPDX-License-Identifier: Apache-2.0
"""Narrow matmuls on rows, with real ranks: equal values, and weights that differ between ranks although they look
whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import overlap_inductor
from tests.support.differing_ranks import ring
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.heard import Heard
from tests.support.latent_projections import HIDDEN
from tests.support.latent_projections import sharded

LIMIT = 1e-5


def _run(
    rank: int, world_size: int, differ: bool, mode: str = "default", settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    compile_anew(kernels=False)
    heard = Heard()
    rows = []
    for tokens in (12, 13):
        model = sharded(seed=0, bias=True)
        if differ:
            with torch.no_grad():
                model.down[1].weight += rank
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
        with torch.no_grad(), ring(sequence_parallel="on"), torch._inductor.config.patch(settings or {}):
            expected = model(x)
            found = torch.compile(model, dynamic=False, mode=mode)(x)
        rows.append(float((found - expected).abs().max() / expected.abs().max()))
    report = overlap_inductor.last_report()
    assert report is not None
    sites = [s.decision.status for s in report.sites]
    return {"off": max(rows), "sites": sites, "texts": report.notices + heard.texts}


def test_values_are_equal() -> None:
    for world_size in (2, 3):
        for row in run_ranks(world_size, _run, False):
            assert row["off"] < LIMIT and not row["texts"], row
            assert row["sites"].count("overlapped") == 3, row


def test_ranks_with_different_weights_run_the_plain_program() -> None:
    for row in run_ranks(2, _run, True):
        assert row["off"] < LIMIT and any("run" in text for text in row["texts"]), row


SIMPLE = "enable_simple_overlap"
DISTRIBUTED = getattr(torch._inductor.config, "aten_distributed_optimizations", None)


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("reduce-overhead", {}),
        pytest.param(
            "default",
            {f"aten_distributed_optimizations.{SIMPLE}": True},
            marks=pytest.mark.skipif(not hasattr(DISTRIBUTED, SIMPLE), reason="torch before 2.14 has no such setting"),
        ),
    ],
    ids=["reduce-overhead", "simple overlap"],
)
def test_a_rewritten_graph_with_other_settings_of_inductor(mode: str, settings: dict[str, Any]) -> None:
    for row in run_ranks(2, _run, False, mode, settings):
        assert row["off"] < LIMIT and not row["texts"] and row["sites"].count("overlapped") == 3, row
