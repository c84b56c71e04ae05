"""Schedule ``chunked``: the own shard's matmul of a reduce-scatter and the sum of what has come for it, prepared as one kernel where that is the faster."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.matmul_sum import matmul_sum
from overlap_inductor.lowerings.chunked_plan import ChunkedParameters
from overlap_inductor.lowerings.fused_launch import right_descriptor
from overlap_inductor.lowerings.operands import check_operands
from overlap_inductor.lowerings.vendor_matmul import VendorMatmul
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.workspace import Launch

BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M = 128, 256, 64, 8
WARPS, STAGES = 8, 3

def sums_in_matmul(rows: int, a: torch.Tensor, matmul: VendorMatmul, launch: Launch, p: ChunkedParameters, parts: int) -> bool:
    """Whether the own shard of ``rows`` rows is multiplied by a kernel that adds what has come.

    From ``p.sum_tiles`` tiles on (with fewer the vendor's matmul uses the GPU better), and where that kernel reads the operands as they lie. Its blocks fill the GPU and
    wait for copies, which must not need an SM then: not with SMs that push.
    """
    if p.transport != "copy_engine" or matmul.scales is not None or launch.world_size * parts > 32 * WARPS:
        return False
    if -(-rows // BLOCK_M) * -(-matmul.b.shape[1] // BLOCK_N) < p.sum_tiles:
        return False
    try:
        check_operands(a, matmul.b, matmul.bias)
    except UnsupportedError:
        return False
    return True


def prepare_sum(a: torch.Tensor, matmul: VendorMatmul, out: torch.Tensor, launch: Launch, transfer: Transfer, average: bool) -> PreparedKernel:
    """What launches ``(a, b, out, bias)`` (``out`` again where there is none): ``out [rows, N] = a[own rows] @ b + bias + what has come``, of a reduce-scatter whose
    ``transfer`` begins at row 0 of the workspace. The arguments here are examples."""
    slot, rows, columns = launch.slot, transfer.rows, out.shape[1]
    right, transposed = right_descriptor(matmul.b, BLOCK_N, BLOCK_K)
    staging = slot.data.local[: launch.world_size * out.nbytes].view(out.dtype)
    varying = (TensorDescriptor.from_tensor(a, [BLOCK_M, BLOCK_K]), right, out, out if matmul.bias is None else matmul.bias)
    fixed = (
        staging, slot.flags.local, slot.calls, launch.faults.stop, launch.patience_ns, launch.site, launch.rank, rows, launch.rank * rows, columns, a.shape[1],
        transfer.index, slot.signals, 1.0 / launch.world_size if average else 1.0, launch.world_size, transfer.parts,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, transposed, matmul.bias is not None,
    )  # fmt: skip
    tiles = -(-rows // BLOCK_M) * -(-columns // BLOCK_N)
    return PreparedKernel(matmul_sum, tiles, varying, fixed, num_warps=WARPS, num_stages=STAGES)
