# SPDX-License-Identifier: Apache-2.0
"""Compiles variants of a sequence-parallel transformer block (batch size, order of batch and sequence, biases), and
compares them with fp64."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from bench.support import dtensor_block
from bench.support.dtensor_block import Variant
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import compile_anew
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted

# {checkpointing: {phase: (sites found, sites overlapped)}}. The forward graph of a block has two gathers and two
# scatters, and so has the backward graph. With checkpointing, backward also repeats a collective if it needs the
# collective's result, and this result was not saved.
EXPECTED = {
    "none": {"forward": (4, 4), "backward": (4, 4)},
    "full": {"forward": (4, 4), "backward": (7, 7)},
    "selective": {"forward": (4, 4), "backward": (6, 6)},
    "selective, matmuls only": {"forward": (4, 2), "backward": (6, 6)},
}


TORCH = tuple(int(x) for x in torch.__version__.split(".")[:2])


def expected(by_hand: bool, checkpointing: str) -> dict[str, tuple[int, int]]:
    if TORCH == (2, 11) and by_hand and checkpointing == "full":
        # torch 2.11's partitioner saves the results of autograd functions even if they are marked for recomputation.
        return {"forward": (4, 4), "backward": (4, 4)}
    return EXPECTED[checkpointing]


def variants(by_hand: bool, checkpointing: str, pairs: bool = False) -> list[Variant]:
    """Variants of the block: order of batch and sequence, batch size, biases. Without ``pairs``, there is one variant.
    With ``pairs``, four variants contain each pair of values of any two settings."""
    layouts = [(0, 1, False), (0, 2, True), (1, 1, True), (1, 2, False)]
    if not pairs:
        layouts = [(0, 1, False) if by_hand else (1, 2, True)]
    return [Variant(*rest, checkpointing, by_hand) for rest in layouts]


# The variants that run in generated code. They cover both orders of batch and sequence, with batch 2. The backward of
# the hand-written block recomputes (selective checkpointing).
GENERATED = {
    (False, "none"): [Variant(0, 2, True, "none")],
    (True, "selective"): [Variant(1, 2, False, "selective", True)],
}


def problems(
    rank: int,
    world_size: int,
    by_hand: bool,
    checkpointing: str,
    device: str = "cpu",
    generated: bool = False,
    pairs: bool = False,
) -> list[str]:
    """The problems on this rank. With ``generated``, the variants in ``GENERATED`` run as Inductor's code. Otherwise an
    interpreter runs all ``variants``."""
    import overlap_inductor
    from overlap_inductor.report import publish as reporting

    compile_anew()
    mesh = dist.init_device_mesh(device, (world_size,), mesh_dim_names=("tp",))
    found = []
    for variant in GENERATED[by_hand, checkpointing] if generated else variants(by_hand, checkpointing, pairs):
        torch._dynamo.reset()
        reporting.forget_reports()
        reports: list[OverlapReport] = []
        if generated:
            with overlap_inductor.overlap(schedule="ring", sub_chunks=2):
                error, where = dtensor_block.largest_error(mesh, variant, lambda m: torch.compile(m, fullgraph=True))
            reports = reporting.all_reports()
        else:
            backend = interpreted(OverlapConfig(schedule="ring", sub_chunks=2), reports)
            error, where = dtensor_block.largest_error(
                mesh, variant, lambda m, backend=backend: torch.compile(m, backend=backend, fullgraph=True)
            )
        if not error < 1e-5:
            found.append(f"{variant}: {where} is off by {error:.2g}")
        found += [f"{variant}: {text}" for r in reports for text in waste(r)]
        counts = {r.phase: (len(r.sites), sum(s.decision.status == "overlapped" for s in r.sites)) for r in reports}
        if counts != expected(by_hand, checkpointing):
            reasons = Counter(x.code for r in reports for s in r.sites for x in s.decision.reasons)
            found.append(f"{variant}: {counts} sites, expected {expected(by_hand, checkpointing)}; {dict(reasons)}")
    return found
