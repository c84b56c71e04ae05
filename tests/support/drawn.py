# SPDX-License-Identifier: Apache-2.0
"""``drawn``: hypothesis draws the same examples on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from hypothesis import HealthCheck
from hypothesis import Phase
from hypothesis import given
from hypothesis import seed
from hypothesis import settings
from hypothesis import strategies as st


def drawn(examples: int, **strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """A decorator: the function runs ``examples`` times, each time with one value of every strategy.

    The number of ranks is the seed, so all ranks of a group draw the same examples. The function must not raise,
    because a rank that fails would draw further examples alone.
    """

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        run = settings(
            max_examples=examples,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(given(**strategies)(check))
        return seed(dist.get_world_size())(run)

    return decorate
