"""Transport ``copy_engine``: copies to peers' memory on a stream, which copy engines do; and flags are copied behind the rows.

No SM works at the copies, and one goes at 379 GB/s on an H200 with 3 us between two, on one stream as on several. A flag is one more copy, of a word that says
which call it is (2 us; a kernel that signals keeps the next copy waiting for 12, a value written by the stream itself for 15 to 20): nothing is baked into a
CUDA graph. ``transports.credits.credit_kernel`` has written the word before, where all peers gave leave.

Ordering: copies of a stream run one after the other, and the next begins when what the one before has written is visible; a reader that acquires the
flag sees it (``tests.gpu.check_litmus``, "copy engine, copied flag").

Nothing holds back a copy where the wait for leave before it was given up (a kernel's stores are masked then, ``kernels.signals.may_store``): only its signal is not given.
After an abort every wait ends at once, so that calls that are queued by then copy, too; a peer that is still in the call before may find other rows there. Its
next call raises the error, since it has waited in vain by then, or been told; the results of that one call are not to be relied on.
What rests on later waits (``guarded``) is signalled by a kernel, which does not where one was given up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.transfer import give_signals
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.credits import announced
from overlap_inductor.transports.transfer import Send
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.workspace import Launch

Copy = tuple[torch.Tensor, slice | None]
"""Where to, in a peer's workspace, and which rows of the source (``None``: all)."""


def _copy(launch: Launch, transfer: Transfer, number: int, source: torch.Tensor) -> Copy:
    """Of part ``number``."""
    piece = transfer.piece(number, launch.rank, launch.world_size)
    row_bytes = transfer.width * source.element_size()
    target = launch.slot.data.peers[piece.peer][piece.target * row_bytes : (piece.target + piece.rows) * row_bytes].view(source.dtype)
    rows = None if piece.rows == len(source) else slice(piece.source, piece.source + piece.rows)
    return target.view(piece.rows, transfer.width), rows


class CopyEngine:
    def prepare(self, launch: Launch, transfer: Transfer, numbers: range, source: torch.Tensor, guarded: bool = False) -> Send:
        """As ``Transport.prepare``. Receivers are told of every part, and at the end where ``guarded``."""
        return (_signalled_by_kernel if guarded else copies_with_flags)(launch, transfer, numbers, source)


def _signalled_by_kernel(launch: Launch, transfer: Transfer, numbers: range, source: torch.Tensor) -> Send:
    slot, world_size = launch.slot, launch.world_size
    copies = [_copy(launch, transfer, number, source) for number in numbers]
    fixed = (slot.flags.pointers, slot.calls, launch.faults.stop, launch.rank, transfer.index, numbers.start, slot.signals, world_size, transfer.parts, transfer.direction)
    signal = PreparedKernel(give_signals, len(numbers), (), fixed, num_warps=1)

    def send(source: torch.Tensor) -> None:
        for target, rows in copies:
            target.copy_(source if rows is None else source[rows], non_blocking=True)
        signal()

    return send


def copies_with_flags(launch: Launch, transfer: Transfer, numbers: Sequence[int], source: torch.Tensor) -> Send:
    """As ``Transport.prepare``, of parts ``numbers`` in that order. Nothing here needs room on an SM, which a kernel that waits for a peer's copies may not leave."""
    slot, world_size = launch.slot, launch.world_size
    word, sends = announced(launch), []
    for number in numbers:
        at = (world_size + launch.rank * slot.signals + transfer.index + number % transfer.parts) * FLAG_WORDS
        flag = slot.flags.peers[transfer.piece(number, launch.rank, world_size).peer][at : at + 1]
        sends.append((*_copy(launch, transfer, number, source), flag))

    def send(source: torch.Tensor) -> None:
        for target, rows, flag in sends:
            target.copy_(source if rows is None else source[rows], non_blocking=True)
            flag.copy_(word, non_blocking=True)

    return send
