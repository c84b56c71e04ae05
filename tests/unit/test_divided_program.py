# SPDX-License-Identifier: Apache-2.0
"""Ranks compare a hash of each stretch's ops and numbers. The index of a rank's GPU must not change the hash."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from overlap_inductor.passes import sequence_parallel

aten = torch.ops.aten


def program(device: torch.device, value: float = 0.0) -> str:
    """The hash of a stretch that adds a constant (``value`` on ``device``) to its rows."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(aten.full.default, ([8], value), {"device": device})
    added = graph.call_function(aten.add.Tensor, (x, made))
    stretch: Any = SimpleNamespace(reads=[x, made], rows=[added], sums=[])
    return sequence_parallel._program(stretch)


def test_each_rank_has_a_gpu_with_another_index() -> None:
    programs = [program(torch.device("cuda", index)) for index in range(4)]
    assert len(set(programs)) == 1
    assert program(torch.device("cpu")) != programs[0] != program(torch.device("cuda", 0), 1.0)
