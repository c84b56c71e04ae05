# SPDX-License-Identifier: Apache-2.0
"""Tells which inputs of a graph are parameters and buffers, and whether ranks can compare the inputs.

A rewritten graph may be right only if some inputs have equal values on all ranks, so the ranks compare these
values (``runtime.same_inputs``). A rank can compare only tensors that a call passes to the compiled graph.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx


def freezing() -> str | None:
    """Why the ranks cannot compare the inputs of the graph being compiled, if Inductor freezes it; else ``None``.
    Freezing makes constants of parameters. Inductor freezes only graphs without gradients."""
    from torch._inductor import config

    if config.freezing and not torch.is_grad_enabled():
        return "torch._inductor.config.freezing is on: it makes constants of the weights that ranks would compare"
    return None


def nested_region(graph: fx.Graph) -> str | None:
    """Why the ranks cannot compare the inputs of ``graph``, if ``graph`` is a subgraph
    (``torch.compiler.nested_compile_region``); else ``None``. A call passes only the inputs of the whole graph.

    AOTAutograd adds a description to each input of a traced graph, but not to the inputs of its subgraphs.
    """
    inputs = graph.find_nodes(op="placeholder")
    if inputs and not any("desc" in node.meta for node in inputs):
        return "this all-reduce is in a nested compile region, whose inputs the ranks cannot compare"
    return None


def is_part_of_dtensor(node: fx.Node) -> bool:
    """Whether the input ``node`` is the local tensor of a ``DTensor``. AOTAutograd's description of an input says so,
    by the name of the attribute that holds the tensor."""
    return getattr(node.meta.get("desc"), "attr", None) == "_local_tensor"


def is_parameter(node: fx.Node) -> bool | None:
    """Whether a placeholder of the graph being compiled has a static address. Parameters, buffers and their inner
    tensors have one, for example. ``None`` if this is unknown (without Dynamo, for example).

    AOTAutograd lists the positions of such inputs among the forward's inputs. The name ``primals_N`` of an input
    contains its position in the forward, counted from 1."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return None
    named = re.fullmatch(r"primals_(\d+)", node.name)
    if named is not None:
        return int(named[1]) - 1 in metadata.static_input_indices
    inputs = node.graph.find_nodes(op="placeholder")
    if any(n.name.startswith(("tangents", "primals")) for n in inputs):
        return False
    return inputs.index(node) in metadata.static_input_indices


def is_parameter_gradient(output: fx.Node, index: int) -> bool | None:
    """Whether the value at ``index`` of a graph's ``output`` is the gradient of a parameter (``is_parameter``).
    ``None`` if this is unknown. In a joint graph, it is only known which values are no gradients.

    AOTAutograd's description of a value says whether it is a gradient. A backward graph returns one value for each
    input of the forward, in the same order, ``None`` for an input without a gradient."""
    from torch._guards import TracingContext

    descriptions = output.meta.get("desc") or []
    if index < len(descriptions) and not _is_gradient(descriptions[index]):
        return False
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or len(metadata.input_info) != len(descriptions):
        return None
    return index in metadata.static_input_indices


def _is_gradient(description: Any) -> bool:
    """Whether AOTAutograd describes a value as a gradient. Versions of torch without ``is_grad`` cannot tell, so any
    described value may be one."""
    is_grad = getattr(description, "is_grad", None)
    return description is not None and (is_grad is None or bool(is_grad()))


def describes_results(output: fx.Node) -> bool:
    """Whether AOTAutograd has described the results of the graph. It does not describe those of subgraphs."""
    return bool(output.meta.get("desc"))


def in_compiled_autograd() -> bool:
    """Whether the graph being compiled is a backward that compiled autograd has traced. Its results are gradients, and
    nothing describes them."""
    from torch._dynamo import compiled_autograd

    return bool(compiled_autograd.in_compiled_autograd_region)
