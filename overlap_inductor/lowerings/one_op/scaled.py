# SPDX-License-Identifier: Apache-2.0
"""Check sites of fp8 matmuls (``_scaled_mm``), and lay out their scales for the op
``overlap_inductor::<schedule>_scaled_<pattern>``.

An operand has either one scale or several: one for each row of a left operand, one for each column of a right operand.
Scales of rows cover the rows of all ranks: first those of rank 0, then those of rank 1, and so on. If the op computes
the transposed product, the scales of the two operands are swapped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.one_op.form import form_of
from overlap_inductor.lowerings.rows import rows_in_place
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat import operators


def is_scaled(site: OverlapSite) -> bool:
    return any(m.kind == "scaled_mm" for m in site.matmuls)


def why_not(site: OverlapSite) -> str | None:
    """Why no op of scaled matmuls can compute this site; ``None`` if one can. Sizes are not checked here."""
    kinds = sorted({m.kind for m in site.matmuls})
    if len(kinds) > 1:
        return (
            f"the site has matmuls of the kinds {' and '.join(kinds)}; one op computes either scaled fp8 matmuls or"
            " plain ones"
        )
    if (reason := form_of(site).why_not_scaled(site)) is not None:
        return reason
    for matmul, transposed, _ in _matmuls(site):
        left, right = tools.dtype(matmul.lhs), tools.dtype(matmul.rhs)
        if transposed and left != right:
            return f"the op would compute the transposed product of {right} and {left}; expected one dtype"
    return None


def why_not_right(left: torch.Tensor, right: torch.Tensor) -> str | None:
    """Why the vendor's library cannot read the fp8 operand ``right [K, N]`` as the op passes it; ``None`` if it can."""
    inner, apart = right.stride()
    if inner != 1 or apart < right.shape[0] or apart % 16:
        return (
            f"the right operand is {right.dtype}{list(right.shape)} with strides {list(right.stride())}; expected"
            " contiguous columns, which start a multiple of 16 bytes apart"
        )
    return None


def _matmuls(site: OverlapSite) -> list[tuple[MatmulNode, bool, ShardedDim]]:
    """For each matmul: the matmul, whether the op computes its transposed product, and the dim that is cut into
    shards."""
    nodes = site.nodes
    described = zip(nodes.matmuls, nodes.roles, nodes.sharded_dims, strict=True)
    return [(matmul, role == "N", sharded) for matmul, role, sharded in described]


def terms(emit: StepEmitter, site: OverlapSite) -> list[tuple[Any, ...]]:
    """For each matmul: ``(scale_a, scale_b, name of the result's dtype, use_fast_accum)``."""
    return [_terms(emit, *matmul) for matmul in _matmuls(site)]


def _terms(
    emit: StepEmitter, matmul: MatmulNode, transposed: bool, sharded: ShardedDim
) -> tuple[fx.Node, fx.Node, str, bool]:
    a, b = matmul.scales()
    assert a is not None and b is not None
    if transposed:
        a, b = (x if tools.is_scalar_like(x) else emit.reshape(x, tools.shape(x)[::-1]) for x in (b, a))
    if not tools.is_scalar_like(a):
        a = rows_in_place(emit, emit.whole_chunks(a, 0, sharded), sharded, from_ranks=False)
    return (
        a,
        b,
        str(tools.dtype(matmul.node)).removeprefix("torch."),
        bool(operators.argument(matmul.node, "use_fast_accum")),
    )
