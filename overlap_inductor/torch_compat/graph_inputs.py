# SPDX-License-Identifier: Apache-2.0
"""Tells which inputs of a graph are parameters and buffers of a module, and whether ranks can compare the inputs."""

from __future__ import annotations

import re

import torch
from torch import fx


def freezing() -> str | None:
    """Why the ranks cannot compare the inputs of the graph that is being compiled, if Inductor's freezing is on.
    Else ``None``. After the passes of the joint graph, freezing turns parameters into constants. A call of the compiled
    graph does not pass these parameters."""
    from torch._inductor import config

    if config.freezing and not torch.is_grad_enabled():
        return "torch._inductor.config.freezing is on: it makes constants of the weights that ranks would compare"
    return None


def nested_region(graph: fx.Graph) -> str | None:
    """Why the ranks cannot compare the inputs of ``graph``, if ``graph`` is a subgraph (such as that of
    ``torch.compiler.nested_compile_region``). ``None`` for a whole graph. The ranks compare what a call of the compiled
    graph passes, and such a call passes only the inputs of the whole graph.

    AOTAutograd puts a description into the metadata of each input of a graph that it traced. Inputs of subgraphs have
    none.
    """
    inputs = graph.find_nodes(op="placeholder")
    if inputs and not any("desc" in node.meta for node in inputs):
        return "this all-reduce is in a nested compile region, whose inputs the ranks cannot compare"
    return None


def is_parameter(node: fx.Node) -> bool | None:
    """Whether a placeholder of the graph that is being compiled is a parameter or buffer of a module. An inner tensor
    of a parameter that is a tensor subclass counts, too. ``None`` if this is unknown, as for a graph that Dynamo did
    not trace.

    AOTAutograd calls such inputs static and lists their positions among the forward's inputs. The names of a backward
    graph's inputs contain these positions, counted from 1.
    """
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
