# SPDX-License-Identifier: Apache-2.0
"""Find the tail of a site's result: pointwise nodes that the site's kernel computes on each tile of the result.

Before and after::

    y = matmul or reduction of the site; s = silu(y); z = mul(s, e)     # e: a tensor computed before the collective
    ->  z = the site's op with epilogue "silu(x) * e0" and extra e

Rules:

- A tail begins at the result of a reduction, or of a matmul of a gathered tensor. Nodes outside read only its last
  node, the end. If several nodes can be the end, the last one is taken.
- A tail reads at most ``MOST_EXTRAS`` other tensors (extras), which come before the site's collective. Each extra is a
  row, a column, one element or of the result's shape.
- No extra is the result of another collective. If an extra were such a result, nodes of the tail could be part of
  a norm that the other collective's site computes.
- The end must be needed in memory. If the end is not needed there, a tail gains nothing, because Inductor fuses the
  pointwise nodes into their readers. The end is needed in memory in these cases:

  - A matmul, a collective, an overlap op or the graph's caller reads the end, directly or through views.
  - A reader of the end depends on a matmul, collective or overlap op that is computed from the end. An example is a
    residual stream.
- A tail has no ``erf`` and no ``tanh``, because the tensor cores idle while a kernel computes them on a tile. A GELU
  took longer on tiles than in a later kernel, by 3 % of the matmul's time (2 H200s, K = 8192).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import fx

from overlap_inductor.facts.limits import MOST_EXTRAS
from overlap_inductor.sites import collectives
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import matmuls
from overlap_inductor.sites.epilogue_program import Argument
from overlap_inductor.sites.epilogue_program import Epilogue
from overlap_inductor.torch_compat import operators

aten = tools.aten

MOST_NODES = 32
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_OPS = {
    aten.abs.default: "abs",
    aten.add.Tensor: "add",
    aten.clamp_max.default: "minimum",
    aten.clamp_min.default: "maximum",
    aten.div.Tensor: "div",
    aten.exp.default: "exp",
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
    aten.mul.Tensor: "mul",
    aten.neg.default: "neg",
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.sub.Tensor: "sub",
}


@dataclass(frozen=True)
class Tail:
    """A site's tail.

    Attributes:
        end: the last node. The kernel stores its value in place of the result.
        extras: the epilogue's extra tensors, each with the shape in which the kernel reads it.
        epilogue: what the kernel computes.
    """

    end: fx.Node
    extras: list[tuple[fx.Node, list[int]]]
    epilogue: Epilogue


def find_tail(
    result: fx.Node, collective: fx.Node, most_extras: int = MOST_EXTRAS, planned: str | None = None
) -> Tail | None:
    """The tail after ``result``, or ``None``. Only a result in fp16 or bf16 with static sizes has a tail.

    Args:
        collective: the site's collective. All extras must come before it in the graph.
        planned: text of the planned epilogue. If given, only a tail with this epilogue is returned. After the
            planning, rewrites of other sites may have made a longer tail possible.
    """
    if tools.dtype(result) not in (torch.float16, torch.bfloat16) or any(
        not isinstance(s, int) for s in tools.shape(result)
    ):
        return None
    region = _Region(result, collective)
    region.grow()
    for end in reversed(region.nodes):
        members = region.members(end)
        if members is not None and tools.dtype(end) == tools.dtype(result) and region.must_be_stored(end):
            tail = region.tail(end, members)
            if planned not in (None, str(tail.epilogue)):
                continue
            if (
                tail.epilogue.ops
                and len(tail.extras) <= most_extras
                and not tools.written_between(collective, end, [e for e, _ in tail.extras])
            ):
                return tail
    return None


@dataclass
class _Region:
    """The first nodes after ``result`` that could be computed on a tile, at most ``MOST_NODES``, in graph order."""

    result: fx.Node
    collective: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)

    def grow(self) -> None:
        inside = {self.result}

        def taken(node: fx.Node) -> bool:
            accepted = len(self.nodes) < MOST_NODES and self._accepts(node, inside)
            if accepted:
                self.nodes.append(node)
                inside.add(node)
            return accepted

        tools.walk([self.result], taken)

    def _accepts(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        if node.op != "call_function" or not tools.is_tensor(node) or tools.dtype(node) not in _FLOATS:
            return False
        shape = tools.shape(node)
        if tools.is_reshape(node):
            return bool(shape) and shape[-1] == tools.shape(self.result)[-1]
        if not (_casts(node) or _squares(node) or node.target in _OPS and operators.argument(node, "alpha", 1) == 1):
            return False
        if not all(tools.is_tensor(a) or type(a) in (int, float) and math.isfinite(a) for a in _arguments(node)):
            return False
        return all(
            tools.shape(n) == shape if n in inside else self._kind(n, shape) is not None
            for n in tools.tensor_inputs(node)
        )

    def _kind(self, extra: fx.Node, shape: list[Any]) -> tuple[str, list[int]] | None:
        """``(kind, shape)`` in which the kernel reads ``extra`` for a node of shape ``shape``, or ``None``."""
        value = tools.value(extra)
        if (
            not extra < self.collective
            or collectives.is_a_wait(extra)
            or value.dtype not in _FLOATS
            or value.device != tools.value(self.result).device
        ):
            return None
        have = list(value.shape)
        rows, columns = math.prod(shape[:-1]), shape[-1]
        if any(not isinstance(s, int) for s in have):
            return None
        if have == shape:
            return ("full", [rows, columns]) if value.is_contiguous() else None
        if math.prod(have) == 1:
            return "scalar", [1]
        if have[-1] == columns == math.prod(have):
            return "row", [columns]
        return ("column", [rows]) if have == [*shape[:-1], 1] else None

    def members(self, end: fx.Node) -> set[fx.Node] | None:
        """``end`` and the nodes of the region from which it is computed. ``None`` if an outside node reads one of them
        other than ``end``."""
        inside, found, pending = {self.result, *self.nodes}, set[fx.Node](), [end]
        while pending:
            node = pending.pop()
            if node in inside and node not in found:
                found.add(node)
                pending += [] if node is self.result else node.all_input_nodes
        alone = all(user in found for node in found - {end} for user in node.users)
        return found if alone else None

    def must_be_stored(self, end: fx.Node) -> bool:
        return any(_stored_for(u) or self._stands_behind_matmul(u, end) for u in end.users)

    def _stands_behind_matmul(self, user: fx.Node, end: fx.Node) -> bool:
        """Whether ``user`` is or depends on a matmul, a collective or an overlap op that is computed from ``end``."""
        reached: dict[fx.Node, bool] = {end: False}
        node = end.next
        while node.op != "output":
            inputs = [n for n in node.all_input_nodes if n in reached]
            if inputs:
                reached[node] = any(reached[n] for n in inputs) or _needs_memory(node)
            if node is user:
                return reached[node]
            node = node.next
        return False

    def tail(self, end: fx.Node, members: set[fx.Node]) -> Tail:
        names: dict[fx.Node, str] = {self.result: "x"}
        extras: dict[fx.Node, tuple[str, list[int]]] = {}
        ops: list[tuple[Argument, ...]] = []

        def name(argument: Any, shape: list[Any]) -> Argument:
            if not isinstance(argument, fx.Node):
                return float(argument)
            if argument not in names:
                kind = self._kind(argument, shape)
                assert kind is not None
                names[argument] = f"e{len(extras)}"
                extras[argument] = kind
            return names[argument]

        for node in self.nodes:
            if node not in members:
                continue
            arguments = [name(a, tools.shape(node)) for a in _arguments(node)]
            if tools.is_reshape(node) or _casts(node) and tools.dtype(node) == torch.float32:
                names[node] = str(arguments[0])
                continue
            if _casts(node):
                ops.append(("to", arguments[0], str(tools.dtype(node)).removeprefix("torch.")))
            else:
                ops.append(("mul", arguments[0], arguments[0]) if _squares(node) else (_OPS[node.target], *arguments))
            names[node] = f"t{len(ops) - 1}"
        # A last ``to`` is dropped: the kernel rounds its result to the same dtype.
        if ops and ops[-1][0] == "to":
            ops.pop()
        return Tail(
            end,
            [(n, shape) for n, (_, shape) in extras.items()],
            Epilogue(tuple(kind for kind, _ in extras.values()), tuple(ops)),
        )


def _arguments(node: fx.Node) -> list[Any]:
    """The source of a view or cast, the base of a square, else all arguments."""
    if tools.is_reshape(node) or _casts(node) or _squares(node):
        return [node.args[0]]
    return list(node.args)


def _casts(node: fx.Node) -> bool:
    return node.target is torch.ops.prims.convert_element_type.default


def _squares(node: fx.Node) -> bool:
    return node.target is aten.pow.Tensor_Scalar and node.args[1] == 2


def _needs_memory(node: fx.Node) -> bool:
    return (
        matmuls.parse(node) is not None
        or operators.is_functional_collective(node)
        or operators.qualified_name(node)[0] == "overlap_inductor"
    )


def _stored_for(user: fx.Node) -> bool:
    """Whether ``user`` needs its input in memory. A view needs it if all readers of the view do."""
    if user.op == "output" or _needs_memory(user):
        return True
    return (tools.is_reshape(user) or tools.permutation(user) is not None) and all(map(_stored_for, user.users))
