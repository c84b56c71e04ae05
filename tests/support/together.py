# SPDX-License-Identifier: Apache-2.0
"""Compiles small functions together, as one graph. One compile of eight functions takes two thirds of the time of eight
compiles."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.interpreted import interpreted

TOGETHER = 20
"""``batches`` makes batches of at most this many functions."""


def batches(names: Iterable[str]) -> Iterator[list[str]]:
    """``names`` in batches of ``TOGETHER``."""
    left = list(names)
    while left:
        yield left[:TOGETHER]
        del left[:TOGETHER]


def run_together(
    functions: Sequence[Callable[..., Any]], inputs: Sequence[Sequence[torch.Tensor]], generated: bool, **fields: Any
) -> tuple[list[Any], OverlapReport]:
    """The result of each function for its inputs, with schedule ``ring``, and the report of the graph that holds all
    functions. With ``generated``, Inductor's code runs. Otherwise the rewritten graph is interpreted. ``fields`` are
    fields of ``OverlapConfig``."""
    import overlap_inductor

    torch._dynamo.reset()
    counts = [len(own) for own in inputs]

    def all_of_them(*tensors: torch.Tensor) -> list[Any]:
        results, start = [], 0
        for function, count in zip(functions, counts):
            results.append(function(*tensors[start : start + count]))
            start += count
        return results

    tensors = [tensor for own in inputs for tensor in own]
    if generated:
        with overlap_inductor.overlap(schedule="ring", **fields):
            found = torch.compile(all_of_them)(*tensors)
        report = overlap_inductor.last_report()
        assert report is not None
        return found, report
    reports: list[OverlapReport] = []
    backend = interpreted(OverlapConfig(schedule="ring", **fields), reports)
    found = torch.compile(all_of_them, backend=backend, dynamic=False)(*tensors)
    (report,) = reports
    return found, report
