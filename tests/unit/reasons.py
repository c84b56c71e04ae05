# SPDX-License-Identifier: Apache-2.0
"""Registers graphs for reason codes, and builds the graphs that several reason codes use."""

from __future__ import annotations

from collections.abc import Callable

import torch

from overlap_inductor.report.report import OverlapReport
from tests.support.hand_graph import HandGraph

Case = Callable[[], OverlapReport]
CASES: dict[str, tuple[str, str, Case]] = {}
WORLD_SIZES = {"world_size_one": 1}


def case(code: str, status: str, name: str = "") -> Callable[[Case], Case]:
    """Register a graph for ``code``. ``status``: the site's status, ``near_miss`` if there is no site, or ``stretch``
    with the status of a stretch, for example ``stretch kept``."""

    def register(function: Case) -> Case:
        CASES[f"{code} {name}".strip()] = (code, status, function)
        return function

    return register


def weight(made: HandGraph, k: int = 16, n: int = 8, name: str = "w") -> torch.fx.Node:
    return made.input(k, n, name=name)


def gather_site() -> HandGraph:
    made = HandGraph()
    return made.output(made.mm(made.gather(made.input(4, 16)), weight(made)))


def reduce_site(op: str = "sum") -> HandGraph:
    made = HandGraph()
    return made.output(made.reduce(made.mm(made.input(4, 16), weight(made)), op))
