# SPDX-License-Identifier: Apache-2.0
"""A graph as text, for reports and golden files."""

from __future__ import annotations

import json
import re

import torch
from torch import fx

from overlap_inductor.torch_compat import operators

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address in the text of a Python function, as in ``<function sym_sum at 0x7f00>``."""


def readable(graph: fx.Graph) -> str:
    """The graph as text, one node per line, with dtypes and shapes. Metadata that differs between ranks or runs is left
    out."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        kind = ""
        if isinstance(value, torch.Tensor):
            kind = f": {str(value.dtype).removeprefix('torch.')}[{', '.join(str(s) for s in value.shape)}]"
        target = operators.lowering_name(node) or _ADDRESS.sub("", str(node.target)).removeprefix("torch.ops.")
        arguments = ", ".join(
            [*(_argument(a) for a in node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())]
        )
        if node.op == "placeholder":
            lines.append(f"{node.name}{kind} = input")
        elif node.op == "output":
            lines.append(f"return {arguments}")
        else:
            lines.append(f"{node.name}{kind} = {target}({arguments})")
    return "\n".join(lines) + "\n"


def _argument(value: object) -> str:
    """One argument as text. The plan in the arguments of op ``agree`` is shortened to its digest."""
    if isinstance(value, str):
        return f"plan {json.loads(value)['plan']}" if value.startswith('{"config"') else repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v) for v in value)}]"
    return str(value)
