# SPDX-License-Identifier: Apache-2.0
"""Inputs of ``bench.support.experts.Experts``, with several loads of the experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.support.experts import SMALL

Loads = Callable[[int, torch.Generator], torch.Tensor]

LOADS: dict[str, Loads] = {
    "random": lambda tokens, made: torch.randint(0, SMALL.experts, (tokens, SMALL.chosen), generator=made),
    "an empty expert on each rank": lambda tokens, made: (
        2 * torch.randint(0, SMALL.experts // 2, (tokens, SMALL.chosen), generator=made)
    ),
    "all tokens on one expert": lambda tokens, made: torch.full((tokens, SMALL.chosen), SMALL.experts - 1),
    "all tokens on the first rank": lambda tokens, made: torch.randint(0, 2, (tokens, SMALL.chosen), generator=made),
    "uneven": lambda tokens, made: torch.stack([torch.zeros(tokens).long(), torch.arange(tokens) % SMALL.experts], 1),
}
"""The experts' ids of each token."""


def inputs(tokens: int, loads: str = "random") -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, SMALL.hidden, generator=made).bfloat16()
    return x, LOADS[loads](tokens, made), torch.rand(tokens, SMALL.chosen, generator=made).bfloat16()
