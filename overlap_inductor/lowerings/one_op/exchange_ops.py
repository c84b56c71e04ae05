# SPDX-License-Identifier: Apache-2.0
"""Define ops that run an all-to-all of equal slices and its matmuls. Except for their shapes, they
are like the ops of ``one_op.ops``.

Shapes (W ranks, this rank's view): ``sent [W*m, K]`` has a slice of rows for each rank. The product ``lhs @ rhs`` has a
slice of rows for each rank, or of columns if ``columns``. If matmuls contract the exchanged dim, ``sent`` is
``[W*m, k]``. The slice that arrives from rank ``r`` is multiplied by rows ``r*k`` to ``(r+1)*k - 1`` of
``rhs [W*k, N]``.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.one_op.ops import Gather
from overlap_inductor.lowerings.one_op.ops import Optional
from overlap_inductor.lowerings.one_op.ops import SitePlan
from overlap_inductor.lowerings.one_op.ops import Tensors
from overlap_inductor.lowerings.one_op.ops import ready
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.memory import token_like

Send = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, bool, Launch, Any], torch.Tensor]
"""``(lhs, rhs, bias, columns, launch, parameters) -> received [W * rows of a slice, width of a slice]``."""


def define_exchanges(schedule: str, plan: SitePlan, send: Send, receive: Gather) -> None:
    """Define two ops:

    * ``<schedule>_matmul_all_to_all`` returns ``(received, token)``. ``received`` holds a slice from each rank, in the
      order of ranks: ``[W * (rows of a slice), width of a slice]``.
    * ``<schedule>_all_to_all_matmul`` returns ``([result [W*m, N] of each matmul ...], token)``. With
      ``received_used``, the received tensor ``[W*m, K]`` ends the list.
    """
    _define_sent(schedule, plan, send)
    _define_received(schedule, plan, receive)


def _define_sent(schedule: str, plan: SitePlan, send: Send) -> None:
    def implementation(
        chain: torch.Tensor,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        bias: torch.Tensor | None,
        columns: bool,
        settings: str,
        group_name: str,
        site: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group, token, rows = resolve_group(group_name), token_like(chain), lhs.shape[0]
        found = ready(plan, "matmul_all_to_all", -(-rows // group.size()), lhs, rhs, lhs.dtype, group, site, settings)
        if found is None:
            return reference.exchanged(reference.product(lhs, rhs, bias), columns, group), token
        with call_order(lhs.device):
            return send(lhs, rhs, bias, columns, *found), token

    def fake(
        chain: torch.Tensor,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        bias: object,
        columns: bool,
        settings: str,
        group_name: str,
        site: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (rows, width), ranks = (lhs.shape[0], rhs.shape[1]), resolve_group(group_name).size()
        shape = (rows * ranks, width // ranks) if columns else (rows, width)
        return lhs.new_empty(shape), chain.new_empty(1)

    schema = (
        "(Tensor chain, Tensor lhs, Tensor rhs, Tensor? bias, bool columns, str settings, str group_name, str site) ->"
        " (Tensor, Tensor)"
    )
    define(f"{schedule}_matmul_all_to_all{schema}", implementation, fake)


def _define_received(schedule: str, plan: SitePlan, receive: Gather) -> None:
    def implementation(
        chain: torch.Tensor,
        sent: torch.Tensor,
        rhs: Tensors,
        biases: Optional,
        received_used: bool,
        settings: str,
        group_name: str,
        site: str,
    ) -> tuple[Tensors, torch.Tensor]:
        group, token, rows = resolve_group(group_name), token_like(chain), sent.shape[0]
        found = ready(
            plan, "all_to_all_matmul", -(-rows // group.size()), sent, rhs[0], sent.dtype, group, site, settings
        )
        if found is None:
            received = reference.exchanged(sent, False, group)
            outs = [reference.product(received, b, bias) for b, bias in zip(rhs, biases, strict=True)]
            return [*outs, received] if received_used else outs, token
        with call_order(sent.device):
            return receive(sent, rhs, biases, received_used, *found), token

    def fake(
        chain: torch.Tensor,
        sent: torch.Tensor,
        rhs: Sequence[torch.Tensor],
        biases: object,
        received_used: bool,
        settings: str,
        group_name: str,
        site: str,
    ) -> tuple[Tensors, torch.Tensor]:
        outs = [sent.new_empty(sent.shape[0], b.shape[1]) for b in rhs]
        return [*outs, torch.empty_like(sent)] if received_used else outs, chain.new_empty(1)

    schema = (
        "(Tensor chain, Tensor sent, Tensor[] rhs, Tensor?[] biases, bool received_used, str settings, str group_name,"
        " str site) -> (Tensor[], Tensor)"
    )
    define(f"{schedule}_all_to_all_matmul{schema}", implementation, fake)


def define_contracted(schedule: str, plan: SitePlan, contract: Gather) -> None:
    """Define op ``<schedule>_contracted_all_to_all_matmul``, whose matmuls contract the exchanged dim.

    ``operand [m, W*k]`` has the received slices side by side, in the order of ranks. The op returns ``([operand @ b +
    bias [m, N] of each matmul ...], token)``. With ``operand_used``, the operand ends the list. ``contract`` returns
    the list.
    """

    def implementation(
        chain: torch.Tensor,
        sent: torch.Tensor,
        rhs: Tensors,
        biases: Optional,
        operand_used: bool,
        settings: str,
        group_name: str,
        site: str,
    ) -> tuple[Tensors, torch.Tensor]:
        group, token, (all_rows, width) = resolve_group(group_name), token_like(chain), sent.shape
        ranks = group.size()
        # The workspace is planned for one slice, so ``ready`` gets one slice's rows of the right operand.
        one, rows = rhs[0][:width], -(-all_rows // ranks)
        found = ready(plan, "all_to_all_matmul", rows, sent, one, sent.dtype, group, site, settings)
        if found is None:
            operand = reference.side_by_side(reference.exchanged(sent, False, group), ranks)
            outs = [reference.product(operand, b, bias) for b, bias in zip(rhs, biases, strict=True)]
            return [*outs, operand] if operand_used else outs, token
        with call_order(sent.device):
            return contract(sent, rhs, biases, operand_used, *found), token

    def fake(
        chain: torch.Tensor,
        sent: torch.Tensor,
        rhs: Sequence[torch.Tensor],
        biases: object,
        operand_used: bool,
        settings: str,
        group_name: str,
        site: str,
    ) -> tuple[Tensors, torch.Tensor]:
        ranks, (all_rows, width) = resolve_group(group_name).size(), sent.shape
        columns = [b.shape[1] for b in rhs] + ([ranks * width] if operand_used else [])
        return [sent.new_empty(all_rows // ranks, n) for n in columns], chain.new_empty(1)

    schema = (
        "(Tensor chain, Tensor sent, Tensor[] rhs, Tensor?[] biases, bool operand_used, str settings, str group_name,"
        " str site) -> (Tensor[], Tensor)"
    )
    define(f"{schedule}_contracted_all_to_all_matmul{schema}", implementation, fake)
