"""See through operands that were padded to an aligned size: ``slice(mm(pad(a), pad(b)))`` is ``mm(a, b)``.

Inductor pads matmuls on GPUs where a timing on the rank at hand says that it pays. Ranks decide it each for themselves, so what is found
in a graph must not depend on it: ranks that found different sites would wait for one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from overlap_inductor.passes import graph_tools as tools
from overlap_inductor.torch_compat import operators

aten = tools.aten


@dataclass(frozen=True)
class Aligned:
    """``result`` is the product of the operands behind their padding; ``nodes`` are all nodes from the padding to it."""

    result: fx.Node
    nodes: tuple[fx.Node, ...]


def behind_padding(operand: fx.Node) -> fx.Node:
    """The tensor that ``operand`` is with zeros appended to some of its dims, else ``operand`` itself."""
    if operand.target is aten.constant_pad_nd.default and operators.argument(operand, "value") == 0:
        amounts: Any = operand.args[1]
        appends = all(isinstance(a, int) and a >= 0 for a in amounts) and not any(amounts[::2])
        return operand.args[0] if appends else operand  # type: ignore[return-value]
    if operand.target is aten.cat.default:
        pieces: Any = operand.args[0]
        if len(pieces) == 2 and pieces[1].target is aten.full.default and pieces[1].args[1] == 0 and pieces[0] is not pieces[1]:
            # (Appended to another dim in turn where two dims are padded.)
            return behind_padding(pieces[0])
    return operand


def core_of(node: fx.Node) -> fx.Node:
    """What ``node`` cuts the last rows or columns off, one slice on the other; ``node`` itself where it cuts nothing."""
    while node.target is aten.slice.Tensor and (operators.argument(node, "start") or 0) == 0 and operators.argument(node, "step") == 1:
        node = node.args[0]  # type: ignore[assignment]
    return node


def aligned(core: fx.Node, operands: tuple[fx.Node, fx.Node]) -> Aligned | None:
    """For the matmul ``core`` of padded operands, all of whose users see exactly the unpadded product: where that is. Else ``None``."""
    sources = [behind_padding(o) for o in operands]
    padding = [o for o, s in zip(operands, sources, strict=True) if o is not s]
    if not padding or any(str(s) != str(t) for s, t in zip(_contracted(sources), reversed(_contracted(sources)), strict=True)):
        return None
    (*batch, rows, _), (*_, columns) = tools.shape(sources[0]), tools.shape(sources[1])
    wanted = [str(s) for s in (*batch, rows, columns)]
    result, nodes = core, [*padding, core]
    while [str(s) for s in tools.shape(result)] != wanted:
        (user, *others) = result.users or (None,)
        if others or user is None or user.target is not aten.slice.Tensor or core_of(user) is not core:
            return None
        result = user
        nodes.append(user)
    return Aligned(result, tuple(nodes))


def _contracted(operands: list[fx.Node]) -> list[Any]:
    return [tools.shape(operands[0])[-1], tools.shape(operands[1])[-2]]
