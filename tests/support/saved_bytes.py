# SPDX-License-Identifier: Apache-2.0
"""The bytes that a forward graph saves for its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.inductor import post_grad
from overlap_inductor.sites.sizes import hint
from overlap_inductor.switch.backend import compile_with


def saved_bytes(fn: Callable[..., Any], *args: Any, **fields: Any) -> int:
    """The bytes of the tensors that the forward of ``fn(*args)`` saves for the backward. Of the inputs, only the first
    one of ``args`` counts, because the others are parameters. Tensors that share memory count once. A symbolic size
    counts as the size in ``args``. Nothing is computed. ``fields``: fields of ``OverlapConfig``."""
    graphs: dict[bool, list[fx.Graph]] = {False: [], True: []}

    def compile_one(gm: fx.GraphModule, example_inputs: Any, **keywords: Any) -> Any:
        graphs[bool(keywords.get("is_backward"))].append(gm.graph)
        return post_grad.zeros_like_outputs(gm)

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        return compile_with(OverlapConfig(**fields), gm, example_inputs, None, {}, inner_compile=compile_one)

    torch._dynamo.reset()
    with post_grad.every_graph_compiled_now():
        torch.compile(fn, backend=backend, fullgraph=True)(*args)
    torch._dynamo.reset()
    ((forward,), (backward,)) = graphs.values()
    return _bytes(forward, {n.name for n in backward.find_nodes(op="placeholder")}, args[0])


def _bytes(forward: fx.Graph, read: set[str], first: torch.Tensor) -> int:
    """The bytes of the results of ``forward`` whose names are in ``read``, without the memory of its parameters."""
    inputs = _storages(forward.find_nodes(op="placeholder"))
    parameters = {key for _, key, value in inputs if [hint(s) for s in value.shape] != list(first.shape)}
    results = _storages(forward.output_node().all_input_nodes)
    sizes = {key: hint(value.untyped_storage().nbytes()) for name, key, value in results if name in read}
    return sum(size for key, size in sizes.items() if key not in parameters)


def _storages(nodes: list[fx.Node]) -> list[tuple[str, int, torch.Tensor]]:
    values = [(node.name, node.meta["val"]) for node in nodes]
    return [(name, v.untyped_storage()._cdata, v) for name, v in values if isinstance(v, torch.Tensor)]
