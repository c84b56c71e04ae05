"""Transport ``copy_engine``: copies to peers' memory on a stream, which copy engines do; and flags are copied behind
the rows.

No SM works at the copies, and one goes at 379 GB/s on an H200 with 3 us between two, on one stream as on several. A
flag is one more copy, of a word that says which call it is (2 us; a kernel that signals keeps the next copy waiting for
12, a value written by the stream itself for 15 to 20): nothing is baked into a CUDA graph.
``transports.credits.credit_kernel`` has written the word before, where all peers gave leave.

Ordering: copies of a stream run one after the other, and the next begins when what the one before has written is
visible; a reader that acquires the flag sees it (``tests.gpu.check_litmus``, "copy engine, copied flag").

No leave. A kernel that stores looks whether it may (``kernels.signals.may_store``); a copy that is queued cannot. Where
the wait for leave before it ends without leave (its patience is over, or the group was aborted, after which every wait
ends at once), it runs, as do the copies of all calls that are queued by then. What then holds:

* Nobody takes its rows for rows: its flag is copied from a word that says a call of nobody (``announce``).
* A peer that is still in the call before may read them in place of its own: it is slow, or was paused with its last
  wait behind it. It hands none of that out. The wait that ends without leave sets every rank's abort word before its
  kernel ends, so before any copy behind it starts; the peer's call looks at its word behind its last read of the
  workspace, and makes NaN of its results where it is set (``kernels.transfer.spoil``), before anything behind the call
  on its stream can read them. It is the order of a sequence lock: the writer says that it writes, and then writes; the
  reader reads, and then looks. What it sums for others it signals only behind such a look.
* A call that is started after that writes nothing: its host looks before (``FaultRecord.check``).

It holds for calls that are launched one by one, for graphs of calls and for graphs that a program captures alike: the
look is a kernel of the call, which costs nothing where the call's last kernel does it. What else was thought of: a wait
that never ends without leave would keep every copy back, but also every later kernel of this rank, so that a program
that was told of the fault could not even save its weights before it is ended; conditional nodes of CUDA graphs would
serve graphs alone; and a second region for each call in turn does not help, since more than one call may be queued.

What rests on later waits (``guarded``) has the word written anew behind them; where one was given up, to a number that
nobody waits for, as after the wait for leave.

Turns. Ranks send to the one next to them, then to the one behind that, and so on: so no two send to one at a time, as
long as all are in step. Two that do get half a link each. Whoever was late is so twice as much then, and meets the next
one, until ranks send as if they chose at random and waited for whom they have chosen, which is 58.6 % of a link (Karol,
Hluchyj and Morgan, IEEE Trans. Comm. 35, 1987, section III): in 21 rounds eight H200s delivered 186 GB/s each in pieces
of 4 MiB, 226 in ones of 8 and 250 of 16, some 200 on several streams at once; only 14 rounds of 32 MiB were over before
(343). So each large piece of a send but the first waits until its receiver has got what comes before it in the order of
all ranks (``kernels.transfer.wait_for_turn``): who is late stays as late as he was (bench/results/turns.jsonl). A wait
costs some 5 us, by which small pieces lose more than they gain. It takes room on an SM, for one warp and no shared
memory: never where a kernel that has them all waits for the copies (schedule ``fused``); and with one hardware queue it
would hold back the matmuls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.transfer import announce
from overlap_inductor.kernels.transfer import wait_for_turn
from overlap_inductor.runtime.driver import copier
from overlap_inductor.runtime.side_stream import waiting_stream
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.credits import announced
from overlap_inductor.transports.transfer import Send
from overlap_inductor.transports.transfer import Transfer

QUEUES_FOR_TURNS = 3
"""Of the device: for copies, for what waits for turns, and for what waits for peers. In a CUDA graph nothing but its
edges orders these, and one that waits may hold up its queue."""


@dataclass(frozen=True)
class _Copy:
    """From byte ``source`` of what is sent to address ``target``; ``flag``: the receiver's, by address. ``memory``:
    what lies at both."""

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
    return _Copy(
        data.data_ptr() + piece.target * row_bytes,
        piece.source * row_bytes,
        piece.rows * row_bytes,
        flag,
        (data, flags),
    )


@dataclass(frozen=True)
class CopyEngine:
    """``turns_from``: bytes of a piece from which on it waits for its turn; ``None``: none does."""

    turns_from: int | None

    def prepare(
        self, launch: Launch, transfer: Transfer, numbers: range, source: torch.Tensor, guarded: bool = False
    ) -> Send:
        """As ``Transport.prepare``. Receivers are told of every part."""
        send = copies_with_flags(launch, transfer, numbers, source, self.turns_from)
        if not guarded:
            return send
        announces = PreparedKernel(
            announce, 1, (), (launch.slot.calls, announced(launch), launch.faults.stop), num_warps=1
        )

        def announced_send(source: torch.Tensor) -> None:
            announces()
            send(source)

        return announced_send


def copies_with_flags(
    launch: Launch, transfer: Transfer, numbers: Sequence[int], source: torch.Tensor, turns_from: int | None = None
) -> Send:
    """As ``Transport.prepare``, of parts ``numbers`` in that order. Without turns (``CopyEngine``) nothing here needs
    room on an SM, which a kernel that waits for a peer's copies may not leave."""
    word, start = announced(launch), copier(source.device.type)
    copies = [_copy(launch, transfer, number, source.element_size()) for number in numbers]
    takes_turns = (
        turns_from is not None
        and symmetric.hardware_queues() >= QUEUES_FOR_TURNS
        and min(copy.nbytes for copy in copies) >= turns_from
    )
    turns = [_turn(launch, transfer, *pair) if takes_turns else None for pair in pairwise(numbers)]
    number_of_call, word_bytes = word.data_ptr(), word.element_size()
    waiting = waiting_stream(source.device) if any(turns) else None

    def send(source: torch.Tensor) -> None:
        stream, base = symmetric.stream_number(source.device), source.data_ptr()
        if waiting is not None:
            waiting.follow()
        for copy, turn in zip(copies, [None, *turns], strict=True):
            if waiting is not None and turn is not None:
                waiting.before(turn)
            start(copy.target, base + copy.source, copy.nbytes, stream)
            start(copy.flag, number_of_call, word_bytes, stream)

    return send


def _turn(launch: Launch, transfer: Transfer, before: int, number: int) -> PreparedKernel | None:
    """Waits until the receiver of part ``number`` has got what part ``before`` is on another rank; ``None`` where it is
    this rank's own."""
    slot, world_size = launch.slot, launch.world_size
    receiver = transfer.piece(number, launch.rank, world_size).peer
    sender = (launch.rank + receiver - transfer.piece(before, launch.rank, world_size).peer) % world_size
    if sender == launch.rank:
        return None
    index = transfer.index + before % transfer.parts
    fixed = (
        slot.flags.pointers,
        slot.calls,
        launch.faults.stop,
        launch.patience_ns,
        launch.site,
        receiver,
        sender,
        index,
        slot.signals,
        world_size,
    )
    return PreparedKernel(wait_for_turn, 1, (), fixed, num_warps=1)
