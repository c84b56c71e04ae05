# SPDX-License-Identifier: Apache-2.0
"""Compute a site's sizes for the cost model, at the example's token count or a multiple of it.

The example is the inputs with which the model is compiled. All ranks must make the same decision, but some of a
matmul's dims may differ between ranks. These are rounded to five significant bits, and usually become equal (3670 and
3668 become 3712). If the ranks' plans still differ, all ranks run the plain program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.facts.machine import WITHOUT_PEERS
from overlap_inductor.facts.machine import Machine
from overlap_inductor.facts.machine import machine_for
from overlap_inductor.facts.machine_file import told
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.grouped import GroupedNode
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import MatmulSizes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.target import target

_PACKED = ("mm", "addmm", "bmm", "baddbmm")
"""Kinds of matmuls (``MatmulNode.kind``) whose operands a CPU's library packs anew for each piece."""
_scale: ContextVar[float] = ContextVar("overlap_inductor_scale", default=1.0)


@contextmanager
def at_scale(factor: float) -> Iterator[None]:
    """In this context, the example's value of every symbolic size is multiplied by ``factor``."""
    token = _scale.set(factor)
    try:
        yield
    finally:
        _scale.reset(token)


def hint(size: Any) -> int:
    if isinstance(size, torch.SymInt) and size.node.hint is not None:
        return max(math.ceil(int(size.node.hint) * _scale.get()), 1)
    return int(size)


def _scaled(sizes: list[Any], scale: float) -> list[int]:
    """The example's values (hints) of ``sizes``, the first symbolic one multiplied by ``scale``. No second size is
    multiplied, because the token count may be the product of several symbolic sizes."""
    symbolic = next((i for i, size in enumerate(sizes) if isinstance(size, torch.SymInt)), None)
    return [math.ceil(hint(size) * scale) if i == symbolic else hint(size) for i, size in enumerate(sizes)]


def rounded(size: int) -> int:
    grain = 1 << max(size.bit_length() - 5, 0)
    return (size + grain // 2) // grain * grain


def _example_sizes(sizes: MatmulSizes) -> tuple[list[Size], Size, Size, Size]:
    """``(batch, M, N, K)``. Dims that may differ between ranks are rounded."""
    m, n, k = (rounded(hint(s)) if role in sizes.own else s for role, s in zip("MNK", (sizes.m, sizes.n, sizes.k)))
    return sizes.batch, m, n, k


def has_example(site: OverlapSite) -> bool:
    """Whether every size of the site is known for the example. Sizes that depend on data are not."""
    matmuls = [size for m in site.nodes.matmul_sizes() for size in (*m.batch, m.m, m.n, m.k)]
    return not tools.has_unbacked([*matmuls, *tools.shape(site.collectives[0].input)])


def sizes_at(site: OverlapSite, scale: float = 1.0) -> cost_model.SiteSizes:
    """FLOPs, bytes and tiles of the site at ``scale`` times its example token count. The FLOPs are those of the site's
    matmuls; other ops count none."""
    flops, skipped, tiles = 0.0, 0.0, 0
    sizes = site.nodes.matmul_sizes()
    for matmul in sizes:
        batch, m, n, k = _example_sizes(matmul)
        multiplied = 2.0 * math.prod(map(hint, (*batch, m, k, n)))
        flops += multiplied
        skipped += multiplied * _hidden(hint(m), hint(k)) if matmul.causal else 0.0
        # Tiles do not grow in proportion to ``scale``: 16 rows take one tile, and so do 128.
        *batches, rows, columns = _scaled([*batch, m, n], scale)
        its_tiles = -(-rows // 128) * -(-columns // 256) * math.prod(batches)
        # Matmuls of a sum run one after the other, so only the one with the most tiles counts.
        tiles = max(tiles, its_tiles) if site.nodes.is_sum else tiles + its_tiles
    moved = moved_by(site.nodes.moved[0])
    sent = sum(moved_by(collective).bytes_sent for collective in site.nodes.moved)
    itemsize = tools.dtype(site.matmuls[0].factors[0]).itemsize
    cut = [(m, s, r) for m, s, r in zip(site.matmuls, sizes, site.nodes.roles, strict=True) if m.kind in _PACKED]
    gathered = sum(map(_local_bytes, site.nodes.moved)) * (moved.world_size if moved.gathers else 1)
    handed_out = gathered if site.nodes.hands_out_gathered() else 0.0
    return dataclasses.replace(
        moved,
        outputs=moved.gathers and site.nodes.is_sum,
        legs=moved.legs + site.nodes.returns,
        flops=flops * scale,
        skipped=skipped * scale,
        bytes_sent=sent * scale,
        itemsize=itemsize,
        tiles=tiles,
        handed_out=handed_out * scale,
        received=sent * scale if moved.exchanges and site.nodes.is_sum else 0.0,
        contracted=sent * scale if moved.exchanges and set(site.nodes.roles) == {"K"} else 0.0,
        memory=sum(s.memory for s in sizes) * scale,
        repeated=sum(_repeated(s, role, scale) * tools.dtype(m.node).itemsize for m, s, role in cut),
        lookups=sum(s.memory > 0 for s in sizes),
        in_stretch=site.facts.derived_from is not None,
        weights=sum(
            _weights(m, hint(s.m) * scale)
            for m, s in zip(site.matmuls, sizes, strict=True)
            if isinstance(m, GroupedNode)
        ),
    )


def _hidden(queries: int, keys: int) -> float:
    """The mean share of the keys that ``is_causal`` excludes for a query."""
    if not queries or not keys:
        return 0.0
    below = min(queries, keys)
    return 1.0 - (below * (below + 1) / 2 + (queries - below) * keys) / (queries * keys)


def _weights(matmul: GroupedNode, rows: float) -> float:
    """Bytes of the weights that a grouped matmul of ``rows`` rows reads. Weights of experts without rows are not
    read."""
    experts, *sizes = map(hint, tools.shape(matmul.rhs))
    return float(min(experts, rows) * math.prod(sizes) * tools.dtype(matmul.rhs).itemsize)


def _repeated(sizes: MatmulSizes, cut: str, scale: float) -> float:
    """``SiteSizes.repeated`` of one matmul whose dim ``cut`` is cut, in elements."""
    batch, m, n, k = _example_sizes(sizes)
    elements = {"M": [n, k], "N": [m, k], "K": [2, m, n]}.get(cut)
    return float(math.prod(_scaled([*batch, *elements], scale))) if elements else 0.0


def moved_by(collective: CollectiveNode) -> cost_model.SiteSizes:
    """The sizes of the collective alone: its bytes and legs, with FLOPs and tiles 0."""
    local, world_size = _local_bytes(collective), collective.world_size
    gathers = collective.kind == "all_gather"
    sent = local * (world_size - 1) * (1.0 if gathers else 1.0 / max(world_size, 1))
    if _sends_to_one_rank(collective):
        sent = local
    legs = 2 if collective.kind == "all_reduce" else 1
    itemsize, exchanges = tools.dtype(collective.input).itemsize, collective.kind == "all_to_all"
    return cost_model.SiteSizes(0.0, sent, itemsize, world_size, legs, 0, gathers, exchanges=exchanges)


def _sends_to_one_rank(collective: CollectiveNode) -> bool:
    """Whether this rank sends to one rank only, in an all-to-all: all parts but one are known to be empty."""
    parts = operators.argument(collective.node, "input_split_sizes") if collective.kind == "all_to_all" else None
    return isinstance(parts, list | tuple) and len(parts) > 1 and sum(part != 0 for part in parts) == 1


def _local_bytes(collective: CollectiveNode) -> float:
    source = tools.value(collective.input)
    return float(hint(tools.numel(list(source.shape)))) * source.dtype.itemsize


def machine_of(site: OverlapSite, config: OverlapConfig) -> Machine:
    return machine_at(site.collectives[0], config)


def machine_at(collective: CollectiveNode, config: OverlapConfig) -> Machine:
    return machine_between(collective.ranks or (), tools.value(collective.input).device, config)


def machine_between(ranks: tuple[int, ...], device: torch.device, config: OverlapConfig) -> Machine:
    """The rates and fixed costs of a group with the global ranks ``ranks``, from the first source that applies:

    1. the machine that ``target.planning_for`` names;
    2. ``WITHOUT_PEERS``, if the GPUs of these ranks cannot access each other's memory;
    3. the device type.

    Facts that ``config.machine`` states replace these values.
    """
    if (box := target()) is not None:
        return told(box.machine, config.machine)
    return told(machine_for(WITHOUT_PEERS if symmetric.without_peers(ranks, device) else device.type), config.machine)
