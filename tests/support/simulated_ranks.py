# SPDX-License-Identifier: Apache-2.0
"""Runs a graph on all ranks of one group in one process. Each node runs on every rank before the next node runs.

A collective reads the values of all ranks. Ops that ask for the rank get the simulated rank. Sizes in the
graph may be symbols. The values of the symbols are read from the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

Results = list[list[Any]]
"""For each rank, the results of the graph."""


def run_on_ranks(graph: fx.Graph, inputs: Sequence[Sequence[torch.Tensor]]) -> Results:
    """Run ``graph`` and return its results on each rank. ``inputs``: for each rank, the values of the placeholders."""
    values: list[dict[fx.Node, Any]] = [{} for _ in inputs]
    symbols: dict[Any, int] = {}
    feeds = [iter(tensors) for tensors in inputs]
    for node in graph.nodes:
        if node.op == "placeholder":
            for own, feed in zip(values, feeds, strict=True):
                own[node] = next(feed)
            symbols.update(_symbols(node, values[0][node]))
            continue
        arguments = [_arguments(node, own, symbols) for own in values]
        if node.op == "output":
            return [list(args[0]) for args, _ in arguments]
        for own, result in zip(values, _results(node, arguments), strict=True):
            own[node] = result
    raise ValueError("the graph has no output")


def _symbols(node: fx.Node, value: Any) -> dict[Any, int]:
    """The number that each symbol stands for, read from ``value``. ``value`` is the value of the placeholder
    ``node``. Symbols are sizes of a tensor, or ``node`` itself is a symbol."""
    fake = node.meta["val"]
    if not isinstance(fake, torch.Tensor):
        return {fake.node.expr: value}
    pairs = zip(fake.shape, value.shape, strict=True)
    return {size.node.expr: int(real) for size, real in pairs if isinstance(size, torch.SymInt)}


def _arguments(node: fx.Node, own: dict[fx.Node, Any], symbols: dict[Any, int]) -> tuple[Any, Any]:
    def number(value: Any) -> Any:
        return int(value.node.expr.xreplace(symbols)) if isinstance(value, torch.SymInt) else value

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), own.__getitem__)
    return pytree.tree_map(number, (list(args), dict(kwargs)))


def _results(node: fx.Node, arguments: list[tuple[Any, Any]]) -> list[Any]:
    name = str(node.target).split(".")[1] if "." in str(node.target) else ""
    firsts = [args[0] for args, _ in arguments] if arguments[0][0] else []
    others = arguments[0][0][1:]
    if name == "all_reduce":
        return [_reduced(firsts, others[0])] * len(firsts)
    if name == "reduce_scatter_tensor":
        return list(_reduced(firsts, others[0]).chunk(len(firsts)))
    if name == "all_gather_into_tensor":
        return [torch.cat(firsts)] * len(firsts)
    if name == "all_to_all_single":
        pieces = [x.split(list(others[1])) for x in firsts]
        return [torch.cat([its[rank] for its in pieces]) for rank in range(len(firsts))]
    if name == "wait_tensor":
        return firsts
    if name == "take":
        dim, shift, chunk, start, length = others[:5]
        places = [(rank + shift) % len(firsts) * chunk + start for rank in range(len(firsts))]
        return [x.narrow(dim, place, length) for x, place in zip(firsts, places, strict=True)]
    if name == "take_ranks":
        dim, shifts, chunk, start, length = others[:5]
        count = len(firsts)
        slots = [[(rank + shift) % count for shift in shifts] for rank in range(count)]
        return [
            torch.cat([x.narrow(dim, slot * chunk + start, length) for slot in its], dim)
            for x, its in zip(firsts, slots, strict=True)
        ]
    if name == "place_ranks":
        shifts, chunk, start, length = others[1:5]
        for rank, (given, _) in enumerate(arguments):
            for index, shift in enumerate(shifts):
                place = given[0].narrow(0, (rank + shift) % len(firsts) * chunk + start, length)
                place.copy_(given[1].narrow(0, index * length, length))
        return [x.new_empty(1) for x in firsts]
    if name == "rows_below":
        return [_rows_below(x, (rank + others[1]) % len(firsts), *others) for rank, x in enumerate(firsts)]
    return [node.target(*args, **kwargs) for args, kwargs in arguments]


def _reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(parts)
    return {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[op](0)


def _rows_below(x: torch.Tensor, slot: int, dim: int, shift: int, chunk: int, start: int, size: int, *_: Any) -> Any:
    kept = torch.arange(x.shape[dim]) + slot * chunk + start < size
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.where(kept.reshape(shape), x, torch.zeros((), dtype=x.dtype))
