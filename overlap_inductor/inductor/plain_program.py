# SPDX-License-Identifier: Apache-2.0
"""The plain program of a graph: the graph before any of our passes ran, as bytes.

::

    capture       graph (relu = relu(x); y = mm(relu, w))   ->  data: [("placeholder", "x", ...), ("call_function",
                                                                "relu", aten.relu, (_Node(0),), ...), ...] as bytes
    compile_plain data, large tensors                       ->  the same graph, compiled without overlap

The bytes are stored with the compiled graph. So a rank that loaded its graph from a cache can run without overlap, too.
The bytes hold the nodes, the metadata that Inductor reads, the example inputs, and the graph's small tensors (frozen
weights).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from overlap_inductor.errors import OverlapError
from overlap_inductor.inductor import compile_scope
from overlap_inductor.inductor.compile_scope import CompileScope

LARGE = 1 << 20
"""The plain program leaves out tensors of the graph that have at least this many bytes."""
_META = ("unbacked_bindings", "eager_input_vals", "custom", "recompute", "partitioner_tag", "mutation_region_id")
_OUTPUT_META = ("user_visible_output_idxs", "output_stack_traces")


@dataclass(frozen=True)
class _Node:
    """A node that is an argument, by its index in the graph."""

    index: int


@dataclass(frozen=True)
class _Elsewhere:
    """A large tensor that the graph holds under this name."""

    name: str


@dataclass
class _Program:
    """A graph as data.

    Attributes:
        nodes: ``(op, name, target, args, kwargs, meta)`` of each node, in order.
        held: what the graph's ``get_attr`` nodes read, by name.
    """

    nodes: list[tuple[Any, ...]]
    held: dict[str, Any]


@dataclass(frozen=True)
class Captured:
    """A plain program, pickled.

    Attributes:
        data: the graph and its example inputs.
        left_out: names of the large tensors that ``data`` does not hold.
        process: the only process in which ``data`` is valid, or ``None`` for every process. A graph refers to a user's
            Triton kernels by numbers in a table of its process.
    """

    data: bytes
    left_out: list[str]
    process: str | None


_PROCESS = uuid.uuid4().hex


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """The plain program of ``gm``. Raises what pickling raises if the graph cannot be pickled."""
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx._graph_pickler import Options

    program = _written(gm)
    left_out = [v.name for v in program.held.values() if isinstance(v, _Elsewhere)]
    kernels = any(
        "triton_kernel" in str(n.target) for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes
    )
    data = GraphPickler.dumps((program, list(example_inputs)), Options(ops_filter=None))
    return Captured(data, left_out, _PROCESS if kernels else None)


def of_this_process(kept: Captured, gm: fx.GraphModule | None, example_inputs: Sequence[Any]) -> Captured | None:
    """``kept`` if it is valid in this process. Otherwise the plain program of ``gm``, or ``None`` if ``gm`` is missing.
    ``gm``: the graph before its compile."""
    if kept.process in (None, _PROCESS):
        return kept
    return capture(gm, example_inputs) if gm is not None else None


def left_out(gm: fx.GraphModule | None, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors with these ``names`` that ``capture`` left out, as far as ``gm`` holds them."""
    found = {}
    for name in names if gm is not None else ():
        try:
            found[name] = _attribute(gm, name)
        except AttributeError:
            continue
    return found


def known_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The ``keywords`` that ``compile_fx_inner`` takes."""
    from torch._inductor.compile_fx import _CompileFxKwargs

    known = {*_CompileFxKwargs.__annotations__, "compile_region_name"}
    return {k: v for k, v in keywords.items() if k in known}


def _names_held(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.find_nodes(op="get_attr")]


def _is_large(value: torch.Tensor) -> bool:
    return value.numel() * value.element_size() >= LARGE


def _attribute(gm: fx.GraphModule, name: str) -> Any:
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _written(gm: fx.GraphModule, within: bool = False) -> _Program:
    """``gm`` as data. If ``gm`` is a subgraph (``within``), its nodes keep ``meta["val"]``, because its shapes are not
    propagated again. Nodes that make unbacked sizes also keep it, because nothing recreates the symbols."""
    places = {node: _Node(i) for i, node in enumerate(gm.graph.nodes)}

    def meta(node: fx.Node) -> dict[str, Any]:
        kept = _OUTPUT_META if node.op == "output" else _META
        values = ("val",) if within or "unbacked_bindings" in node.meta else ()
        return {k: node.meta[k] for k in (*kept, *values) if k in node.meta}

    nodes = [
        (
            n.op,
            n.name,
            n.target,
            fx.map_arg(n.args, places.__getitem__),
            fx.map_arg(n.kwargs, places.__getitem__),
            meta(n),
        )
        for n in gm.graph.nodes
    ]
    held: dict[str, Any] = {}
    for name in _names_held(gm):
        value = _attribute(gm, name)
        if isinstance(value, fx.GraphModule):
            value = _written(value, within=True)
        elif isinstance(value, torch.Tensor) and _is_large(value):
            value = _Elsewhere(name)
        held[name] = value
    return _Program(nodes, held)


def _rebuilt(program: _Program, large: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    graph = fx.Graph()
    made: list[fx.Node] = []

    def argument(value: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda v: made[v.index] if isinstance(v, _Node) else v, value)

    for op, name, target, args, kwargs, meta in program.nodes:
        node = graph.create_node(op, target, argument(args), argument(kwargs), name=name)
        node.meta.update(meta)
        made.append(node)
    root: dict[str, Any] = {}
    for name, value in program.held.items():
        if isinstance(value, _Elsewhere) and value.name not in large:
            raise OverlapError(
                f"the plain program of this graph cannot be restored: its tensor {value.name} was too large to be kept,"
                " and the graph that was loaded does not hold it. Clear Inductor's caches, or switch overlap off on"
                " all ranks (OVERLAP_INDUCTOR=off)."
            )
        root[name] = (
            _rebuilt(value, {})
            if isinstance(value, _Program)
            else large[value.name]
            if isinstance(value, _Elsewhere)
            else value
        )
    return fx.GraphModule(root, graph)


def inductor_settings() -> dict[str, Any]:
    from torch._inductor import config

    return config.get_config_copy()


def compile_plain(
    data: bytes, large: Mapping[str, torch.Tensor], keywords: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Any, list[Any]]:
    """Compile a plain program with Inductor, without overlap. Returns ``(compiled graph, example inputs)``.

    Args:
        data: ``Captured.data``.
        large: the tensors that ``data`` leaves out, by name.
        keywords: arguments of ``compile_fx_inner`` for the overlapped graph.
        settings: Inductor's configuration when the overlapped graph was compiled, or loaded from a cache.

    Raises:
        OverlapError: ``large`` lacks a tensor.
    """
    from torch._guards import TracingContext
    from torch._guards import tracing
    from torch._inductor import compile_fx
    from torch._inductor import config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    program, inputs = GraphPickler.loads(data, mode)
    gm = _rebuilt(program, large)
    current = config.get_config_copy()
    changed = {k: v for k, v in settings.items() if k in current and current[k] is not v and current[k] != v}
    scope = CompileScope(pinned=True, without_us=True)
    with tracing(TracingContext(mode)), config.patch(changed), compile_scope.plain(scope):
        compiled = compile_fx.compile_fx_inner(gm, inputs, **keywords)
    return _with_objects(compiled, _objects(program, inputs)), inputs


def _objects(program: _Program, inputs: Sequence[Any]) -> dict[int, int]:
    """``{index of a result: index of an input}`` for inputs that the graph returns and that are no tensors.

    Example: a ``DeviceMesh`` that a forward passes to its backward. Its pickled example input is ``None``.
    """
    numbers = [index for index, node in enumerate(program.nodes) if node[0] == "placeholder"]
    objects = {n: i for i, (n, example) in enumerate(zip(numbers, inputs, strict=True)) if example is None}
    (results,) = next(node[3] for node in program.nodes if node[0] == "output")
    if not isinstance(results, (list, tuple)):
        return {}
    return {o: objects[r.index] for o, r in enumerate(results) if isinstance(r, _Node) and r.index in objects}


def _with_objects(compiled: Any, objects: Mapping[int, int]) -> Any:
    """A boxed callable that calls ``compiled`` and puts inputs into the results (``_objects``)."""
    if not objects:
        return compiled

    def run(inputs: list[Any]) -> Any:
        passed_on = {result: inputs[index] for result, index in objects.items()}
        results = list(compiled(inputs))
        for result, value in passed_on.items():
            results[result] = value
        return results

    setattr(run, "_boxed_call", True)
    setattr(run, "output_strides", getattr(compiled, "output_strides", None))
    return run


def guarded(plain: Any, examples: Sequence[Any]) -> Any:
    """A callable that checks the sizes of each call and then calls ``plain``, a boxed callable. The compile of
    ``plain``, with ``examples`` as inputs, may have added guards on sizes. A call that breaks a guard raises
    ``OverlapError``."""
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    places = [i for i, e in enumerate(examples) if isinstance(e, torch.SymInt) and not has_free_unbacked_symbols(e)]
    if not places:
        return plain
    env = examples[places[0]].node.shape_env
    expression = env.produce_guards_expression([examples[i] for i in places])
    if not expression:
        return plain
    passed: set[tuple[int, ...]] = set()

    def run(inputs: list[Any]) -> Any:
        sizes = tuple(int(inputs[i]) for i in places)
        if sizes not in passed:
            if not env.evaluate_guards_expression(expression, list(sizes)):
                raise OverlapError(
                    "this graph runs without overlap, because the ranks differ or a rank cannot overlap. But its plain"
                    f" program was compiled for other sizes than {list(sizes)} of this call (expected {expression})."
                    " Call torch._dynamo.reset(), or switch overlap off on all ranks (OVERLAP_INDUCTOR=off)."
                )
            passed.add(sizes)
        return plain(inputs)

    setattr(run, "_boxed_call", True)
    return run


def restrided(plain: Any, examples: Sequence[Any], expected: Sequence[Any] | None) -> Callable[[list[Any]], Any]:
    """``plain`` with results in the strides of the graph that it replaces. A backward may expect these strides.

    Args:
        examples: the example inputs with which ``plain`` was compiled.
        expected: ``CompiledFxGraph.output_strides`` of the replaced graph. Results with other strides are copied.
    """
    have = getattr(plain, "output_strides", None)
    differing = (
        []
        if not expected or not have
        else [i for i, (a, b) in enumerate(zip(expected, have, strict=True)) if a is not None and a != b]
    )
    if not differing:
        return plain
    promised = list(expected or ())
    import sympy

    def run(inputs: list[Any]) -> Any:
        known = {v.node.expr: i for v, i in zip(examples, inputs, strict=True) if isinstance(v, torch.SymInt)}
        names = {str(symbol): int(value) for symbol, value in known.items()}
        results = list(plain(inputs))
        for index in differing:
            strides = [
                int(sympy.sympify(text, locals={k: sympy.Integer(v) for k, v in names.items()}))
                for text in promised[index]
            ]
            result = results[index]
            if list(result.stride()) != strides:
                results[index] = torch.empty_strided(
                    result.shape, strides, dtype=result.dtype, device=result.device
                ).copy_(result)
        return results

    setattr(run, "_boxed_call", True)
    return run
