"""The board of a group: a page of the host's memory that all its ranks see, their GPUs too, where a rank that gives up
says on what.

::

    word 0                   not 0: somebody has given up, or has aborted the group
    word 1                   1: what an abort word is copied from
    from ``BOARD_HEAD`` on   ``FAULT_WORDS`` a rank: its record (``kernels.layout``), which nobody else writes

A record is written first, then word 0, then the abort words of the GPUs (``kernels.signals``). So a rank whose kernel
was stopped finds the record as soon as that kernel has ended, and a host that looks at one word of its own memory
before each call knows of every fault of the group.

A board is shared by ranks of one machine; where a group has ranks elsewhere, or no GPU can reach another, each rank has
one of its own, on which it stands alone. The pages of a board are never given back: kernels that were captured hold
their addresses.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from overlap_inductor.errors import OverlapError
from overlap_inductor.kernels.layout import BOARD_HEAD
from overlap_inductor.kernels.layout import FAULT_WORDS
from overlap_inductor.runtime.driver import mapped_address
from overlap_inductor.torch_compat.symmetric import Together

SHARED_FOLDER = Path("/dev/shm")
"""A file system in memory: pages of files on a disk cannot be given to a GPU."""
PAGE_WORDS = 1024
_KEPT: list[torch.Tensor] = []
"""Pages that GPUs hold the addresses of."""


@dataclass(frozen=True)
class Board:
    """``words``: int32 in the host's memory; ``address``: of word 0 for this rank's GPU."""

    words: torch.Tensor
    address: int

    def record(self, rank: int) -> torch.Tensor:
        """The record of a rank of the group."""
        return self.words[BOARD_HEAD + rank * FAULT_WORDS :][:FAULT_WORDS]

    def record_address(self, rank: int) -> int:
        """Where this rank's GPU finds a record."""
        return self.address + (BOARD_HEAD + rank * FAULT_WORDS) * self.words.element_size()

    @property
    def one(self) -> int:
        """Address of the constant ``1``, for copies."""
        return self.address + self.words.element_size()


def board_words(world_size: int) -> int:
    """int32 words of a board: whole pages."""
    return -(-(BOARD_HEAD + world_size * FAULT_WORDS) // PAGE_WORDS) * PAGE_WORDS


def own_board(world_size: int, device: torch.device) -> Board:
    """A board that no other rank sees."""
    # (Written to outside inference mode, too.)
    with torch.inference_mode(False):
        words = torch.zeros(board_words(world_size), dtype=torch.int32)
        if device.type != "cpu":
            words = words.pin_memory()
    words[1] = 1
    return Board(words, words.data_ptr())


class Exchange(Protocol):
    """Symmetric memory of a group that nobody uses yet (``torch_compat.symmetric.SymmetricBuffer``), int32, zeroed."""

    @property
    def local(self) -> torch.Tensor: ...
    @property
    def peers(self) -> tuple[torch.Tensor, ...]: ...


def shared_board(rank: int, exchange: Exchange, together: Together) -> Board:
    """The board of a group, made by its first rank. All ranks call this together.

    Args:
        exchange: at least 2 words a rank, by which the first rank says where the board lies.
        together: makes an attempt on every rank, and fails on all of them where it failed on one.

    Raises:
        NotOnAllRanks: a rank cannot see the board; on all ranks (what ``together`` raises).
    """
    device, world_size = exchange.local.device, len(exchange.peers)
    number = torch.tensor([secrets.randbits(62)])

    def make() -> None:
        if rank == 0:
            with _explained():
                _make(SHARED_FOLDER / _name(number), board_words(world_size) * 4)
            for peer in exchange.peers:
                peer[:2].copy_(number.view(torch.int32))
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def open_it() -> Board:
        told = torch.tensor(exchange.local[:2].tolist(), dtype=torch.int32).view(torch.int64)
        with _explained():
            return _opened(SHARED_FOLDER / _name(told), world_size, device)

    try:
        together(f"make a file of {SHARED_FOLDER} for all ranks", make)
        board: Board = together(f"map the first rank's file of {SHARED_FOLDER}", open_it)
    finally:
        if rank == 0:
            # (Whoever has mapped it keeps its pages.)
            (SHARED_FOLDER / _name(number)).unlink(missing_ok=True)
    return board


@contextmanager
def _explained() -> Iterator[None]:
    """What to do where the host's memory cannot be shared."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise OverlapError(
            f"{error}; ranks tell each other of faults there. Give them one {SHARED_FOLDER} with room (the same "
            "container, or --ipc=host), or set OVERLAP_INDUCTOR_SCHEDULE=ring"
        ) from error


def _make(path: Path, size: int) -> None:
    """A new file of ``size`` bytes of memory. Raises ``OSError``, also where no memory is left for it: a page that is
    found missing later would end the process."""
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _name(number: torch.Tensor) -> str:
    return f"overlap_inductor_{int(number):016x}"


def _opened(path: Path, world_size: int, device: torch.device) -> Board:
    """Raises ``OSError``, ``RuntimeError``."""
    with torch.inference_mode(False):
        # (Else a file of this name would be made.)
        path.stat()
        words = torch.from_file(str(path), shared=True, size=board_words(world_size), dtype=torch.int32)
    words[1] = 1
    _KEPT.append(words)
    return Board(words, mapped_address(words.data_ptr(), words.nbytes, device.type))
