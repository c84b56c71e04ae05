# SPDX-License-Identifier: Apache-2.0
"""Calls of schedule ``fused`` that multiply what arrives from an all-gather or an all-to-all. The kernel's own blocks
send the shard, or a transport copies it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.lowerings.fused.launch import NO_TAIL
from overlap_inductor.lowerings.fused.launch import Tail
from overlap_inductor.lowerings.fused.launch import key_of
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.fused.parameters import band_rows
from overlap_inductor.lowerings.fused.parameters import copiers
from overlap_inductor.runtime.replay import launched
from overlap_inductor.runtime.side_stream import one_call
from overlap_inductor.runtime.side_stream import side_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.transports.credits import credit_kernel
from overlap_inductor.transports.credits import end_kernel
from overlap_inductor.transports.credits import spoil_kernel
from overlap_inductor.transports.registry import transport_named
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import PeerCopies
from overlap_inductor.transports.transport import Share


class Received(NamedTuple):
    """A call. All tensors are fp16 or bf16.

    Attributes:
        name: one of ``parameters.GATHERS``, or ``contraction`` if the received shards stand side by side along K.
        a: what is sent: ``own`` in an all-gather, a shard for each rank in an all-to-all (``[world_size * rows, K]``).
        own: the shard ``[rows, K]`` that this rank multiplies without a transfer: ``a`` in an all-gather, this rank's
            own part of ``a`` in an all-to-all.
        rhs, biases, results: for each weight the right operand, ``[N]`` or ``None``, and the tensor to write.
        keep: True if the kernel does not end the call. Then the tensor that function ``gathered`` returns may be read
            on the same stream until ``lowerings.fused.calls.end`` is called.
        banded: copies send a shard in bands (``parameters.band_rows``), not as a whole.
    """

    name: str
    a: torch.Tensor
    own: torch.Tensor
    rhs: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]
    results: Sequence[torch.Tensor]
    keep: bool
    tail: Tail = NO_TAIL
    banded: bool = False

    @property
    def operands(self) -> list[torch.Tensor]:
        """The operands of a launch: ``own``, ``a``, and for each weight the right operand, its result twice (descriptor
        and pointer) and its bias. A missing bias is replaced by the result, and not read."""
        found = [self.own, self.a]
        for b, result, bias in zip(self.rhs, self.results, self.biases, strict=True):
            found += [b, result, result, result if bias is None else bias]
        return found

    def copied(self, parameters: FusedParameters) -> bool:
        """Whether a transport of ``copiers`` sends the shard."""
        return self.own.nbytes >= parameters.copies_from


Kernel = Callable[[Received], None]
"""Launches the prepared kernel of a call."""
Prepare = Callable[[Received, Launch, FusedParameters], Kernel]
"""Prepares a call's kernel. Raises ``UnsupportedError`` if the kernel does not support the operands, or if the
call's part of the workspace is too small."""


def multiply(call: Received, launch: Launch, parameters: FusedParameters, prepare: Prepare) -> None:
    """Launch a call, into ``call.results``. Raises what ``prepare`` raises."""
    tensors = [call.a, *call.rhs, *call.biases, *call.tail.extras]
    # The operands determine everything about the results but their addresses.
    what = ("fused", call.name, parameters, call.keep, call.tail.epilogues, *[r.data_ptr() for r in call.results])
    copied = [call.a] if call.copied(parameters) else []
    launched(launch, what, tensors, lambda: _start(call, launch, parameters, prepare), parameters.replays, copied)


def _start(call: Received, launch: Launch, parameters: FusedParameters, prepare: Prepare) -> None:
    key = key_of(call.name, call.a, call.rhs, call.biases, call.tail, parameters, call.keep)
    kernel = launch.prepared.get(key)
    if kernel is None:
        kernel = prepare(call, launch, parameters)
        if call.keep:
            end_kernel(launch)
        launch.remember(key, kernel)
    if not call.copied(parameters):
        kernel(call)
        return
    _with_copies(call, launch, parameters, kernel)
    # After an abort, ``spoil_kernel`` writes NaN into the results. With ``keep``, ``calls.end`` writes the NaN.
    for result in call.results if not call.keep else ():
        spoil_kernel(launch, result)(result)


def _with_copies(call: Received, launch: Launch, p: FusedParameters, kernel: Kernel) -> None:
    """A transport of ``copiers`` sends the shards, while ``kernel`` multiplies the rows that have arrived.

    The kernel occupies every SM, so nothing that the copies wait for may need an SM meanwhile. Therefore the wait for
    credits runs before the kernel, on the current stream. The transport's flags need no SM either.
    """
    a, own, rank = call.a, call.own, launch.rank
    rows = len(own)
    part_rows = band_rows(rows, launch.world_size, p) if call.banded else rows
    side, key = side_stream(a.device), ("send", p.copier, a.shape, a.dtype, part_rows)
    send = launch.prepared.get(key)
    if send is None:
        transport = transport_named(PeerCopies, p.copier or copiers()[0].name)
        exchanged = own is not a
        transfer = Transfer(rows, own.shape[1], part_rows, scattered=exchanged, read_in_order=exchanged)
        send = transport.prepare(launch, transfer, range((launch.world_size - 1) * transfer.parts), a, Share())
        launch.remember(key, send)
    credit_kernel(launch)()
    with one_call(launch, side):
        with side:
            send(a)
            if call.keep:
                gathered(own, launch)[rank * rows : (rank + 1) * rows].copy_(own)
        kernel(call)


def gathered(own: torch.Tensor, launch: Launch) -> torch.Tensor:
    """The workspace of a call whose own shard is ``own [rows, K]``, as ``[world_size * rows, K]``. It holds the whole
    gathered tensor only between a call with ``keep`` and ``calls.end``."""
    rows, inner = own.shape
    return (
        launch.slot.data.local[: launch.world_size * own.nbytes].view(own.dtype).view(launch.world_size * rows, inner)
    )


def own_shard(pattern: str, a: torch.Tensor, launch: Launch) -> torch.Tensor:
    """The shard ``[rows, K]`` of ``a`` (what is sent) that this rank multiplies without a transfer, as a view. Raises
    ``UnsupportedError`` if the shards of an all-to-all are not equal."""
    if pattern != "all_to_all_matmul":
        return a
    if len(a) % launch.world_size:
        raise UnsupportedError(f"{len(a)} rows cannot be cut into {launch.world_size} equal slices")
    rows = len(a) // launch.world_size
    return a[launch.rank * rows : (launch.rank + 1) * rows]
