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
from dataclasses import dataclass

import torch

from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.transfer import give_signals
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.credits import announced
from overlap_inductor.transports.driver import copier
from overlap_inductor.transports.transfer import Send
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.workspace import Launch


@dataclass(frozen=True)
class _Copy:
    """From byte ``source`` of what is sent to address ``target``; ``flag``: the receiver's, by address. ``memory``: what lies at both."""

    target: int
    source: int
    nbytes: int
    flag: int
    memory: tuple[torch.Tensor, torch.Tensor]


def _copy(launch: Launch, transfer: Transfer, number: int, itemsize: int) -> _Copy:
    """Of part ``number``."""
    slot, row_bytes = launch.slot, transfer.width * itemsize
    piece = transfer.piece(number, launch.rank, launch.world_size)
    at = launch.world_size + launch.rank * slot.signals + transfer.index + number % transfer.parts
    data, flags = slot.data.peers[piece.peer], slot.flags.peers[piece.peer]
    flag = flags.data_ptr() + at * FLAG_WORDS * flags.element_size()
    return _Copy(data.data_ptr() + piece.target * row_bytes, piece.source * row_bytes, piece.rows * row_bytes, flag, (data, flags))


class CopyEngine:
    def prepare(self, launch: Launch, transfer: Transfer, numbers: range, source: torch.Tensor, guarded: bool = False) -> Send:
        """As ``Transport.prepare``. Receivers are told of every part, and at the end where ``guarded``."""
        return (_signalled_by_kernel if guarded else copies_with_flags)(launch, transfer, numbers, source)


def _signalled_by_kernel(launch: Launch, transfer: Transfer, numbers: range, source: torch.Tensor) -> Send:
    slot, world_size, start = launch.slot, launch.world_size, copier(source.device.type)
    copies = [_copy(launch, transfer, number, source.element_size()) for number in numbers]
    fixed = (slot.flags.pointers, slot.calls, launch.faults.stop, launch.rank, transfer.index, numbers.start, slot.signals, world_size, transfer.parts, transfer.direction)
    signal = PreparedKernel(give_signals, len(numbers), (), fixed, num_warps=1)

    def send(source: torch.Tensor) -> None:
        stream, base = symmetric.stream_number(source.device), source.data_ptr()
        for copy in copies:
            start(copy.target, base + copy.source, copy.nbytes, stream)
        signal()

    return send


def copies_with_flags(launch: Launch, transfer: Transfer, numbers: Sequence[int], source: torch.Tensor) -> Send:
    """As ``Transport.prepare``, of parts ``numbers`` in that order. Nothing here needs room on an SM, which a kernel that waits for a peer's copies may not leave."""
    word, start = announced(launch), copier(source.device.type)
    copies = [_copy(launch, transfer, number, source.element_size()) for number in numbers]
    number_of_call, word_bytes = word.data_ptr(), word.element_size()

    def send(source: torch.Tensor) -> None:
        stream, base = symmetric.stream_number(source.device), source.data_ptr()
        for copy in copies:
            start(copy.target, base + copy.source, copy.nbytes, stream)
            start(copy.flag, number_of_call, word_bytes, stream)

    return send
