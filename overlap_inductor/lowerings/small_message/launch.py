# SPDX-License-Identifier: Apache-2.0
"""Schedule ``small_message`` launches one kernel after an ordinary matmul, on the current stream.

The first call of a shape checks the limits and prepares the kernel. Later calls only launch; a replayed call
(``runtime.replay``) launches matmul and kernel as one CUDA graph. No call waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.small_message import one_shot
from overlap_inductor.kernels.small_message import two_shot
from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.small_message.parameters import SmallParameters
from overlap_inductor.lowerings.small_message.parameters import needed
from overlap_inductor.lowerings.small_message.parameters import why_not
from overlap_inductor.runtime.replay import launched
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import blas
from overlap_inductor.torch_compat.memory import rows_like
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.call_arguments import call_arguments

VARYING = ("product", "out", "residual", "residual_out", "weight")
"""The kernels' parameters that differ from launch to launch, in the order of ``_run``."""


def all_reduce(
    product: torch.Tensor,
    launch: Launch,
    parameters: SmallParameters,
    average: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over ranks of ``product [M, N]``, or the mean (``average``). The kernel sums in fp32 and rounds once, to
    the same bits on all ranks.

    Args:
        product: fp16 or bf16, contiguous and aligned to 16 bytes.
        out: tensor for the result, like ``product``.

    Raises:
        UnsupportedError: the kernel does not support a dtype, size or layout, or ``launch.slot``, the symmetric memory
            for the call, is too small.
        TransferError: an earlier call of the group gave up waiting, or was aborted.
    """
    launch.faults.check()
    out = torch.empty_like(product) if out is None else out
    _run(product, out, None, launch, parameters, 0.0, average)
    return out


def matmul_all_reduce(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    launch: Launch,
    parameters: SmallParameters,
    average: bool = False,
) -> torch.Tensor:
    """``all_reduce`` of ``lhs [M, K] @ rhs [K, N] + bias``, fp16 or bf16. Returns ``[M, N]``. Raises as
    ``all_reduce``."""
    launch.faults.check()
    out = rows_like(lhs, lhs.shape[0], rhs.shape[1], lhs.dtype)

    def start(product: torch.Tensor) -> None:
        all_reduce(product, launch, parameters, average, out)

    _behind_matmul(lhs, rhs, bias, [], [out], launch, parameters, average, start)
    return out


def all_reduce_norm(
    product: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    launch: Launch,
    parameters: SmallParameters,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(normed, residual_out)``, both ``[M, N]``: ``residual_out = residual + all_reduce(product)``, and ``normed`` is
    ``weight [N]`` times the RMSNorm of ``residual_out``. ``out``: tensors for both results.

    Each step is rounded to the dtype of ``product``, as in a model that computes op by op. The norm itself is computed
    in fp32 (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, section 3).

    Raises:
        UnsupportedError, TransferError: as ``all_reduce``.
    """
    launch.faults.check()
    normed, residual_out = (torch.empty_like(product), torch.empty_like(product)) if out is None else out
    _check_norm(product.shape, product.dtype, residual, weight)
    _run(product, normed, (residual, residual_out, weight), launch, parameters, eps, average=False)
    return normed, residual_out


def matmul_all_reduce_norm(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    launch: Launch,
    parameters: SmallParameters,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``all_reduce_norm`` of ``lhs [M, K] @ rhs [K, N] + bias``, fp16 or bf16. Raises as ``all_reduce``."""
    launch.faults.check()
    normed, residual_out = (rows_like(lhs, lhs.shape[0], rhs.shape[1], lhs.dtype) for _ in range(2))

    def start(product: torch.Tensor) -> None:
        all_reduce_norm(product, residual, weight, eps, launch, parameters, (normed, residual_out))

    _behind_matmul(lhs, rhs, bias, [residual, weight], [normed, residual_out], launch, parameters, eps, start)
    return normed, residual_out


def _check_norm(shape: torch.Size, dtype: torch.dtype, residual: torch.Tensor, weight: torch.Tensor) -> None:
    for name, tensor, expected in (("residual", residual, shape), ("weight of the norm", weight, shape[1:])):
        if tensor.shape != expected or tensor.dtype != dtype or not _plain(tensor):
            raise UnsupportedError(
                f"the {name} is {tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}; "
                f"expected {dtype}{list(expected)}, contiguous and aligned to 16 bytes"
            )


def _behind_matmul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    bias: torch.Tensor | None,
    others: list[torch.Tensor],
    results: list[torch.Tensor],
    launch: Launch,
    parameters: SmallParameters,
    constant: float,
    start: Callable[[torch.Tensor], None],
) -> None:
    """Run the vendor's matmul, and call ``start`` with its product. A replayed call launches both as one CUDA graph
    (``runtime.replay``). ``start`` also reads ``constant`` and ``others``, and writes ``results``."""
    # ``launched`` compares the operands' shapes and dtypes, which fix those of the results. So of the results, ``what``
    # needs only the addresses.
    what = ("small_message", parameters, blas.switches(), constant, *[r.data_ptr() for r in results])
    # A memory copy in a CUDA graph always reads the same allocation, so ``launched`` must know which operands such
    # copies read. It is only the bias: the vendor's library copies the bias into the product, and then adds the matmul.
    copied = [] if bias is None else [bias]
    launched(
        launch,
        what,
        [lhs, rhs, bias, *others],
        lambda: start(reference.product(lhs, rhs, bias)),
        parameters.replays,
        copied,
    )


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _run(
    product: torch.Tensor,
    out: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    launch: Launch,
    parameters: SmallParameters,
    eps: float,
    average: bool,
) -> None:
    if product.shape[0] == 0 or not _plain(product):
        raise UnsupportedError(
            f"the matmul's result of shape {list(product.shape)}, strides {list(product.stride())} is empty, or not"
            " contiguous and aligned to 16 bytes"
        )
    varying = (product, out, *(norm or (out, out, out)))
    key = "small_message", product.shape, product.dtype, parameters, eps, norm is None, average
    kernel = launch.prepared.get(key)
    if kernel is None:
        kernel = _prepare(varying, norm is not None, launch, parameters, eps, average)
        launch.remember(key, kernel)
    kernel(*varying)


def _prepare(
    varying: tuple[torch.Tensor, ...], norm: bool, launch: Launch, p: SmallParameters, eps: float, average: bool
) -> PreparedKernel:
    product, slot, world_size = varying[0], launch.slot, launch.world_size
    rows, columns = product.shape
    itemsize = product.element_size()
    segments, threads = -(-columns // p.segment), 32 * p.warps
    reason = why_not(product.dtype, world_size, rows, columns)
    if reason is not None:
        raise UnsupportedError(reason)
    if world_size * segments > threads:
        raise UnsupportedError(
            f"each row has {segments} segments with a flag from each of {world_size} ranks: more flags than a block of"
            f" {threads} threads can wait for; use wider segments"
        )
    launch.check_room(*needed(p, world_size, rows, columns, itemsize))
    # Calls of several sizes share the two halves of the slot. So a half has the same size in every call: half of the
    # slot, not half of the bytes that this call needs.
    half = slot.nbytes // 256 * 128
    kernel = two_shot if p.two_shot else one_shot
    fixed = {
        **call_arguments(kernel, launch),
        "staging": slot.data.local[: 2 * half].view(product.dtype),
        "rows": rows,
        "eights": columns // 8,
        "half": half // itemsize,
        "scale": 1.0 / world_size if average else 1.0,
        "eps": eps,
        "SEGMENTS": segments,
        "SEGMENT": p.segment,
        "ROW": 1 << (columns - 1).bit_length(),
        "NORM": norm,
    }
    blocks = (-(-rows // world_size) + norm) * segments if p.two_shot else rows * segments
    return PreparedKernel(kernel, blocks, dict(zip(VARYING, varying, strict=True)), fixed, num_warps=p.warps)
