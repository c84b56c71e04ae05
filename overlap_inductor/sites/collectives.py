# SPDX-License-Identifier: Apache-2.0
"""Find the collectives of a graph, and the reason why a collective cannot become a site."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from overlap_inductor.facts import site as facts
from overlap_inductor.facts.decision import Reason
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.all_to_all import changes_shards
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.distributed import group_description
from overlap_inductor.torch_compat.distributed import group_ranks

_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}


_NOT_MOVING = {
    "wait_tensor",
    "_wrap_tensor_autograd",
    "mesh_get_process_group",
    "get_remote_tensors",
    "_rendezvous",
    "memset32_",
    "check_for_nan",
}
"""Operators in ``_NAMESPACES`` that move no data between ranks."""
_POINT_TO_POINT = {
    "isend",
    "irecv",
    "batch_p2p_ops",
    "nccl_put",
    "nccl_get",
    "nvshmem_put",
    "nvshmem_get",
    "nccl_put_with_signal",
    "nvshmem_put_with_signal",
}
_NAMESPACES = (*operators.FUNCTIONAL_COLLECTIVES, "c10d_functional", "c10d", "_dtensor", "symm_mem")


def _kind(node: fx.Node) -> tuple[str, Reason | None] | None:
    """``(kind, reason)`` if ``node`` is a collective, else ``None``. ``reason``: why it cannot be a site, or ``None``.
    Any op in ``_NAMESPACES`` and not in ``_NOT_MOVING`` is a collective."""
    namespace, name = operators.qualified_name(node)
    if namespace not in _NAMESPACES or name in _NOT_MOVING:
        return None
    if namespace == "symm_mem" and name.startswith("fused_"):
        return "fused", Reason(
            "taken_by_async_tp",
            f"Inductor's own async TP replaced this site by {name} before the overlap pass ran; set"
            " torch._inductor.config._micro_pipeline_tp to False to leave the site to overlap_inductor",
        )
    if changes_shards(node):
        return "all_to_all", None
    base = name.removesuffix("_")
    if namespace not in operators.FUNCTIONAL_COLLECTIVES:
        return base, Reason(
            "pattern_not_available",
            f"{namespace}::{name} is not a functional collective; this version overlaps only those",
        )
    if base in _NAMES:
        if base != name:
            return _NAMES[base], Reason("out_variant", f"{name} works in place; expected the functional form, {base}")
        return _NAMES[base], None
    if base.endswith("_coalesced"):
        kind = base.removesuffix("_coalesced")
        return _NAMES.get(kind, kind), Reason(
            "coalesced", f"{name} moves several tensors at once; expected one collective for each tensor"
        )
    if name.endswith("_out"):
        kind = name.removesuffix("_out")
        return _NAMES.get(kind, kind), Reason(
            "out_variant", f"{name} writes into the caller's buffer; expected the functional form, {kind}"
        )
    return base, Reason("pattern_not_available", f"this version does not overlap {name}")


def group_name(node: fx.Node) -> str | None:
    """The name of a collective's process group, or ``None``. The collective's argument is the name, or a node that
    holds the group, for example if one rank compiles for all ranks."""
    name = operators.argument(node, "group_name") or operators.argument(node, "process_group")
    if isinstance(name, str):
        return name
    if isinstance(name, fx.Node):
        name = name.meta.get("val")
    found = getattr(name, "group_name", None)
    return found if isinstance(found, str) else None


def group_of(node: fx.Node) -> str | None:
    """The name of the process group of a collective outside ``c10d`` and ``c10d_functional``, else ``None``."""
    functional = operators.qualified_name(node)[0] not in ("c10d", "c10d_functional")
    return group_name(node) if functional and _kind(node) is not None else None


def kept_kind(node: fx.Node) -> str | None:
    """Kind and dtype (``"all_reduce bfloat16"``) of a collective that every rank of its group must call, else ``None``.
    Only the kind if the collective reads no tensor. Also ``None`` for a collective in ``c10d`` or
    ``c10d_functional``."""
    found = _kind(node)
    if found is None or found[0] in _POINT_TO_POINT or operators.qualified_name(node)[0] in ("c10d", "c10d_functional"):
        return None
    sources = [n for n in node.all_input_nodes if tools.is_tensor(n)]
    return f"{found[0]} {str(tools.dtype(sources[0])).removeprefix('torch.')}" if sources else found[0]


def is_a_wait(node: fx.Node) -> bool:
    """Whether ``node`` is the wait of a collective, or a view of a wait."""
    while tools.is_reshape(node):
        node = node.args[0]
    return operators.is_wait(node)


def _bytes(node: fx.Node, kind: str) -> int | str:
    value = tools.value(node)
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    if not isinstance(value, torch.Tensor):
        return 0
    source = node.args[0] if kind == "reduce_scatter" else node
    sizes = tools.shape(source) if tools.is_tensor(source) else list(value.shape)
    return tools.size_text(tools.numel(sizes) * value.dtype.itemsize)


def describe(node: fx.Node, kind: str, dim: int | None = None, role: str | None = None) -> facts.Collective:
    """The collective as plain facts. ``dim`` and ``role`` are copied into them."""
    name = group_name(node)
    ranks = group_ranks(name) if name is not None else None
    value = tools.value(node)
    dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""
    reduce_op = operators.argument(node, "reduce_op")
    return facts.Collective(
        kind=kind,
        ranks=ranks or (),
        group_name=name or "",
        dtype=dtype,
        mesh_dim=group_description(name) if name is not None and ranks else None,
        dim=dim,
        role=role,
        reduce_op=str(reduce_op).lower() if reduce_op is not None else None,
        bytes=_bytes(node, kind),
    )


def _wait_of(node: fx.Node) -> fx.Node | Reason:
    """The wait of the collective ``node``, or ``node`` itself if it needs no wait. If the wait's only user is another
    wait, the last wait of this chain is returned.

    A ``Reason`` if the collective has no wait, more than one wait, or another user. The graph's output does not count
    as a user. Reads of the number of rows that an all-to-all receives do not count either.
    """
    if changes_shards(node):
        return node
    waits = [u for u in node.users if operators.is_wait(u)]
    others = [u for u in node.users if u not in waits and u.op != "output" and not _reads_rows(u, node)]
    if len(waits) != 1 or others:
        return Reason(
            "no_wait",
            f"the collective's result has {len(waits)} waits and {len(others)} users without a wait; expected"
            " one wait and no other user",
        )
    wait = waits[0]
    while len(wait.users) == 1 and operators.is_wait(next(iter(wait.users))):
        wait = next(iter(wait.users))
    return wait


def _reads_rows(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` only reads how many rows the all-to-all ``node`` receives (``all_to_all.write_row_counts``)."""
    is_exchange = _NAMES.get(operators.qualified_name(node)[1]) == "all_to_all"
    return is_exchange and user.target is torch.ops.aten.sym_size.int and user.args[1] == 0


def find_collectives(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, CollectiveNode | Reason]]:
    """Every collective in graph order: ``(node, kind, CollectiveNode)``, or ``(node, kind, Reason)`` if the collective
    cannot become a site."""
    for node in graph.nodes:
        found = _kind(node)
        if found is None:
            continue
        kind, reason = found
        if reason is not None:
            yield node, kind, reason
            continue
        wait = _wait_of(node)
        if isinstance(wait, Reason):
            yield node, kind, wait
            continue
        name = group_name(node)
        ranks = group_ranks(name) if name is not None else None
        if name is None or ranks is None:
            yield (
                node,
                kind,
                Reason("group_not_resolved", f"the collective's process group {name!r} does not exist in this process"),
            )
            continue
        reduce_op = operators.argument(node, "reduce_op")
        yield (
            node,
            kind,
            CollectiveNode(node, wait, kind, name, ranks, str(reduce_op).lower() if reduce_op is not None else None),
        )
