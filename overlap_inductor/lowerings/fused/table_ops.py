# SPDX-License-Identifier: Apache-2.0
"""The op of schedule ``fused`` for lookups in embedding tables and the all-to-all that follows.

``fused_embedding_all_to_all(...) -> (results, token)``. ``results`` begins with the result of the all-to-all, flat.
With ``saves``, three results of ``_embedding_bag`` for each table follow, for the backward graph:

* the bag of each index
* the number of rows of each bag
* the row of each maximum, not filled because the kernel computes no maximum

If there is no workspace left for the site, the op runs the program's own lookups and the plain all-to-all. All ranks do
so, because their workspaces are alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_inductor.lowerings.fused.table_parameters import TableParameters
from overlap_inductor.lowerings.fused.table_parameters import needed
from overlap_inductor.lowerings.fused.table_parameters import parameters_of
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.one_op.ops import Tensors
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.runtime.workspace import workspace_of
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.memory import token_like

aten = torch.ops.aten
MODES = ("sum", "mean")
"""The ways to pool a bag. The index of a way in this tuple is torch's number for it."""


def _bags(indices: torch.Tensor, offsets: Sequence[torch.Tensor], last_offset: bool) -> int:
    return offsets[0].shape[0] - last_offset if offsets else indices.numel()


def _looked_up(
    tables: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    padding: list[int],
    mode: str,
    last_offset: bool,
) -> list[tuple[torch.Tensor, ...]]:
    """What the program's own ops return for each table."""
    if not offsets:
        return [(aten.embedding.default(t, i),) for t, i in zip(tables, indices, strict=True)]
    return [
        aten._embedding_bag.default(
            t, i, o, False, MODES.index(mode), False, samples[n] if samples else None, last_offset, padding[n]
        )
        for n, (t, i, o) in enumerate(zip(tables, indices, offsets, strict=True))
    ]


def _saved(
    tables: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    padding: list[int],
    mode: str,
    last_offset: bool,
) -> list[tuple[torch.Tensor, ...]]:
    """For each table, uninitialized tensors for the results of ``_embedding_bag`` after the first."""
    if all(i.is_cuda for i in indices):
        return [
            (i.new_empty(i.shape[0]), i.new_empty(o.shape[0]), i.new_empty(0))
            for i, o in zip(indices, offsets, strict=True)
        ]
    # On other devices, the shapes depend on the tables. The program's own ops tell the shapes.
    found = _looked_up(tables, indices, offsets, samples, padding, mode, last_offset)
    return [tuple(map(torch.empty_like, results[1:])) for results in found]


def _sent(pooled: Sequence[torch.Tensor], world_size: int, rows_first: bool) -> torch.Tensor:
    """What the program sends: for each rank, the results of all tables for that rank's slice of the batch."""
    slots = torch.stack([p.view(world_size, -1, p.shape[-1]) for p in pooled], 2 if rows_first else 1)
    return slots.view(-1)


def _ready(
    tables: Tensors, bags: int, settings: str, group: dist.ProcessGroup, site: str
) -> tuple[Launch, TableParameters] | None:
    """``(launch, parameters)`` for the site's kernel; ``None`` if the site has no workspace, or too little for
    this call."""
    like, place = tables[0], workspace_of(group, tables[0].device)
    sizes = group.size(), len(tables), bags // group.size(), like.shape[1], like.element_size()

    def made() -> tuple[Launch, TableParameters] | None:
        launch = place.launch(site, *needed(*sizes))
        return None if launch is None else (launch, parameters_of(settings, place.blocks))

    return place.known((site, settings, sizes, like.dtype), made)


def _embedding_all_to_all(
    chain: torch.Tensor,
    tables: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    padding: list[int],
    mode: str,
    last_offset: bool,
    rows_first: bool,
    saves: bool,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[Tensors, torch.Tensor]:
    group, token = resolve_group(group_name), token_like(chain)
    bags = _bags(indices[0], offsets, last_offset)
    found = _ready(tables, bags, settings, group, site)
    if found is None:
        results = _looked_up(tables, indices, offsets, samples, padding, mode, last_offset)
        sent = _sent([r[0].view(bags, -1) for r in results], group.size(), rows_first)
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent, group=group)
        return [out, *(t for r in results for t in r[1:] if saves)], token
    from overlap_inductor.lowerings.fused.table_calls import Lookups
    from overlap_inductor.lowerings.fused.table_calls import look_up

    flat = [i.reshape(-1) for i in indices]
    saved = _saved(tables, flat, offsets, samples, padding, mode, last_offset) if saves else []
    lookups = Lookups(
        tables,
        flat,
        [o.contiguous() for o in offsets],
        [s.contiguous() for s in samples],
        padding,
        bags,
        mode == "mean",
        last_offset,
        rows_first,
    )
    with call_order(tables[0].device):
        out = look_up(lookups, *found, [(s[0], s[1]) for s in saved])
    return [out, *(t for s in saved for t in s)], token


def _embedding_all_to_all_fake(
    chain: torch.Tensor,
    tables: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    padding: list[int],
    mode: str,
    last_offset: bool,
    rows_first: bool,
    saves: bool,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[Tensors, torch.Tensor]:
    bags = _bags(indices[0], offsets, last_offset)
    saved = _saved(tables, indices, offsets, samples, padding, mode, last_offset) if saves else []
    out = tables[0].new_empty(bags * len(tables) * tables[0].shape[1])
    return [out, *(t for s in saved for t in s)], chain.new_empty(1)


# ``offsets``: empty if each index is a bag. ``samples``: weights of the indices, or empty. ``padding``: each table's
# padding index, or -1. ``mode``: see ``MODES``. ``last_offset``, ``rows_first``: see ``table_calls.Lookups``.
define(
    "fused_embedding_all_to_all(Tensor chain, Tensor[] tables, Tensor[] indices, Tensor[] offsets, Tensor[] samples,"
    " int[] padding, str mode, bool last_offset, bool rows_first, bool saves, str settings, str group_name, str site)"
    " -> (Tensor[], Tensor)",
    _embedding_all_to_all,
    _embedding_all_to_all_fake,
)
