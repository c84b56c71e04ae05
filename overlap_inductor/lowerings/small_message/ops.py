# SPDX-License-Identifier: Apache-2.0
"""The ops of schedule ``small_message``: a vendor matmul, then one kernel that sums its result over the ranks. One op's
kernel also computes the residual add and the RMSNorm that follow.

Shapes: ``lhs [M, K]``, ``rhs [K, N]``, ``bias [N]``, ``residual [M, N]``, ``weight [N]``; results ``[M, N]``. All ops
return the chain's next token last. ``settings`` is JSON text of the parameters that the plan fixes
(``SmallParameters``). A call's size decides the other parameters.

A call does not run the kernel if it has no rows, is too large for the kernel (``parameters.why_not``), or gets no
workspace. Then the call runs the op of the schedule that argument ``beyond`` names, or the plain collective. Rows and
workspace are equal on all ranks, so all ranks choose alike.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.one_op.operands import left_operand
from overlap_inductor.lowerings.small_message.parameters import SmallParameters
from overlap_inductor.lowerings.small_message.parameters import needed
from overlap_inductor.lowerings.small_message.parameters import parameters_of
from overlap_inductor.lowerings.small_message.parameters import why_not
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.runtime.workspace import workspace_of
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.memory import token_like


def _ready(
    lhs: torch.Tensor, rhs: torch.Tensor, settings: str, group: dist.ProcessGroup, site: str
) -> tuple[Launch, SmallParameters] | None:
    """``(launch, parameters)`` of the site's kernel, or ``None`` if this call does not run the kernel."""
    rows, columns = lhs.shape[0], rhs.shape[1]
    # The size is checked here, because a call that is too large for the kernel may still fit into the workspace.
    if rows == 0 or why_not(lhs.dtype, group.size(), rows, columns) is not None:
        return None
    sizes, place = (group.size(), rows, columns, lhs.element_size()), workspace_of(group, lhs.device)

    def made() -> tuple[Launch, SmallParameters] | None:
        parameters = parameters_of(settings, *sizes)
        launch = place.launch(site, *needed(parameters, *sizes))
        return None if launch is None else (launch, parameters)

    return place.known((site, settings, rows, columns, lhs.dtype), made)


def _matmul_all_reduce(
    chain: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    settings: str,
    reduce_op: str,
    group_name: str,
    site: str,
    beyond: str = "",
    beyond_settings: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    group, token = resolve_group(group_name), token_like(chain)
    ready = _ready(lhs, rhs, settings, group, site)
    if ready is None and beyond:
        op = getattr(torch.ops.overlap_inductor, f"{beyond}_matmul_all_reduce").default
        return op(chain, lhs, rhs, bias, beyond_settings, reduce_op, group_name, site)
    if ready is None:
        return reference.matmul_all_reduce([lhs], [rhs], [bias], reduce_op, group), token
    from overlap_inductor.lowerings.small_message import launch as small_message

    with call_order(lhs.device):
        return small_message.matmul_all_reduce(lhs, rhs, bias, *ready, reduce_op == "avg"), token


def _matmul_all_reduce_fake(
    chain: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: object,
    settings: str,
    reduce_op: str,
    group_name: str,
    site: str,
    beyond: str = "",
    beyond_settings: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    return lhs.new_empty(lhs.shape[0], rhs.shape[1]), chain.new_empty(1)


# ``beyond``: the schedule whose op runs the calls that the kernel does not run. ``beyond_settings``: that op's
# settings.
define(
    "small_message_matmul_all_reduce(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, str settings, str reduce_op,"
    " str group_name, str site, str beyond='', str beyond_settings='') -> (Tensor, Tensor)",
    _matmul_all_reduce,
    _matmul_all_reduce_fake,
)


def _matmul_all_reduce_norm(
    chain: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group, token = resolve_group(group_name), token_like(chain)
    ready = _ready(lhs, rhs, settings, group, site)
    if ready is None:
        residual_out = residual + reference.matmul_all_reduce([lhs], [rhs], [bias], "sum", group)
        return reference.rms_norm(residual_out, weight, eps), residual_out, token
    from overlap_inductor.lowerings.small_message import launch as small_message

    with call_order(lhs.device):
        return (
            *small_message.matmul_all_reduce_norm(
                lhs, rhs, bias, left_operand(residual), left_operand(weight), eps, *ready
            ),
            token,
        )


def _matmul_all_reduce_norm_fake(
    chain: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: object,
    residual: object,
    weight: object,
    eps: float,
    settings: str,
    group_name: str,
    site: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = lhs.shape[0], rhs.shape[1]
    return lhs.new_empty(shape), lhs.new_empty(shape), chain.new_empty(1)


# Returns ``(normed, residual_out, token)``.
define(
    "small_message_matmul_all_reduce_norm(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, Tensor residual, Tensor"
    " weight, float eps, str settings, str group_name, str site) -> (Tensor, Tensor, Tensor)",
    _matmul_all_reduce_norm,
    _matmul_all_reduce_norm_fake,
)
