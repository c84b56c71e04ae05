# SPDX-License-Identifier: Apache-2.0
"""A Dynamo backend that runs the nodes of the rewritten graph one after the other. So tests of the pass need no time
to generate code."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.node import map_arg

from overlap_inductor.config import OverlapConfig
from overlap_inductor.inductor import post_grad
from overlap_inductor.inductor.compared_call import ComparedCall
from overlap_inductor.inductor.compile_scope import CompileScope
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.switch.backend import compile_with


def interpreted(config: OverlapConfig, reports: list[OverlapReport], compared: bool = False) -> Callable[..., Any]:
    """The backend. It appends the reports of its graphs to ``reports``.

    ``compared``: each call of a graph that uses groups first compares the ranks' plans, as generated code does. If
    ranks differ, the call runs the graph as it was before the post-grad passes. Without ``compared``, the first
    overlap op compares the plans, and raises if ranks differ.
    """

    def compile_one(gm: torch.fx.GraphModule, example_inputs: Any, **keywords: Any) -> Any:
        flags = {name: bool(keywords.get(name)) for name in ("is_backward", "is_inference", "cpp_wrapper")}
        scope = CompileScope(graph_id=keywords.get("graph_id"), **flags)
        plain = _Untouched(_copy(gm)) if compared else None
        post_grad.run_post_grad_passes(gm, example_inputs, scope)
        found = scope.take_reports()
        reports.extend(found)
        if plain is None or not any(r.groups for r in found):
            return _call_of(gm)
        return ComparedCall(_call_of(gm), found, plain, on_accelerator=False, dump=None)  # type: ignore[arg-type]

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return compile_with(config, gm, example_inputs, None, {}, inner_compile=compile_one)

    return backend


def _copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of the graph's nodes; metadata and attributes are shared."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return torch.fx.GraphModule(gm, graph)


class _Untouched:
    """Takes the place of ``PlainProgram``: a graph that no post-grad pass has changed."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.gm = gm

    def compile(self) -> Callable[[list[Any]], Any]:
        from torch._inductor.fx_passes.post_grad import view_to_reshape

        view_to_reshape(self.gm)
        return _call_of(self.gm)


def _call_of(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    _bind_symbols(gm)
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "control_deps":
            node.target = _subgraph_of
    nodes = list(gm.graph.nodes)
    read_last = _read_last(nodes)

    def run(args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        results = _run(gm, nodes, read_last, iter(inputs))
        return [r if any(r is i for i in inputs) else _no_view(r) for r in results]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _no_view(result: Any) -> Any:
    """``result``, as generated code returns it. If an interpreter returns several views of one tensor, autograd treats
    them as views made by one op, and forbids writes to them."""
    if not isinstance(result, torch.Tensor) or not result._is_view():
        return result
    if result.is_conj() or result.is_neg():  # flags of the view, which its storage does not have
        return result.resolve_conj().resolve_neg()
    with torch.no_grad():
        place = result.untyped_storage(), result.storage_offset(), result.shape, result.stride()
        return result.new_empty(0).set_(*place)


def _read_last(nodes: list[torch.fx.Node]) -> list[list[torch.fx.Node]]:
    """For each node: the nodes whose values can be dropped after it has run, because no later node reads them."""
    seen: set[torch.fx.Node] = set()
    found: list[list[torch.fx.Node]] = []
    for node in reversed(nodes):
        last = [n for n in (node, *node.all_input_nodes) if n not in seen]
        seen.update(last)
        found.append(last)
    return found[::-1]


def _run(
    gm: torch.fx.GraphModule, nodes: list[torch.fx.Node], read_last: list[list[torch.fx.Node]], inputs: Iterator[Any]
) -> Any:
    """Run the nodes in their order. A value is dropped after the last node that reads it."""
    values: dict[torch.fx.Node, Any] = {}
    for node, last in zip(nodes, read_last, strict=True):
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(gm)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return args[0]
            assert node.op == "call_function", node.format_node()
            values[node] = node.target(*args, **kwargs)
        for n in last:
            del values[n]
    raise AssertionError("the graph has no output")


def _subgraph_of(before: Any, subgraph: torch.fx.GraphModule, *operands: Any) -> Any:
    """Run the subgraph of a ``control_deps`` node, because some torch versions have no kernel for ``control_deps``. The
    nodes already run in the order that ``control_deps`` demands."""
    nodes = list(subgraph.graph.nodes)
    return _run(subgraph, nodes, _read_last(nodes), iter(operands))


def _number(function: Callable[..., Any]) -> Callable[..., int]:
    """Give ``function`` a name, because a printed graph shows the names of its functions."""

    def number(*numbers: int) -> int:
        return int(function(*numbers))

    return number


def _bind_symbols(gm: torch.fx.GraphModule) -> None:
    """Replace each symbolic size in the nodes' arguments by a node that computes the size from the graph's inputs. The
    nodes run one by one, so each size must be a number."""
    import sympy

    symbols = {
        n.meta["val"].node.expr: n
        for n in gm.graph.find_nodes(op="placeholder")
        if isinstance(n.meta.get("val"), torch.SymInt)
    }
    if not symbols:
        return
    for node in list(gm.graph.nodes):

        def bind(value: Any, node: torch.fx.Node = node) -> Any:
            if not isinstance(value, torch.SymInt):
                return value
            expression = value.node.expr
            names = sorted(expression.free_symbols, key=str)
            function = sympy.lambdify(names, expression, modules=[{"FloorDiv": lambda a, b: a // b}, "math"])
            with gm.graph.inserting_before(node):
                return gm.graph.call_function(_number(function), tuple(symbols[s] for s in names))

        node.args = torch.utils._pytree.tree_map(bind, node.args)
        node.kwargs = torch.utils._pytree.tree_map(bind, node.kwargs)
