# SPDX-License-Identifier: Apache-2.0
"""Recognise data-parallel reductions: collectives that sum the gradients of parameters over the ranks.

The backward returns the result as the parameter's gradient. On the way there, the result may be cast, scaled, viewed,
split, added to another one, or reduced again in another group::

    y = mm(permute(grad), x); total = wait_tensor(reduce_scatter(y)); return total / 2
"""

from __future__ import annotations

from torch import fx

from overlap_inductor.facts.decision import Reason
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.graph_inputs import describes_results
from overlap_inductor.torch_compat.graph_inputs import in_compiled_autograd
from overlap_inductor.torch_compat.graph_inputs import is_parameter_gradient
from overlap_inductor.torch_compat.hiding import reduction_hider

aten = tools.aten


def is_weight_gradient(collective: CollectiveNode, phase: str) -> bool:
    """Whether ``collective`` reduces the gradient of a parameter, or of several.

    If parameters are unknown, each result of a backward counts as the gradient of one. A gradient does not count if a
    matmul computes its rows from the same rows of its left operand, as it does for activations. In a joint graph, a
    matmul with a transposed left operand must compute the gradient.

    ``phase``: inference, forward, backward, or ``joint`` for a graph of forward and backward."""
    returned = _returned(collective.wait)
    if returned is None or in_compiled_autograd():
        return returned is not None
    output = collective.node.graph.output_node()
    answers = [is_parameter_gradient(output, i) for i, value in enumerate(output.args[0]) if value in returned]
    if not answers or _by_rows(collective):
        return False
    unknown = phase == "backward" or (phase == "joint" and describes_results(output) and _sums_tokens(collective))
    return all(unknown if answer is None else answer for answer in answers)


def _by_rows(collective: CollectiveNode) -> bool:
    """Whether a matmul whose left operand is not transposed computes the collective's input. In the matmul of a
    weight's gradient, the left operand is transposed, because the matmul contracts the tokens."""
    found = filter(None, map(matmuls.parse, _makers(collective.input)))
    return any(tools.permutation(matmul.lhs) is None for matmul in found)


def _sums_tokens(collective: CollectiveNode) -> bool:
    """Whether the matmul of a weight's gradient computes the collective's input. A transposed input of the graph may be
    a weight, so its matmul does not count."""
    for maker in _makers(collective.input):
        matmul = matmuls.parse(maker)
        if matmul is not None and tools.permutation(matmul.lhs) is not None:
            return all(source.op != "placeholder" for source in matmul.lhs.all_input_nodes)
    return False


def _returned(start: fx.Node) -> set[fx.Node] | None:
    """The results of the graph that are computed from ``start``. ``None`` if anything but casts, factors, moves, sums
    and reductions reads ``start``. (Compiled autograd may also copy a gradient to where the parameter keeps it.)"""
    returned: set[fx.Node] = set()
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.op == "output" or user.target is aten.copy_.default:
                returned.add(node)
            elif not _passes_on(user):
                return None
            elif user not in seen:
                seen.add(user)
                pending.append(user)
    return returned


def _passes_on(node: fx.Node) -> bool:
    takes = node.target in (aten.slice.Tensor, aten.split) or getattr(node.target, "__name__", "") == "getitem"
    reduces = operators.is_wait(node) or operators.is_functional_collective(node)
    return takes or reduces or _moves(node) or node.target in tools.SPLITS


def _moves(node: fx.Node) -> bool:
    """Whether ``node`` is pointwise or a view. (A pass of Inductor that merges the gradients of DDP writes some nodes
    without an overload, for example ``aten.reshape``.)"""
    views = tools.is_reshape(node) or tools.permutation(node) is not None
    return views or tools.is_pointwise(node) or node.target in (aten.reshape, aten.flatten.using_ints)


def kept_because(collective: CollectiveNode) -> Reason | None:
    """Why the reduction of a gradient stays as written, if a setting of Inductor hides it; else ``None``."""
    hides = reduction_hider(collective.kind)
    if hides is None:
        return None
    return Reason(
        "data_parallel_gradient",
        "the collective sums the gradient of a weight over the ranks (data parallelism);"
        f" torch._inductor.config.{hides} is on and runs later work before the wait",
    )


def other_maker(collective: CollectiveNode) -> tuple[fx.Node, Reason] | None:
    """``(op, reason why there is no site)`` if an op that is no matmul computes the reduced gradient, as for a norm, a
    bias or an embedding, or joins several gradients; else ``None``. The op may be the wait of an earlier reduction."""
    for maker in _makers(collective.input):
        if maker.target in (aten.cat.default, aten.cat):
            return maker, Reason(
                "coalesced",
                f"{maker.name} joins {len(maker.args[0])} gradients, and one collective sums them all; expected one"
                " collective for each gradient",
            )
        if operators.is_wait(maker):
            return maker, Reason(
                "no_matmul",
                f"the collective sums a gradient that another collective has already reduced ({maker.name}); no matmul"
                " stands between them",
            )
        if maker.op == "call_function" and matmuls.parse(maker) is None:
            return maker, Reason(
                "no_matmul",
                f"{maker.name} ({maker.target}) computes the gradient that the collective sums; only a matmul that"
                " computes the gradient of a weight could hide the collective",
            )
    return None


def _makers(start: fx.Node) -> list[fx.Node]:
    """The ops that compute ``start``, behind casts, views, factors and sums."""
    makers, pending, seen = [], [start], {start}
    while pending:
        node = pending.pop()
        if not _moves(node):
            makers.append(node)
            continue
        for source in tools.tensor_inputs(node):
            if source not in seen and not tools.is_scalar_like(source):
                seen.add(source)
                pending.append(source)
    return makers
