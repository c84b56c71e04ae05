# SPDX-License-Identifier: Apache-2.0
"""``AttentionNode`` presents scaled dot-product attention as a matmul. Its contracted dim (K) counts keys.

::

    out[b, h, M, N] = softmax(scale * query[b, h, M, D] @ key[b, h, K, D]^T + mask[b, h, M, K]) @ value[b, h, K, N]
    log_sum_exp[b, h, M]: the logarithm of the sum by which the softmax divides
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import fx

from overlap_inductor.facts import site as facts
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.torch_compat import operators

aten = tools.aten
KEYS = 2


@dataclass(frozen=True)
class _Kind:
    """An attention op that can run on a part of the keys. Its first two results are the output and the log-sum-exp.

    Attributes:
        mask: name of the argument that is added to the scores. ``None`` if the op has none, or if this package
            passes none: then attention that hides keys from queries is refused.
        mask_dims: the fewest dims of a mask: 2 (queries and keys), or 4 (with batch and heads).
        mask_block: an op with a mask must read a multiple of this number of keys.
        unread: an argument that the op as written must not have.
        asks_for_sums: whether the op needs ``compute_log_sumexp`` for the log-sum-exp.
        hidden_is_zero: whether a query that sees no key gets 0. If not, its output is not defined.
    """

    mask: str | None
    mask_dims: int = 4
    mask_block: int = 1
    unread: str | None = None
    asks_for_sums: bool = False
    hidden_is_zero: bool = False


_CUT = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _Kind("attn_mask", mask_dims=2, hidden_is_zero=True),
    aten._scaled_dot_product_flash_attention.default: _Kind(None),
    # The kernels of this op load rows of the mask in vectors of 16 bytes.
    aten._scaled_dot_product_efficient_attention.default: _Kind("attn_bias", mask_block=8, asks_for_sums=True),
    aten._scaled_dot_product_cudnn_attention.default: _Kind(None, unread="attn_bias", asks_for_sums=True),
}
_KNOWN = {*_CUT, aten._scaled_dot_product_fused_attention_overrideable.default}


@dataclass(frozen=True)
class AttentionNode(MatmulNode):
    @property
    def lhs(self) -> fx.Node:
        return self._operand("query")

    @property
    def rhs(self) -> fx.Node:
        return self._operand("key")

    @property
    def value(self) -> fx.Node:
        return self._operand("value")

    @property
    def mask(self) -> fx.Node | None:
        """The tensor that is added to the scores: ``-inf`` for a key that a query does not see."""
        name = _CUT[self.node.target].mask
        found: fx.Node | None = None if name is None else operators.argument(self.node, name)
        return found

    @property
    def is_causal(self) -> bool:
        """Whether query ``i`` sees only the keys 0 to ``i``."""
        return bool(operators.argument(self.node, "is_causal"))

    @property
    def hides_keys(self) -> bool:
        return self.is_causal or self.mask is not None

    @property
    def mask_block(self) -> int:
        return _CUT[self.node.target].mask_block

    @property
    def mask_dims(self) -> int:
        return _CUT[self.node.target].mask_dims

    @property
    def hidden_is_zero(self) -> bool:
        return _CUT[self.node.target].hidden_is_zero

    @property
    def factors(self) -> tuple[fx.Node, ...]:
        return self.lhs, self.rhs, self.value

    @property
    def sizes(self) -> tuple[list[Size], Size, Size, Size, Size]:
        """``([batch, heads], queries, keys, width of a key, width of a value)``."""
        *batch, queries, width = tools.shape(self.lhs)
        return batch, queries, tools.shape(self.rhs)[KEYS], width, tools.shape(self.value)[-1]

    def results(self) -> dict[fx.Node, int]:
        """The nodes that take the op's results, each with the number of its result. 0 is the output."""
        return {user: user.args[1] for user in self.node.users if user.target is getitem}

    def refusal(self) -> str | None:
        name = self.node.name
        if self.node.target not in _CUT:
            return f"{name} ({self.node.target}) is a kind of attention that this version cannot cut"
        kind = _CUT[self.node.target]
        if any(len(tools.shape(n)) != 4 for n in self.factors):
            return f"{name} reads tensors of {len(tools.shape(self.lhs))} dims; expected batch, heads, tokens and width"
        if dropout := operators.argument(self.node, "dropout_p"):
            return f"{name} drops weights at random (dropout_p={dropout}); expected no dropout"
        if operators.argument(self.node, "return_debug_mask"):
            return f"{name} returns a debug mask; expected return_debug_mask=False"
        if kind.mask is None and (self.is_causal or kind.unread and operators.argument(self.node, kind.unread)):
            given = "is_causal" if self.is_causal else kind.unread
            return f"{name} ({self.node.target}) has {given}, but its pieces cannot hide keys from queries"
        if self.is_causal and self.mask is not None:
            return f"{name} has both is_causal and a mask; expected one of them"
        return None

    def describe(self, role: str | None) -> facts.Matmul:
        batch, queries, keys, _, width = self.sizes
        text = tools.size_text
        name = str(tools.dtype(self.lhs)).removeprefix("torch.")
        return facts.Matmul(self.kind, text(queries), text(width), text(keys), name, text(tools.numel(batch)), role)

    def _operand(self, name: str) -> fx.Node:
        found: fx.Node = operators.argument(self.node, name)
        return found


def parse(node: fx.Node) -> AttentionNode | None:
    return AttentionNode(node, "attention") if node.op == "call_function" and node.target in _KNOWN else None


def readers(sources: Iterable[fx.Node], follows: Callable[[fx.Node], bool], steps: int) -> Iterator[AttentionNode]:
    """The attention ops whose keys or values come from ``sources``, nearest first.

    Fewer than ``steps`` nodes stand in between, and ``follows`` is true of each of them. An op may be yielded for its
    keys and again for its values. Ops whose results are not read are skipped.
    """
    frontier = [*sources]
    seen = {*frontier}
    for _ in range(steps):
        reached: list[fx.Node] = []
        for node in frontier:
            for user in node.users:
                found = parse(user)
                if found is not None:
                    if node in (found.rhs, found.value) and any(result.users for result in found.results()):
                        yield found
                elif user not in seen and follows(user):
                    seen.add(user)
                    reached.append(user)
        frontier = reached


def arguments_of_piece(
    attention: AttentionNode, key: fx.Node, value: fx.Node, mask: fx.Node | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of an op on a part of the keys and values. ``mask`` is added to the scores
    of these keys."""
    values: dict[str, Any] = {"key": key, "value": value}
    kind = _CUT[attention.node.target]
    if mask is not None and kind.mask is not None:
        values[kind.mask] = mask
    if kind.asks_for_sums:
        values["compute_log_sumexp"] = True
    if attention.is_causal:
        values["is_causal"] = False
    return operators.with_arguments(attention.node, values)
