# SPDX-License-Identifier: Apache-2.0
"""Schedule ``chunked`` of layers of experts: ``auto`` overlaps layers that gained on H200s. It keeps layers that gained
nothing, or that lost on a slow or busy host (bench/results/experts.jsonl, experts_busy_host.jsonl)."""

from __future__ import annotations

import dataclasses

import pytest

from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.machine import machine_for
from overlap_inductor.lowerings.chunked import experts_cost

H200S = machine_for("cuda")
LAYERS = {"mixtral": (8, 2, 4096, 14336), "64-experts": (64, 8, 2048, 1024)}


def _sizes(layer: str, ranks: int, tokens: int) -> SiteSizes:
    """Sizes of a dispatched layer in bf16, with even loads."""
    experts, chosen, hidden, inner = LAYERS[layer]
    rows, matrices = tokens * chosen / ranks, 3 * hidden * inner
    return SiteSizes(
        2 * rows * matrices,
        rows * (ranks - 1) / ranks * hidden * 2,
        2,
        ranks,
        legs=2,
        exchanges=True,
        weights=experts / ranks * matrices * 2,
    )


@pytest.mark.parametrize(
    ("layer", "ranks", "overlapped"),
    [
        ("mixtral", 2, [False, True, True, True]),
        ("mixtral", 4, [False, False, True, True]),
        ("64-experts", 2, [False, False, True, True]),
        ("64-experts", 4, [False, False, False, True]),
    ],
)
def test_auto_overlaps_the_layers_that_gained(layer: str, ranks: int, overlapped: list[bool]) -> None:
    found = []
    for tokens in (4096, 8192, 16384, 32768):
        reordered = tokens * LAYERS[layer][1] / ranks * LAYERS[layer][2] * 2 * 2
        found.append(experts_cost.pays(_sizes(layer, ranks, tokens), H200S, 0, reordered))
    assert found == overlapped


def test_copies_that_a_call_saves_count_at_inference_only() -> None:
    sizes = _sizes("mixtral", 2, 8192)
    assert experts_cost.pays(sizes, H200S, 0, 2e8) and not experts_cost.pays(sizes, H200S, 0, 0)
    assert experts_cost.pays(sizes, H200S, 1, 2e10) is experts_cost.pays(sizes, H200S, 1, 0) is False


def test_more_ranks_than_measured_need_a_larger_gain() -> None:
    sizes = _sizes("64-experts", 2, 16384)
    more = dataclasses.replace(sizes, world_size=experts_cost.RANKS + 1)
    assert experts_cost.pays(sizes, H200S, 0) and not experts_cost.pays(more, H200S, 0)


def test_copied_values_cost_time() -> None:
    sizes = _sizes("64-experts", 2, 32768)
    assert experts_cost.pays(sizes, H200S, 0) and not experts_cost.pays(sizes, H200S, 2e9)
    small_gain = _sizes("mixtral", 2, 32768)
    assert experts_cost.pays(small_gain, H200S, 0) and not experts_cost.pays(small_gain, H200S, 1)
    assert experts_cost.seconds(sizes, H200S, 2e9) > experts_cost.seconds(sizes, H200S, 0)
