# SPDX-License-Identifier: Apache-2.0
"""Define the ops of schedule ``chunked`` for plain matmuls. One call of an op runs the matmuls, transfers and sums of
a site.

The modules that launch kernels import Triton, so they are imported when the first op runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.one_op.exchange_ops import define_contracted
from overlap_inductor.lowerings.one_op.exchange_ops import define_exchanges
from overlap_inductor.lowerings.one_op.operands import left_operand
from overlap_inductor.lowerings.one_op.ops import Optional
from overlap_inductor.lowerings.one_op.ops import Tensors
from overlap_inductor.lowerings.one_op.ops import define_gather
from overlap_inductor.lowerings.one_op.ops import define_reductions
from overlap_inductor.lowerings.one_op.output_ops import define_gathered_output
from overlap_inductor.lowerings.one_op.vendor_matmul import SlicedMatmul
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.runtime.workspace import Launch


def _gather(
    shard: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    biases: Optional,
    gathered_used: bool,
    launch: Launch,
    parameters: ChunkedParameters,
) -> Tensors:
    from overlap_inductor.lowerings.chunked.gather_launch import all_gather_matmul

    return all_gather_matmul(
        left_operand(shard), list(map(VendorMatmul, rhs, biases)), launch, parameters, gathered_used
    )


def _reduce(
    pattern: str,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    average: bool,
    launch: Launch,
    parameters: ChunkedParameters,
) -> torch.Tensor:
    from overlap_inductor.lowerings.chunked import reduce_launch

    return getattr(reduce_launch, pattern)(lhs, VendorMatmul(rhs, bias), launch, parameters, average)


def _gather_output(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    side_by_side: bool,
    launch: Launch,
    parameters: ChunkedParameters,
) -> torch.Tensor:
    from overlap_inductor.lowerings.chunked.output_launch import matmul_all_gather

    return matmul_all_gather(lhs, VendorMatmul(rhs, bias), launch, parameters, side_by_side)


def _send(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    columns: bool,
    launch: Launch,
    parameters: ChunkedParameters,
) -> torch.Tensor:
    from overlap_inductor.lowerings.chunked.exchange_launch import matmul_all_to_all

    matmul = SlicedMatmul(rhs, bias, count=launch.world_size) if columns else VendorMatmul(rhs, bias)
    return matmul_all_to_all(lhs, matmul, launch, parameters)


def _receive(
    sent: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    biases: Optional,
    received_used: bool,
    launch: Launch,
    parameters: ChunkedParameters,
) -> Tensors:
    from overlap_inductor.lowerings.chunked.gather_launch import all_to_all_matmul

    return all_to_all_matmul(
        left_operand(sent), list(map(VendorMatmul, rhs, biases)), launch, parameters, received_used
    )


def _contract(
    sent: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    biases: Optional,
    operand_used: bool,
    launch: Launch,
    parameters: ChunkedParameters,
) -> Tensors:
    from overlap_inductor.lowerings.chunked.contracted_launch import contracted_all_to_all_matmul

    return contracted_all_to_all_matmul(
        left_operand(sent), list(map(VendorMatmul, rhs, biases)), launch, parameters, operand_used
    )


define_gather("chunked", chunked_plan, _gather)
define_reductions("chunked", chunked_plan, _reduce)
define_gathered_output("chunked", chunked_plan, _gather_output)
define_exchanges("chunked", chunked_plan, _send, _receive)
define_contracted("chunked", chunked_plan, _contract)
