# SPDX-License-Identifier: Apache-2.0
"""Define ops that run a whole site. Schedules that define their ops here share one schema for each pattern.

Shapes on one of W ranks: ``shard [m, K]``, ``rhs [K, N]``, ``lhs [rows, K]``. A reduce-scatter's ``lhs`` has ``W*m``
rows; an all-reduce's ``lhs`` may have any number of rows. All ops return the chain's next token last. ``settings`` is
JSON text of the schedule's parameters.

An op runs the plain collective and matmul in any of these cases:

- The site has no rows.
- The rows of W shards are fewer than the parameter ``min_rows``. If W does not divide an all-reduce's rows, a shard's
  rows are rounded up.
- The site has more rows than its workspace was planned for.
- The group had no room for the site's workspace.

Rows and workspace are equal on all ranks, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import torch
import torch.distributed as dist

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.library import define
from overlap_inductor.runtime.arena import Need
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.runtime.workspace import workspace_of
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.memory import token_like

Tensors = list[torch.Tensor]
Optional = Sequence[torch.Tensor | None]


class SitePlan(Protocol):
    """What an op calls in the schedule's ``parameters`` module. ``needed`` returns the ``(bytes, signals)`` of a call's
    slot: the part of the workspace that the call uses. A protocol other than ``runtime.arena.CREDITS`` follows."""

    def parameters_of(self, settings: str, blocks: int, /) -> Any: ...
    def needed(
        self, pattern: str, world_size: int, rows: int, inner: int, columns: int, itemsize: int, parameters: Any, /
    ) -> Need: ...


Gather = Callable[[torch.Tensor, Sequence[torch.Tensor], Optional, bool, Launch, Any], Tensors]
"""``(shard, rhs, biases, gathered_used, launch, parameters) -> results``, then the gathered tensor if it is used."""
Reduce = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor | None, bool, Launch, Any], torch.Tensor]
"""``(pattern, lhs, rhs, bias, average, launch, parameters) -> result``."""


def ready(
    plan: SitePlan,
    pattern: str,
    rows: int,
    a: torch.Tensor,
    b: torch.Tensor,
    sent: torch.dtype,
    group: dist.ProcessGroup,
    site: str,
    settings: str,
) -> tuple[Launch, Any] | None:
    """``(launch, parameters)`` for the kernels that compute ``a @ b``; ``None`` if the plain collective and matmul must
    run. Launch the kernels inside the device's ``call_order``.

    Args:
        rows: rows of a shard, rounded up.
        sent: dtype of the elements that the collective moves.

    Raises:
        OverlapError: the group's workspace cannot be made, or the site's slot in it was not prepared.
    """
    if rows == 0:
        return None
    place = workspace_of(group, a.device)

    def made() -> tuple[Launch, Any] | None:
        parameters, world_size, (inner, columns) = plan.parameters_of(settings, place.blocks), group.size(), b.shape
        if parameters.min_rows > rows * world_size:
            return None
        launch = place.launch(site, *plan.needed(pattern, world_size, rows, inner, columns, sent.itemsize, parameters))
        return None if launch is None else (launch, parameters)

    return place.known((plan, site, pattern, settings, rows, b.shape, sent), made)


def define_gather(schedule: str, plan: SitePlan, gather: Gather) -> None:
    """Define op ``<schedule>_all_gather_matmul``. It returns ``([result [W*m, N] of each matmul ...], token)``. With
    ``gathered_used``, the gathered tensor ``[W*m, K]`` ends the list."""

    def implementation(
        chain: torch.Tensor,
        shard: torch.Tensor,
        rhs: Tensors,
        biases: Optional,
        gathered_used: bool,
        settings: str,
        group_name: str,
        site: str,
    ) -> tuple[Tensors, torch.Tensor]:
        group, token = resolve_group(group_name), token_like(chain)
        found = ready(plan, "all_gather_matmul", shard.shape[0], shard, rhs[0], shard.dtype, group, site, settings)
        if found is None:
            gathered, outs = reference.all_gather_matmul(shard, rhs, biases, group)
            return [*outs, gathered] if gathered_used else outs, token
        with call_order(shard.device):
            return gather(shard, rhs, biases, gathered_used, *found), token

    def fake(
        chain: torch.Tensor,
        shard: torch.Tensor,
        rhs: Tensors,
        biases: object,
        gathered_used: bool,
        settings: str,
        group_name: str,
        site: str,
    ) -> tuple[Tensors, torch.Tensor]:
        rows = resolve_group(group_name).size() * shard.shape[0]
        widths = [b.shape[1] for b in rhs] + ([shard.shape[1]] if gathered_used else [])
        return [shard.new_empty(rows, width) for width in widths], chain.new_empty(1)

    schema = (
        "(Tensor chain, Tensor shard, Tensor[] rhs, Tensor?[] biases, bool gathered_used, str settings, str group_name,"
        " str site) -> (Tensor[], Tensor)"
    )
    define(f"{schedule}_all_gather_matmul{schema}", implementation, fake)


def define_reductions(schedule: str, plan: SitePlan, reduce: Reduce) -> None:
    """Define ops ``<schedule>_matmul_reduce_scatter`` and ``<schedule>_matmul_all_reduce``. They return ``(result,
    token)``. The reduce-scatter's result is ``[m, N]``; the all-reduce's has all rows of ``lhs``."""
    for pattern in ("matmul_reduce_scatter", "matmul_all_reduce"):
        _define_reduction(schedule, plan, reduce, pattern)


def _define_reduction(schedule: str, plan: SitePlan, reduce: Reduce, pattern: str) -> None:
    def implementation(
        chain: torch.Tensor,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        bias: torch.Tensor | None,
        settings: str,
        reduce_op: str,
        group_name: str,
        site: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group, token = resolve_group(group_name), token_like(chain)
        found = ready(plan, pattern, -(-lhs.shape[0] // group.size()), lhs, rhs, lhs.dtype, group, site, settings)
        if found is None:
            return getattr(reference, pattern)([lhs], [rhs], [bias], reduce_op, group), token
        with call_order(lhs.device):
            return reduce(pattern, lhs, rhs, bias, reduce_op == "avg", *found), token

    def fake(
        chain: torch.Tensor,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        bias: object,
        settings: str,
        reduce_op: str,
        group_name: str,
        site: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = lhs.shape[0] if pattern == "matmul_all_reduce" else lhs.shape[0] // resolve_group(group_name).size()
        return lhs.new_empty(rows, rhs.shape[1]), chain.new_empty(1)

    schema = (
        "(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, str settings, str reduce_op, str group_name, str site) ->"
        " (Tensor, Tensor)"
    )
    define(f"{schedule}_{pattern}{schema}", implementation, fake)
