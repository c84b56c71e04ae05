"""Schedule ``fused``: the kernel of a reduction, prepared."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.matmul_reduce import matmul_reduce
from overlap_inductor.lowerings.fused_launch import TILES_A_BATCH
from overlap_inductor.lowerings.fused_launch import Tail
from overlap_inductor.lowerings.fused_launch import check
from overlap_inductor.lowerings.fused_launch import right_descriptor
from overlap_inductor.lowerings.fused_plan import FusedParameters
from overlap_inductor.lowerings.fused_plan import band_rows
from overlap_inductor.lowerings.fused_plan import needed
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.workspace import Launch


def prepare_reduce(
    pattern: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    launch: Launch,
    p: FusedParameters,
    bias: torch.Tensor | None,
    average: bool,
    tail: Tail,
) -> PreparedKernel:
    world_size, slot, broadcast = launch.world_size, launch.slot, pattern == "matmul_all_reduce"
    all_rows, inner = a.shape
    columns = b.shape[1]
    if all_rows % world_size and not broadcast:
        raise UnsupportedError(f"{all_rows} rows do not fall into {world_size} equal shards")
    rows = -(-all_rows // world_size)
    part_rows = band_rows(rows, world_size, p)
    parts = -(-rows // part_rows)
    need = needed(pattern, world_size, rows, inner, columns, a.element_size(), p)
    check(a, b, bias, need, launch)
    tail.check([out])
    right, transposed = right_descriptor(b, p.block_n, p.block_k)
    varying = (TensorDescriptor.from_tensor(a, [p.block_m, p.block_k]), right, out, out if bias is None else bias, *tail.operands)
    fixed = (
        slot.data.local[: need[0]].view(a.dtype), slot.data.pointers, slot.flags.pointers, slot.flags.local,
        slot.queues, slot.calls, launch.faults.stop, launch.patience_ns, launch.site, launch.rank, rows, all_rows, columns, inner, part_rows, slot.signals,
        1.0 / world_size if average else 1.0, world_size, parts, min(p.lag, parts) if broadcast else parts, p.copy_lag, broadcast, p.stagger_ns,
        p.block_m, p.block_n, p.block_k, p.group_m, TILES_A_BATCH, 32 * p.warps, p.halves, transposed, bias is not None, tail.function,
    )  # fmt: skip
    return PreparedKernel(matmul_reduce, p.blocks, varying, fixed, scratch=a.device, num_warps=p.warps, num_stages=p.stages)
