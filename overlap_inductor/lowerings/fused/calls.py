"""Schedule ``fused``: one persistent kernel a site, launched on the current stream.

Each function is the host's part of one kernel. At a site's first call with operands of some shapes and strides it
checks what the kernel rests on, cuts the work into bands and pieces, and prepares the kernel; after that it launches (a
CUDA graph where a call comes again, ``runtime.replay``), waits for nothing on the device and allocates nothing there
but its result, and what an all-reduce's blocks send from where that is another tensor. A group that has been aborted
launches nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import torch

from overlap_inductor.lowerings.fused.gather import gathered
from overlap_inductor.lowerings.fused.gather import prepare_gather
from overlap_inductor.lowerings.fused.launch import NO_TAIL
from overlap_inductor.lowerings.fused.launch import Tail
from overlap_inductor.lowerings.fused.launch import key_of
from overlap_inductor.lowerings.fused.parameters import MOST_WEIGHTS
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.parameters import slices_of
from overlap_inductor.lowerings.fused.reduce import prepare_all_reduce
from overlap_inductor.lowerings.fused.reduce import prepare_reduce_scatter
from overlap_inductor.lowerings.fused.reduce import product_rows
from overlap_inductor.runtime.replay import launched
from overlap_inductor.runtime.side_stream import one_call
from overlap_inductor.runtime.side_stream import side_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat.memory import rows_like
from overlap_inductor.transports.copy_engine import copies_with_flags
from overlap_inductor.transports.credits import credit_kernel
from overlap_inductor.transports.credits import end_kernel
from overlap_inductor.transports.credits import spoil_kernel
from overlap_inductor.transports.credits import spoiling_end
from overlap_inductor.transports.transfer import Transfer


def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    launch: Launch,
    parameters: FusedParameters,
    bias: torch.Tensor | None = None,
    keep: bool = False,
) -> torch.Tensor:
    """``all_gather_matmuls`` of one weight."""
    return all_gather_matmuls(a, [b], launch, parameters, [bias], keep)[0]


def all_gather_matmuls(
    a: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    launch: Launch,
    parameters: FusedParameters,
    biases: Sequence[torch.Tensor | None],
    keep: bool = False,
    tail: Tail = NO_TAIL,
) -> list[torch.Tensor]:
    """``all_gather(a) @ b + bias`` for each weight, with its epilogue: ``a [rows, K]`` this rank's shard, ``b [K, N]``,
    ``bias [N]``. Returns each ``[world_size * rows, N]``.

    One to ``MOST_WEIGHTS`` weights, all in rows or all transposed (``in_one_launch`` chooses them). ``keep``: the call
    does not end with the kernel: ``gathered`` may be read on the same stream until ``end``.

    Raises:
        UnsupportedError: a dtype, layout or slot that the kernel is not made for.
        TransferError: a call of the group before this one gave up waiting, or was aborted.
    """
    launch.faults.check()
    results = [rows_like(a, launch.world_size * a.shape[0], b.shape[1], a.dtype) for b in rhs]
    # (Results lie in rows, of sizes that the operands have: where they begin is all that may change.)
    what = ("fused", "all_gather_matmul", parameters, keep, tail.epilogues, *[r.data_ptr() for r in results])
    copied = [a] if a.nbytes >= parameters.copies_from else []
    launched(
        launch,
        what,
        [a, *rhs, *biases, *tail.extras],
        lambda: _gather(a, rhs, results, launch, parameters, biases, keep, tail),
        parameters.replays,
        copied,
    )
    return results


def _gather(
    a: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    launch: Launch,
    parameters: FusedParameters,
    biases: Sequence[torch.Tensor | None],
    keep: bool,
    tail: Tail,
) -> None:
    """The launches of one call, into ``results``, each ``[world_size * rows, N]``. Raises ``UnsupportedError``."""
    slices = slices_of(launch.world_size, a, rhs, parameters)
    copied = slices == 1 and a.nbytes >= parameters.copies_from
    key = key_of("all_gather_matmul", a, rhs, biases, tail, parameters, keep)
    kernel = launch.prepared.get(key)
    if kernel is None:
        kernel = prepare_gather(a, rhs, results, launch, parameters, biases, keep, tail, copied, slices)
        if keep:
            end_kernel(launch)
        launch.remember(key, kernel)
    operands: list[torch.Tensor | None] = [a, a]
    for b, result, bias in zip(rhs, results, biases, strict=True):
        operands += [b, result, result, result if bias is None else bias]
    operands += [*[None] * (4 * (MOST_WEIGHTS - len(rhs))), *tail.operands]
    if not copied:
        kernel(*operands)
    else:
        _with_copies(a, launch, lambda: kernel(*operands), keep)
        # (With ``keep``, ``end`` does, when all of the call's results are there.)
        for result in results if not keep else ():
            spoil_kernel(launch, result)(result)


def _with_copies(a: torch.Tensor, launch: Launch, multiply: Callable[[], None], keep: bool) -> None:
    """Copy engines send the shard while ``multiply`` multiplies what has come.

    Nothing that they wait for needs an SM while the kernel fills all of them: leave to write is awaited before, on the
    current stream, and flags are copied, too. So a rank's shard leaves whatever its kernel waits for.
    """
    side, key = side_stream(a.device), ("send", a.shape, a.dtype)
    send = launch.prepared.get(key)
    if send is None:
        send = copies_with_flags(
            launch, Transfer(a.shape[0], a.shape[1], a.shape[0], scattered=False), range(launch.world_size - 1), a
        )
        launch.remember(key, send)
    credit_kernel(launch)()
    with one_call(launch, side):
        with side:
            send(a)
            if keep:
                gathered(a, launch)[launch.rank * len(a) : (launch.rank + 1) * len(a)].copy_(a)
        multiply()


def end(launch: Launch, results: Sequence[torch.Tensor] = ()) -> None:
    """End a call that was made with ``keep``: the peers may write into the workspace again. ``results`` of the call,
    also those that were made of ``gathered``, are spoilt where the group has been aborted."""
    if results:
        spoiling_end(launch, results)(results)
    else:
        end_kernel(launch)()


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    launch: Launch,
    parameters: FusedParameters,
    bias: torch.Tensor | None = None,
    average: bool = False,
    tail: Tail = NO_TAIL,
) -> torch.Tensor:
    """``reduce_scatter(a @ b + bias)`` of rows, with its epilogue: ``a [world_size * rows, K]``, ``b [K, N]``, ``bias
    [N]``. Returns ``[rows, N]``, summed in fp32.

    Raises:
        UnsupportedError, TransferError: as ``all_gather_matmul``.
    """
    launch.faults.check()
    out = rows_like(a, a.shape[0] // launch.world_size, b.shape[1], a.dtype)

    def start() -> None:
        key = key_of("matmul_reduce_scatter", a, [b], [bias], tail, parameters, average)
        kernel = launch.prepared.get(key)
        if kernel is None:
            kernel = prepare_reduce_scatter(a, b, out, launch, parameters, bias, average, tail)
            launch.remember(key, kernel)
        kernel(a, b, out, out if bias is None else bias, *tail.operands)

    what = ("fused", "matmul_reduce_scatter", parameters, average, tail.epilogues, out.data_ptr())
    launched(launch, what, [a, b, bias, *tail.extras], start, parameters.replays)
    return out


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    launch: Launch,
    parameters: FusedParameters,
    bias: torch.Tensor | None = None,
    average: bool = False,
    tail: Tail = NO_TAIL,
) -> torch.Tensor:
    """``all_reduce(a @ b + bias)``: as ``matmul_reduce_scatter``, returns all rows ``[M, N]``; ``M`` need not be a
    multiple of the world size."""
    launch.faults.check()
    rows = a.shape[0]
    out = rows_like(a, rows, b.shape[1], a.dtype)
    sent_from = product_rows(-(-rows // launch.world_size), launch.world_size, parameters)
    # (Where a shard is whole tiles, finished rows lie where they were multiplied: a peer's come when it has got them,
    # the own ones are summed in place.)
    product = out if sent_from == rows else rows_like(a, sent_from, b.shape[1], a.dtype)

    def start() -> None:
        key = key_of("matmul_all_reduce", a, [b], [bias], tail, parameters, average)
        kernel = launch.prepared.get(key)
        if kernel is None:
            kernel = prepare_all_reduce(a, b, product, out, launch, parameters, bias, average, tail)
            launch.remember(key, kernel)
        kernel(a, b, product, out, out if bias is None else bias, *tail.operands)

    what = ("fused", "matmul_all_reduce", parameters, average, tail.epilogues, product.data_ptr(), out.data_ptr())
    launched(launch, what, [a, b, bias, *tail.extras], start, parameters.replays)
    return out
