# SPDX-License-Identifier: Apache-2.0
"""``MatmulNode`` gives every kind of matmul node one form: operands, bias, scales, and the roles of dims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from overlap_inductor.facts import site as facts
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.torch_compat import operators

aten = torch.ops.aten
KINDS = {
    aten.mm.default: "mm",
    aten.addmm.default: "addmm",
    aten.bmm.default: "bmm",
    aten.baddbmm.default: "baddbmm",
    aten._scaled_mm.default: "scaled_mm",
    aten._int_mm.default: "int_mm",
}


@dataclass(frozen=True)
class MatmulNode:
    """``out[b, M, N] = lhs[b, M, K] @ rhs[b, K, N] (+ bias)``. Only bmm and baddbmm have the batch dim.

    Operands are read from the node each time, because an earlier site's rewrite may have replaced them.
    """

    node: fx.Node
    kind: str

    @property
    def inner(self) -> list[fx.Node]:
        """Empty: the matmul consists of ``node`` alone. A subclass may return further nodes (``sites.grouped``)."""
        return []

    @property
    def lhs(self) -> fx.Node:
        return self.node.args[1 if self.kind in ("addmm", "baddbmm") else 0]

    @property
    def rhs(self) -> fx.Node:
        return self.node.args[2 if self.kind in ("addmm", "baddbmm") else 1]

    @property
    def bias(self) -> fx.Node | None:
        if self.kind in ("addmm", "baddbmm"):
            return self.node.args[0]
        return operators.argument(self.node, "bias") if self.kind == "scaled_mm" else None

    @property
    def factors(self) -> tuple[fx.Node, ...]:
        """The operands that are multiplied."""
        return self.lhs, self.rhs

    @property
    def batched(self) -> bool:
        return self.kind in ("bmm", "baddbmm")

    def role(self, operand: str, dim: int) -> str:
        """Role of dim ``dim`` of ``lhs`` or ``rhs``: ``B``, ``M``, ``N`` or ``K``."""
        if self.batched:
            if dim == 0:
                return "B"
            dim -= 1
        return ("M", "K")[dim] if operand == "lhs" else ("K", "N")[dim]

    def operand_dim(self, operand: str, role: str) -> int | None:
        """The dim of ``lhs`` or ``rhs`` that has this role, or ``None``."""
        shift = 1 if self.batched else 0
        table = {"lhs": {"M": shift, "K": 1 + shift}, "rhs": {"K": shift, "N": 1 + shift}}[operand]
        return 0 if role == "B" and self.batched else table.get(role)

    def output_dim(self, role: str) -> int:
        shift = 1 if self.batched else 0
        return {"B": 0, "M": shift, "N": 1 + shift}[role]

    def output_role(self, dim: int) -> str:
        return ("B", "M", "N")[dim] if self.batched else ("M", "N")[dim]

    def describe(self, role: str | None) -> facts.Matmul:
        m, k = tools.shape(self.lhs)[-2:]
        n = tools.shape(self.rhs)[-1]
        batch = tools.shape(self.lhs)[0] if self.batched else 1
        text = tools.size_text
        name = str(tools.dtype(self.lhs)).removeprefix("torch.")
        return facts.Matmul(self.kind, text(m), text(n), text(k), name, text(batch), role)

    def scales(self) -> tuple[fx.Node | None, fx.Node | None]:
        if self.kind != "scaled_mm":
            return None, None
        return operators.argument(self.node, "scale_a"), operators.argument(self.node, "scale_b")

    def refusal(self) -> str | None:
        """Why this matmul cannot be cut at all, or ``None``."""
        if self.kind in ("addmm", "baddbmm") and (
            self.node.kwargs.get("beta", 1),
            self.node.kwargs.get("alpha", 1),
        ) != (1, 1):
            return (
                f"{self.kind} scales its terms (alpha={self.node.kwargs.get('alpha', 1)},"
                f" beta={self.node.kwargs.get('beta', 1)}); expected 1 for both"
            )
        if self.kind == "scaled_mm" and operators.argument(self.node, "scale_result") is not None:
            return "_scaled_mm has a scale_result; expected none"
        for scale, one_a_row in ((self.scales()[0], 0), (self.scales()[1], 1)):
            if scale is not None and not _is_plain_scale(scale, self.node, one_a_row):
                return (
                    f"the scale {scale.name} has shape {tools.shape(scale)}; expected one element, or one for each row"
                    " or column"
                )
        return None


def _is_plain_scale(scale: fx.Node, matmul: fx.Node, dim: int) -> bool:
    shape = tools.shape(scale)
    if tools.is_scalar_like(scale):
        return True
    return (
        len(shape) == 2
        and str(shape[dim]) == str(tools.shape(matmul)[dim])
        and isinstance(shape[1 - dim], int)
        and shape[1 - dim] == 1
    )


def parse(node: fx.Node) -> MatmulNode | None:
    """``node`` as a ``MatmulNode``, or ``None`` if its kind is not in ``KINDS``."""
    kind = KINDS.get(node.target)
    if kind is None or not tools.is_tensor(node):
        return None
    return MatmulNode(node, kind)


def folded(matmul: MatmulNode) -> list[fx.Node]:
    """The matmuls whose sum is the bias of ``matmul``: Inductor writes ``x @ a + y @ b`` as ``addmm(x @ a, y, b)``. A
    term may be scaled or cast. Empty for any other bias, or if a term cannot be cut or has another reader."""
    bias = matmul.bias
    return (bias is not None and matmul.kind == "addmm" and _summed(bias, matmul.node)) or []


def _summed(node: fx.Node, user: fx.Node) -> list[fx.Node] | None:
    """The matmuls (``mm`` and ``addmm`` that can be cut) of which ``node`` is the sum, each perhaps scaled or cast;
    else ``None``. ``user`` must be the only reader of ``node``, read it once and have its shape."""
    if set(node.users) != {user} or user.args.count(node) != 1 or not tools.is_tensor(node):
        return None
    if not tools.same_shape(node, user):
        return None
    matmul = parse(node)
    if matmul is not None:
        plain = (
            matmul.kind in ("mm", "addmm")
            and matmul.refusal() is None
            and not any(tools.has_unbacked(tools.shape(n)) for n in (matmul.lhs, matmul.rhs))
        )
        return [node] if plain else None
    if (source := _scaled(node)) is not None:
        return _summed(source, node)
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    terms = [_summed(a, node) for a in node.args]
    return None if None in terms else [n for term in terms for n in term]  # type: ignore[union-attr]


def _scaled(node: fx.Node) -> fx.Node | None:
    """The tensor that ``node`` casts, or multiplies by a number or by a tensor of fewer elements; else ``None``."""
    if tools.is_cast(node) and not tools.is_bitcast(node):
        return node.args[0]
    if node.target is not aten.mul.Tensor or node.kwargs:
        return None
    whole = [a for a in node.args if tools.is_tensor(a) and tools.same_shape(a, node)]
    return whole[0] if len(whole) == 1 else None


Slicer = Callable[[fx.Node, int], fx.Node]


def emit(
    graph: fx.Graph,
    matmul: MatmulNode,
    lhs: fx.Node,
    rhs: fx.Node,
    slicers: dict[str, Slicer],
    *,
    bias_slice: fx.Node | None = None,
) -> fx.Node:
    """Write the same matmul on slices of its operands. Return the new node, without ``meta``.

    Args:
        slicers: ``slicers[role](tensor, dim)`` cuts a bias, or scales of rows or columns, as the operands were cut.
        bias_slice: the bias, if it has been cut already.
    """

    def cut(tensor: fx.Node, role_of_dim: dict[int, str]) -> fx.Node:
        for dim, role in role_of_dim.items():
            if role in slicers and not (isinstance(tools.shape(tensor)[dim], int) and tools.shape(tensor)[dim] == 1):
                tensor = slicers[role](tensor, dim)
        return tensor

    bias = bias_slice or matmul.bias
    if bias is not None and bias_slice is None:
        rank = len(tools.shape(bias))
        roles = ["B", "M", "N"] if matmul.batched else ["M", "N"]
        bias = cut(bias, dict(enumerate(roles[len(roles) - rank :])))
    call = graph.call_function
    if matmul.kind == "scaled_mm":
        scale_a, scale_b = matmul.scales()
        if scale_a is not None and len(tools.shape(scale_a)) == 2:
            scale_a = cut(scale_a, {0: "M"})
        if scale_b is not None and len(tools.shape(scale_b)) == 2:
            scale_b = cut(scale_b, {1: "N"})
        rest: dict[str, Any] = {k: operators.argument(matmul.node, k) for k in ("out_dtype", "use_fast_accum")}
        return call(aten._scaled_mm.default, (lhs, rhs, scale_a, scale_b, bias), rest)
    if matmul.kind == "int_mm":
        return call(aten._int_mm.default, (lhs, rhs))
    if matmul.kind == "mm" or matmul.kind == "bmm":
        return call(aten.bmm.default if matmul.batched else aten.mm.default, (lhs, rhs))
    return call(aten.baddbmm.default if matmul.batched else aten.addmm.default, (bias, lhs, rhs))


def emit_partial(graph: fx.Graph, matmul: MatmulNode, lhs: fx.Node, rhs: fx.Node, total: fx.Node | None) -> fx.Node:
    """Write ``total + lhs @ rhs`` without bias, for a contraction in parts. Return the new node, without ``meta``.
    ``total``: the sum of the earlier parts, or ``None``.

    The new node and ``total`` are int32 for ``int_mm``. For another matmul, they have its result's dtype promoted with
    fp32: for example fp32 for bf16, and fp64 for fp64.
    """
    call = graph.call_function
    if matmul.kind == "int_mm":
        partial = call(aten._int_mm.default, (lhs, rhs))
        return partial if total is None else call(aten.add.Tensor, (total, partial))
    kind = tools.dtype(matmul.node)
    wide = torch.promote_types(kind, torch.float32)
    if kind is not wide:
        if tools.value(matmul.lhs).device.type == "cuda" and not matmul.batched:
            partial = call(aten.mm.dtype, (lhs, rhs, wide))
            return partial if total is None else call(aten.add.Tensor, (total, partial))
        lhs, rhs = (call(torch.ops.prims.convert_element_type.default, (x, wide)) for x in (lhs, rhs))
    if total is None:
        return call(aten.bmm.default if matmul.batched else aten.mm.default, (lhs, rhs))
    return call(aten.baddbmm.default if matmul.batched else aten.addmm.default, (total, lhs, rhs))
