# SPDX-License-Identifier: Apache-2.0
"""The ops of schedule ``wave_groups``: one functional op for each site runs one matmul and a few ordinary collectives.

Shapes (W ranks, this rank's view): ``lhs [M, K]``, ``rhs [K, N]``, ``bias [N]``, fp16 or bf16. The result is ``[M,
N]``, or ``[M / W, N]`` for a reduce-scatter. The chain's next token comes last. ``settings`` is JSON text of
``WaveParameters`` without ``blocks``. A call without rows runs the plain matmul and collective, on all ranks alike.
"""

from __future__ import annotations

import torch

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.one_op.operands import bias_row
from overlap_inductor.lowerings.one_op.operands import left_operand
from overlap_inductor.lowerings.one_op.operands import right_operand
from overlap_inductor.lowerings.wave_groups.parameters import parameters_of
from overlap_inductor.runtime.workspace import workspace_of
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.memory import token_like


def _define(pattern: str, keeps_rows: bool) -> None:
    """Define op ``wave_groups_<pattern>``, which returns ``(result, token)``. ``keeps_rows``: the result has as many
    rows as ``lhs``."""

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
        if lhs.shape[0] == 0:
            return getattr(reference, pattern)([lhs], [rhs], [bias], reduce_op, group), token
        from overlap_inductor.lowerings.wave_groups import launch as wave_groups

        parameters = parameters_of(settings, workspace_of(group, lhs.device).blocks)
        run, average = getattr(wave_groups, pattern), reduce_op == "avg"
        return (
            run(left_operand(lhs), right_operand(rhs), group, parameters, site, bias_row(bias, rhs.shape[1]), average),
            token,
        )

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
        rows = lhs.shape[0] if keeps_rows else lhs.shape[0] // resolve_group(group_name).size()
        return lhs.new_empty(rows, rhs.shape[1]), chain.new_empty(1)

    schema = (
        "(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, str settings, str reduce_op, str group_name, str site) ->"
        " (Tensor, Tensor)"
    )
    define(f"wave_groups_{pattern}{schema}", implementation, fake)


_define("matmul_reduce_scatter", keeps_rows=False)
_define("matmul_all_reduce", keeps_rows=True)
