# SPDX-License-Identifier: Apache-2.0
"""``FaultRecord`` reads the faults of a group: the records of kernels that gave up because a wait timed out. A
``FaultRecord`` can also stop every waiting kernel of the group.

A kernel that gives up, or a host that calls ``abort``, writes its rank's record to the group's *board*: memory of the
host for such records (``runtime.board``). It also sets the abort words of all ranks that share the board: words in GPU
memory that end the waits of kernels. A host sets these words by copies on a stream of their own, so the copies never
queue behind a kernel that waits. A *watchdog* is a thread that reads the board (``runtime.watchdog``).
If a host cannot copy, the peers' watchdogs stop the waits on their own GPUs (``stop_waits``).

The next call on every rank that shares the board raises an error. The error names the first wait that timed out, or
another rank that aborted the group.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field

import torch
import torch.distributed as dist

from overlap_inductor.errors import TransferError
from overlap_inductor.kernels import layout
from overlap_inductor.runtime.board import Board
from overlap_inductor.runtime.board import own_board
from overlap_inductor.runtime.board import shared_board
from overlap_inductor.runtime.driver import copier
from overlap_inductor.runtime.driver import own_stream
from overlap_inductor.torch_compat import symmetric

log = logging.getLogger("overlap_inductor")

SITE_NUMBERS = 2**28
"""Sites are numbered below this, so that the code of a wait (``kernels.layout``) is a positive int32."""

_WAITED_FOR = {
    layout.WAIT_CREDIT: "permission to write into the workspace of",
    layout.WAIT_PART: "rows from",
    layout.WAIT_PARTIALS: "partial sums from",
    layout.WAIT_RESULT: "finished rows from",
    layout.WAIT_TURN: "the rank that it sends to next to get rows from",
}
_OVER = "No result of this group is valid any more: destroy the group, or end the process."


def stop_words(rank: int, board: Board, table: torch.Tensor) -> torch.Tensor:
    """The words that follow a rank's abort word, int32 ``[STOP_WORDS - 1]`` (``kernels.layout``).

    Args:
        table: int64: addresses of abort words as this rank's GPU sees them, for all ranks or for this rank alone.
    """
    head = torch.tensor([table.numel()], dtype=torch.int32)
    addresses = torch.tensor([board.record_address(rank), board.address, table.data_ptr()])
    return torch.cat([head, addresses.view(torch.int32)])


@functools.cache
def abort_stream(device: torch.device) -> torch.cuda.Stream:
    """The device's one stream for aborts. Nothing else is ever launched on it."""
    return own_stream(device, priority=-1)


@dataclass
class FaultRecord:
    """The faults of one group, from the view of this rank.

    Attributes:
        ranks: global ranks of the group, in its order.
        rank: this process's index in ``ranks``.
        stop: int32 ``[STOP_WORDS]`` on the device, an argument of every kernel that waits.
        table: int64 on the device: the addresses of the abort words that this rank sets, of all ranks or only its own.
        reachable: the values of ``table``, on the host.
        sites: names of this rank's sites, by the numbers under which kernels record them.
        told: True if ``check`` has raised or ``abort`` was called.
        memory: the allocation of ``stop`` and the peers' abort words, kept alive.
    """

    group_name: str
    ranks: Sequence[int]
    rank: int
    board: Board
    stop: torch.Tensor
    table: torch.Tensor
    reachable: Sequence[int]
    sites: dict[int, str] = field(default_factory=dict)
    told: bool = False
    memory: object = None

    def __post_init__(self) -> None:
        # The board's first word is read before every call. Reading it from the tensor would take microseconds.
        self._given_up = ctypes.c_int32.from_address(self.board.words.data_ptr())
        if self.stop.is_cuda:
            abort_stream(self.stop.device)

    @classmethod
    def of(cls, group_name: str, ranks: Sequence[int], device: torch.device, rank: int = 0) -> FaultRecord:
        """A record that this rank shares with no other rank. ``rank``: this process's index in ``ranks``."""
        board = own_board(len(ranks), device)
        stop = symmetric.lasting(torch.zeros(layout.STOP_WORDS, dtype=torch.int32), device)
        table = symmetric.lasting(torch.tensor([stop.data_ptr()]), device)
        stop[1:].copy_(stop_words(rank, board, table))
        return cls(group_name, ranks, rank, board, stop, table, [stop.data_ptr()])

    @classmethod
    def shared(
        cls, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device, together: symmetric.Together
    ) -> FaultRecord:
        """One record for all ranks of ``group``. All of them call this together, and not while a CUDA graph is
        captured.

        Args:
            together: makes an attempt on every rank, and raises on all of them if it failed on one.

        Raises:
            NotOnAllRanks: on all ranks, if a rank has no memory left or shares no host memory with the others.
        """
        memory = symmetric.allocate(layout.STOP_WORDS, torch.int32, device, group, together)

        def make() -> FaultRecord:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            # ``shared_board`` gets all words but the first. The first word is the abort word, which must stay 0 until a
            # rank gives up or aborts the group.
            words = memory.local[1:]
            exchange = _Behind(words, tuple(peer[1:] for peer in memory.peers))
            board = shared_board(group.rank(), exchange, together)

            def tell() -> FaultRecord:
                words.copy_(stop_words(group.rank(), board, memory.pointers))
                known = memory.local, memory.pointers, memory.pointers.tolist()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                return cls(group.group_name, ranks, group.rank(), board, *known, memory=memory)

            # All ranks do this together, so that no rank runs a kernel before the kernels of all ranks can be stopped.
            found: FaultRecord = together("tell its kernels where the board is", tell)
            return found

        # During a graph's first run, CUDA graph trees claim all memory that this thread allocates. So another thread
        # makes the record.
        with ThreadPoolExecutor(1, "overlap_inductor shares a board") as thread:
            return thread.submit(make).result()

    def number(self, site: str) -> int:
        """The number under which kernels of all ranks record ``site``: a hash of its name, below ``SITE_NUMBERS``.
        Sites whose numbers collide are reported together."""
        number = zlib.crc32(site.encode()) % SITE_NUMBERS
        known = self.sites.setdefault(number, site)
        if site not in known.split(" or "):
            self.sites[number] = f"{known} or {site}"
        return number

    def abort(self) -> None:
        """Make every wait of the group return at once from now on, on all ranks that share the board."""
        self.told = True
        record = self.board.record(self.rank)
        if not record[0]:
            now = torch.tensor([time.time_ns()]).view(torch.int32)
            record[1:] = torch.cat([torch.zeros(5, dtype=torch.int32), now])
            record[0] = 1
        self.board.words[0] = 1
        self._set_abort_words(self.reachable)

    def stop_waits(self) -> None:
        """Make every wait of the group on this rank return at once from now on."""
        self._set_abort_words([self.stop.data_ptr()])

    def _set_abort_words(self, addresses: Sequence[int]) -> None:
        copy, device = copier(self.stop.device.type), self.stop.device
        if device.type == "cpu":
            for address in addresses:
                copy(address, self.board.one, 4, 0)
            return
        try:
            with torch.cuda.device(device):
                # This call makes the device's context current on this thread.
                torch.cuda.is_current_stream_capturing()
                for address in addresses:
                    copy(address, self.board.one, 4, abort_stream(device).cuda_stream)
        except RuntimeError as error:
            # The peers' watchdogs still read the fault from the board.
            name = self.group_name
            log.warning("overlap_inductor: the GPU cannot be told that group %r was aborted (%s)", name, error)

    def error(self) -> str | None:
        """The error text if a rank of the group has given up or aborted the group, else ``None``. Any thread may ask.
        Makes no CUDA call."""
        if not self._given_up.value:
            return None
        number, record = self._first()
        here, who = number == self.rank, self.ranks[number]
        _, code, peer, wanted, seen, *_ = record
        if not code:
            by = "" if here else f" by rank {who}"
            return (
                f"group {self.group_name!r} was aborted{by}; its workspace holds no valid data. "
                "Destroy the group, or end the process."
            )
        name = self.sites.get(code // layout.WAIT_KINDS, "(one that this rank has not run)")
        site = f"{'' if here else f'rank {who} gave up first: '}site {name} of group {self.group_name!r}"
        if code % layout.WAIT_KINDS == layout.WAIT_TILES:
            return (
                f"{site} timed out waiting for tiles of its own matmul: expected {wanted}, saw {seen}. "
                f"Something else held {'this rank' if here else f'rank {who}'}'s GPU for longer than the group's "
                f"timeout. {_OVER}"
            )
        what = _WAITED_FOR.get(code % layout.WAIT_KINDS, "a signal from")
        # Calls are counted modulo 2**32.
        return (
            f"{site} timed out waiting for {what} rank {self.ranks[peer]}: "
            f"expected call {wanted % 2**32}, saw call {seen % 2**32}. "
            f"That rank has died, has skipped the call, or is later than the group's timeout allows. {_OVER}"
        )

    def _first(self) -> tuple[int, list[int]]:
        """``(rank of the group, record)`` of the earliest record, by the clocks of the writers. At equal times, this
        rank is preferred."""
        records = {rank: self.board.record(rank) for rank in range(len(self.ranks))}
        given = {rank: record for rank, record in records.items() if record[0]}
        first = min(given, key=lambda rank: (int(given[rank][6:].view(torch.int64)), rank != self.rank))
        return first, given[first].tolist()

    def check(self) -> None:
        """If there is an ``error``, raise it as ``TransferError``, and store that the program was told."""
        error = self.error()
        if error is not None:
            self.told = True
            raise TransferError(error)


@dataclass(frozen=True)
class _Behind:
    """All words of a symmetric buffer except the first word, as a ``board.Exchange``."""

    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]
