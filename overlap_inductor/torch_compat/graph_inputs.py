"""Which inputs of a graph are a module's parameters and buffers."""

from __future__ import annotations

import re

from torch import fx


def is_parameter(node: fx.Node) -> bool | None:
    """Whether a placeholder of the graph that is compiled now is a parameter or buffer of a module, or part of one (a
    tensor of a tensor subclass); ``None`` where nobody can tell (a graph that was not traced by Dynamo).

    AOTAutograd calls them static inputs, by their position among the forward's inputs; a backward graph's inputs are
    named after that position.
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
