# SPDX-License-Identifier: Apache-2.0
"""Delay matmuls on which no other matmul or transfer depends, so that they run under an exposed transfer.

An example is the matmul of a weight's gradient (Megatron's delayed weight gradient; Qi et al., arXiv:2401.10241,
section 2). Before and after, for the scatter of an unrolled ring::

    dw = mm(dy^T, x)                                  dx pieces: mm, exchange_send ...
    dx pieces: mm, exchange_send ...              ->  dw = after(mm(dy^T, x), last send)
    exchange_wait(buffer, [pieces])                   exchange_wait(buffer, [pieces, dw])

Matmuls also move under a gather of two ranks, because it starts all its transfers at once. With more ranks, each wait
of an unrolled ring also starts a transfer, except the last ones. A long matmul in front of one wait would delay all
later transfers. So the rows of ``dw`` are cut into pieces, which run in front of several waits (``MOST_PIECES``)::

    dw = mm(dy^T, x)                                  g = gather_start(...)
    g = gather_start(...)                             d0 = after(mm(dy^T[rows 0], x), g)
    s0 = gather_step(g, 0)                        ->  s0 = gather_step(g, 0, [d0])
    dx0 = mm(...)                                     dx0 = mm(...); d1 = after(mm(dy^T[rows 1], x), s0)
    s1 = gather_step(g, 1)                            s1 = gather_step(g, 1, [d1])
                                                      dw = cat([d0, d1])

For a collective that stays in the graph::

    dw = mm(dy^T, x)                                  g = all_gather(e)
    y = wait_tensor(all_gather(e))                ->  dw = after(mm(dy^T, x), g)
                                                      y = wait_tensor(g)                  # ordered after dw

Op ``after(x, y)`` returns ``x``. The kernel that computes ``x`` runs after the op that returned ``y``.

Contract: the pass runs on a rewritten graph, before the graph's order is fixed. Matmuls move in two ways:

- down, to a transfer's waits, with the views, casts and permutations of the matmul's result;
- up, to before the wait for the rows that experts on other ranks return, with the nodes that the matmul needs.

Each result is the sum of the same products. A piece may round it differently, because the vendor's library may choose
another kernel for fewer rows. Ranks may move different matmuls, because the exchange of data does not change.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.placement import movable
from overlap_inductor.sites.placement import needed_behind
from overlap_inductor.sites.row_steps import is_grouped_operator
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.step_values import NOT_COPIED
from overlap_inductor.torch_compat.step_values import evaluated
from overlap_inductor.torch_compat.step_values import mark

aten, overlap = torch.ops.aten, torch.ops.overlap_inductor
SITE = "overlap_site"
"""Metadata of a step: the id of its site."""
_GATHER_STEP_ARGUMENTS = 8
"""Number of arguments of ``gather_step``, with ``computed``."""
MOST_PIECES, ALIGNED = 3, 64
"""A matmul under a ring of more than two ranks is cut into at most so many pieces, because each piece adds nodes that
Inductor must compile. A piece begins at a multiple of ``ALIGNED`` rows, because libraries are slow with rows that are
not aligned."""
LEAST = 0.1
"""A matmul moves only if the remaining exposed time is longer than this fraction of the matmul's time. A move costs
memory: a delayed matmul keeps its operands for longer."""


@dataclass(frozen=True)
class Transfer:
    """A transfer in flight between ``start`` and ``wait``, or a ring of transfers.

    Attributes:
        start: the last node before ``wait`` that starts a transfer.
        seconds: the estimated exposed time of the site or collective.
        later: the ring's further waits. The waits of a ring also start transfers.
    """

    start: fx.Node
    wait: fx.Node
    seconds: float
    later: tuple[fx.Node, ...] = ()


def delay(
    graph: fx.Graph,
    exposed: Mapping[str, float],
    of_two: Collection[str],
    kept: Iterable[Transfer],
    rates: Mapping[int, float],
) -> dict[fx.Node, set[fx.Node]]:
    """Move matmuls under the transfers of unrolled rings and of collectives that stay in the graph.

    Args:
        exposed: for each site's id, the estimated seconds of its exposed transfers.
        of_two: the ids of the sites of groups of two ranks.
        kept: the collectives that stay in the graph.
        rates: FLOP/s of a matmul, by bytes of an element of its left operand.

    Returns:
        For each wait of ``kept`` to which matmuls moved, these matmuls. They must come before the wait.
    """
    _hold_under_experts(graph)
    order: dict[fx.Node, set[fx.Node]] = {}
    free = [n for n in graph.nodes if _may_wait(n)]
    # The longest exposed time comes first, because a matmul can hide only one transfer.
    for transfer in sorted([*_sites(graph, exposed, of_two), *kept], key=lambda t: -t.seconds):
        wait, left, spread = transfer.wait, transfer.seconds, 0
        under: list[fx.Node] = []
        for node in reversed([n for n in free if n < wait]):
            seconds = _seconds(node, rates)
            if left <= LEAST * seconds:
                continue
            behind = _computed_from(node)
            if behind is None or not _may_move(node, behind, transfer):
                continue
            left -= seconds
            free.remove(node)
            if transfer.later:
                _spread(node, behind, transfer, seconds, spread)
                spread += 1
            else:
                under.append(_moved(node, behind, wait, transfer.start))
        if under and SITE in wait.meta:
            _wait_for(wait, under)
        elif under:
            order[wait] = set(under)
    return order


def _sites(graph: fx.Graph, exposed: Mapping[str, float], of_two: Collection[str]) -> Iterator[Transfer]:
    """Yields a transfer for each site that starts a transfer before its first wait. It lasts from the last start before
    this wait to this wait. If waits start no transfers, a matmul before the first wait can hide all of the site's.
    """
    starting = overlap.exchange_send.default, overlap.gather_start.default
    waiting = overlap.exchange_wait.default, overlap.gather_step.default
    sends: dict[str, fx.Node] = {}
    waits: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        site = node.meta.get(SITE)
        if site in exposed and node.target in starting:
            sends[site] = node
        elif site in exposed and node.target in waiting:
            waits.setdefault(site, []).append(node)
    for site, found in waits.items():
        passes_on = found[0].target is overlap.gather_step.default and site not in of_two
        if site in sends and sends[site] < found[0]:
            yield Transfer(sends[site], found[0], exposed[site], tuple(found[1:]) if passes_on else ())


def _hold_under_experts(graph: fx.Graph) -> None:
    """Order the wait for the experts' returned rows (``lowerings.ring.looped_experts_ops``) after the matmuls between
    the experts and the wait. First, each matmul behind the wait that does not need the rows moves in front of the
    wait, if the matmul may move (``_needed_ahead``)."""
    waits = graph.find_nodes(op="call_function", target=overlap.exchange_wait.default)
    for experts in graph.find_nodes(op="call_function", target=overlap.all_to_all_experts.default):
        for wait in (w for w in waits if w.meta.get(SITE) == experts.meta[SITE]):
            # The wait writes the returned rows into its buffer. So every reader of the buffer needs the wait.
            late: set[fx.Node] = {wait, *_computed_after(wait)}
            for node in [n for n in graph.nodes if wait < n and n not in late and _is_matmul(n)]:
                for needed in _needed_ahead(node, wait):
                    wait.prepend(needed)
            between, node = [], experts.next
            while node is not wait:
                between += [node] if _is_matmul(node) else []
                node = node.next
            _wait_for(wait, between)


def _computed_after(wait: fx.Node) -> set[fx.Node]:
    """The nodes behind ``wait`` that are computed from its result or from its buffer."""
    found: set[fx.Node] = set()

    def visit(node: fx.Node) -> bool:
        if not wait < node:
            return False
        found.add(node)
        return True

    tools.walk([wait, wait.args[1]], visit)
    return found


def _is_matmul(node: fx.Node) -> bool:
    return matmuls.parse(node) is not None or is_grouped_operator(node)


def _needed_ahead(node: fx.Node, wait: fx.Node) -> list[fx.Node]:
    """In graph order, ``node`` and the nodes that must move in front of ``wait`` with it. Empty if one of them cannot
    move."""
    found = needed_behind([node], wait)
    buffer = wait.args[1]
    if any(n is wait or not movable(n) or operators.is_mutable(n) or buffer in n.all_input_nodes for n in found):
        return []
    read = [i for n in found for i in n.all_input_nodes]
    return [] if tools.written_between(wait, node, read) else found


def _may_wait(node: fx.Node) -> bool:
    """Whether ``node`` is a matmul of static sizes that is no step of a rewritten site."""
    if matmuls.parse(node) is None or SITE in node.meta:
        return False
    return all(isinstance(s, int) for n in (node, *tools.tensor_inputs(node)) for s in tools.shape(n))


def _computed_from(node: fx.Node) -> list[fx.Node] | None:
    """In graph order, the views, casts and permutations from ``node`` to the graph's results. ``None`` if there are
    other readers."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "output" or user in found:
                continue
            if not (tools.is_reshape(user) or tools.is_cast(user) or tools.permutation(user) is not None):
                return None
            found.add(user)
            pending.append(user)
    return sorted(found)


def _may_move(node: fx.Node, behind: list[fx.Node], transfer: Transfer) -> bool:
    """Whether ``node`` and ``behind`` may move to just before the last wait: none writes in place, and no node in
    between writes a tensor that they read. Under a ring, only an ``mm`` may move, which ``_spread`` can cut. Gradients
    of weights are ``mm``."""
    inside, last = {node, *behind}, (transfer.wait, *transfer.later)[-1]
    if transfer.later and (node.target is not aten.mm.default or not tools.numel(tools.shape(node))):
        return False
    read = [i for n in inside for i in n.all_input_nodes if i not in inside]
    return not tools.written_between(node, last, read) and not any(operators.is_mutable(n) for n in inside)


def _moved(node: fx.Node, behind: list[fx.Node], wait: fx.Node, token: fx.Node) -> fx.Node:
    """Move ``node`` and ``behind`` to just before ``wait``. Returns the matmul's result, ordered after ``token``."""
    later = [n for n in behind if n < wait]
    wait.prepend(node)
    with node.graph.inserting_before(wait):
        ordered = node.graph.call_function(overlap.after.default, (node, token))
    ordered.meta = {**node.meta, "val": evaluated(ordered)}
    mark(ordered)
    node.replace_all_uses_with(ordered, delete_user_cb=lambda user: user is not ordered)
    for one in later:
        wait.prepend(one)
    return ordered


def _spread(node: fx.Node, behind: list[fx.Node], transfer: Transfer, seconds: float, before: int) -> None:
    """Cut the rows of ``node``, an ``mm``, into pieces that run in front of waits of a ring. A matmul that is no longer
    than the exposed time at one wait is not cut. ``behind`` moves to the last piece. Joining the pieces copies the
    product once.

    Args:
        seconds: estimated time of ``node``.
        before: how many matmuls were spread under this ring before. If there are more waits than pieces, the next
            matmul begins one wait later.
    """
    graph, (lhs, rhs), rows = node.graph, node.args, tools.shape(node)[0]
    every = transfer.wait, *transfer.later
    most = max(1, min(MOST_PIECES, math.ceil(seconds * len(every) / transfer.seconds), -(-rows // ALIGNED)))
    step = -(-len(every) // most)
    chosen = sorted({(before % step + first) % len(every) for first in range(0, len(every), step)})
    bounds = [*(round(rows * i / len(chosen) / ALIGNED) * ALIGNED for i in range(len(chosen))), rows]
    parts = [(index, *part) for index, part in zip(chosen, pairwise(bounds), strict=True) if part[0] < part[1]]
    kept = {key: value for key, value in node.meta.items() if key not in NOT_COPIED}

    def call(target: Any, *args: object) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta = {**kept, "val": evaluated(made)}
        mark(made)
        return made

    pieces: list[fx.Node] = []
    for index, first, end in parts:
        wait, token = every[index], every[index - 1] if index else transfer.start
        with graph.inserting_before(wait):
            cut = lhs if end - first == rows else call(aten.slice.Tensor, lhs, 0, first, end)
            pieces.append(call(overlap.after.default, call(aten.mm.default, cut, rhs), token))
        _wait_for(wait, pieces[-1:])
    last = every[parts[-1][0]]
    with graph.inserting_before(last):
        whole = call(aten.cat.default, pieces) if len(pieces) > 1 else pieces[0]
    for one in [n for n in behind if n < last]:
        last.prepend(one)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)


def _wait_for(wait: fx.Node, under: list[fx.Node]) -> None:
    """Make ``wait`` run after ``under``."""
    if wait.target is overlap.gather_step.default:
        *settings, computed = wait.args if len(wait.args) == _GATHER_STEP_ARGUMENTS else (*wait.args, [])
        wait.args = (*settings, [*computed, *under])
    else:
        chain, buffer, sent, *others = wait.args
        wait.args = (chain, buffer, [*sent, *under], *others)
    mark(wait)


def _seconds(node: fx.Node, rates: Mapping[int, float]) -> float:
    matmul = matmuls.parse(node)
    assert matmul is not None
    rate = rates.get(tools.dtype(matmul.lhs).itemsize, min(rates.values()))
    return 2.0 * tools.numel(tools.shape(node)) * tools.shape(matmul.lhs)[-1] / rate
