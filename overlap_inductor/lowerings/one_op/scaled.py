"""Sites of fp8 matmuls (``_scaled_mm``) as one op, ``overlap_inductor::<schedule>_scaled_<pattern>``: which these are,
and what the op is told of their scales.

A scale is of a whole operand (one element), or of a row of the left one and a column of the right one each. To the op
it is an operand: of all gathered rows, in the ranks' order where the rows are, and of the other side where the
transposed product is computed. (A scale that needs the gathered tensor makes no site: ``gather_finder``.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from overlap_inductor.lowerings.one_op import rows as looping
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.matmuls import MatmulNode
from overlap_inductor.sites.nodes import GatherNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat import operators


def is_scaled(site: OverlapSite) -> bool:
    return any(m.kind == "scaled_mm" for m in site.matmuls)


def why_not(site: OverlapSite) -> str | None:
    """Why no op of scaled matmuls computes this site, whatever its rows and sizes are."""
    kinds = sorted({m.kind for m in site.matmuls})
    if len(kinds) > 1:
        return (
            f"its matmuls are of the kinds {' and '.join(kinds)}; one op multiplies either fp8 with scales or plain"
            " matrices"
        )
    moved = tools.dtype(site.collectives[0].input)
    if isinstance(site.nodes, GatherNodes):
        operand = tools.dtype(site.nodes.consumers[0].operand_node)
        if moved.itemsize != operand.itemsize:
            return (
                f"{moved} is gathered and made {operand} behind the gather; expected what is gathered to be {operand}"
            )
    elif moved not in (torch.bfloat16, torch.float16):
        return f"partial sums of {moved} are reduced; expected fp16 or bf16"
    for matmul, transposed, _ in _matmuls(site):
        left, right = tools.dtype(matmul.lhs), tools.dtype(matmul.rhs)
        if transposed and left != right:
            return f"its transposed product would be one of {right} and {left}; expected one dtype"
    return None


def why_not_right(left: torch.Tensor, right: torch.Tensor) -> str | None:
    """Why the vendor's library does not take ``right [K, N]``, as the op sees it."""
    inner, apart = right.stride()
    if inner != 1 or apart < right.shape[0] or apart % 16:
        return (
            f"the right operand is {right.dtype}{list(right.shape)} with strides {list(right.stride())}; expected"
            " columns of whole 16-byte words"
        )
    return None


def _matmuls(site: OverlapSite) -> list[tuple[MatmulNode, bool, ShardedDim]]:
    """Each matmul, whether the op computes its transposed product, and how its rows there lie."""
    if isinstance(site.nodes, GatherNodes):
        return [(c.matmul, c.role == "N", c.sharded) for c in site.nodes.consumers]
    return [(m, site.nodes.sharded.dim == 1, site.nodes.sharded) for m in site.nodes.leaves]


def terms(emit: StepEmitter, site: OverlapSite) -> tuple[Any, ...]:
    """The op's ``(scale_a, scale_b, name of the dtype, fast)``; in a gather each a list with one of each matmul."""
    found = [_terms(emit, *matmul) for matmul in _matmuls(site)]
    return tuple(map(list, zip(*found, strict=True))) if isinstance(site.nodes, GatherNodes) else found[0]


def _terms(
    emit: StepEmitter, matmul: MatmulNode, transposed: bool, sharded: ShardedDim
) -> tuple[fx.Node, fx.Node, str, bool]:
    a, b = matmul.scales()
    assert a is not None and b is not None
    if transposed:
        a, b = (x if tools.is_scalar_like(x) else emit.reshape(x, tools.shape(x)[::-1]) for x in (b, a))
    if not tools.is_scalar_like(a):
        a = looping.rows_in_place(emit, emit.whole_chunks(a, 0, sharded), sharded, from_ranks=False)
    return (
        a,
        b,
        str(tools.dtype(matmul.node)).removeprefix("torch."),
        bool(operators.argument(matmul.node, "use_fast_accum")),
    )
