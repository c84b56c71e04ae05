# SPDX-License-Identifier: Apache-2.0
"""Define ops that run a matmul and the all-gather of its result. Except for their shapes, they are like the ops of
``one_op.ops``.

Shapes on one of W ranks: ``lhs [m, K]``, ``rhs [K, N]``. The result is ``[W*m, N]``: the ranks' slices, one below the
other. With ``side_by_side``, it is ``[m, W*N]``. The token count that ``min_rows`` limits is ``m``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.one_op.ops import SitePlan
from overlap_inductor.lowerings.one_op.ops import ready
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.memory import token_like

GatherOutput = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, bool, Launch, Any], torch.Tensor]
"""``(lhs, rhs, bias, side_by_side, launch, parameters) -> result``."""


def define_gathered_output(schedule: str, plan: SitePlan, gather: GatherOutput) -> None:
    """Define op ``<schedule>_matmul_all_gather``. It returns ``(result, token)``."""

    def implementation(
        chain: torch.Tensor,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        bias: torch.Tensor | None,
        side_by_side: bool,
        settings: str,
        group_name: str,
        site: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group, token, rows = resolve_group(group_name), token_like(chain), lhs.shape[0]
        # The workspace is planned for shards of the rows, as in the other patterns.
        found = ready(plan, "matmul_all_gather", -(-rows // group.size()), lhs, rhs, lhs.dtype, group, site, settings)
        if found is None:
            return reference.gathered_output(reference.product(lhs, rhs, bias), side_by_side, group), token
        with call_order(lhs.device):
            return gather(lhs, rhs, bias, side_by_side, *found), token

    def fake(
        chain: torch.Tensor,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        bias: object,
        side_by_side: bool,
        settings: str,
        group_name: str,
        site: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (rows, columns), ranks = (lhs.shape[0], rhs.shape[1]), resolve_group(group_name).size()
        shape = (rows, ranks * columns) if side_by_side else (ranks * rows, columns)
        return lhs.new_empty(shape), chain.new_empty(1)

    schema = (
        "(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, bool side_by_side, str settings, str group_name,"
        " str site) -> (Tensor, Tensor)"
    )
    define(f"{schedule}_matmul_all_gather{schema}", implementation, fake)
