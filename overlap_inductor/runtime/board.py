# SPDX-License-Identifier: Apache-2.0
"""``Board``: pages of the host's memory for reports of faults. A rank whose wait times out (it *gives up*) records
there what it waited for.

::

    word 0                   not 0: a rank has given up, or has aborted the group
    word 1                   the constant 1: the source from which abort words are copied
    from ``BOARD_HEAD`` on   ``FAULT_WORDS`` words per rank: its record (``kernels.layout``), written by that rank alone

Each rank of a group has an abort word in its GPU's memory. If this word is not 0, waits of the rank's kernels return at
once.

The order of writes is: the record, then word 0, then the abort words of the GPUs (``kernels.signals``). So when a
stopped kernel has ended, its host finds the record.

Ranks share a board if they run on one machine and their GPUs reach each other. Otherwise each rank has a board of its
own. The pages of a shared board are never freed, because kernels in captured CUDA graphs hold their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from overlap_inductor.errors import OverlapError
from overlap_inductor.kernels.layout import BOARD_HEAD
from overlap_inductor.kernels.layout import FAULT_WORDS
from overlap_inductor.runtime import shared_file
from overlap_inductor.runtime.driver import mapped_address
from overlap_inductor.torch_compat.symmetric import Together

PAGE_WORDS = 1024
_KEPT: list[torch.Tensor] = []
"""Pages of shared boards, kept alive because GPUs hold their addresses."""


@dataclass(frozen=True)
class Board:
    """A mapped board.

    Attributes:
        words: int32 ``[board_words(world_size)]`` in the host's memory.
        address: address of word 0 as this rank's GPU sees it.
    """

    words: torch.Tensor
    address: int

    def record(self, rank: int) -> torch.Tensor:
        """The record of a rank of the group, int32 ``[FAULT_WORDS]``: a view of ``words``."""
        return self.words[BOARD_HEAD + rank * FAULT_WORDS :][:FAULT_WORDS]

    def record_address(self, rank: int) -> int:
        """Address of the record of ``rank`` as this rank's GPU sees it."""
        return self.address + (BOARD_HEAD + rank * FAULT_WORDS) * self.words.element_size()

    @property
    def one(self) -> int:
        """Address of the constant 1 (word 1), for copies."""
        return self.address + self.words.element_size()


def board_words(world_size: int) -> int:
    """int32 words of a board, in whole pages of ``PAGE_WORDS``."""
    return -(-(BOARD_HEAD + world_size * FAULT_WORDS) // PAGE_WORDS) * PAGE_WORDS


def own_board(world_size: int, device: torch.device) -> Board:
    """A board that no other rank sees."""
    # A tensor that is made in inference mode cannot be written to outside inference mode.
    with torch.inference_mode(False):
        words = torch.zeros(board_words(world_size), dtype=torch.int32)
        if device.type != "cpu":
            words = words.pin_memory()
    words[1] = 1
    return Board(words, words.data_ptr())


class Exchange(Protocol):
    """Zeroed int32 symmetric memory, not in use yet (``torch_compat.symmetric.SymmetricBuffer``)."""

    @property
    def local(self) -> torch.Tensor: ...
    @property
    def peers(self) -> tuple[torch.Tensor, ...]: ...


def shared_board(rank: int, exchange: Exchange, together: Together) -> Board:
    """The board of a group, made by its first rank. All ranks call this together.

    Args:
        exchange: at least 2 words on each rank, in which the first rank writes the number of the board's file.
        together: makes an attempt on every rank, and raises on all of them if it failed on one.

    Raises:
        NotOnAllRanks: on all ranks, if a rank cannot map the board.
    """
    device, world_size = exchange.local.device, len(exchange.peers)
    number = shared_file.new_number()

    def make() -> None:
        if rank == 0:
            with _explained():
                shared_file.make_file(shared_file.path_of(number), board_words(world_size) * 4)
            words = torch.tensor([number]).view(torch.int32)
            for peer in exchange.peers:
                peer[:2].copy_(words)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def open_it() -> Board:
        told = torch.tensor(exchange.local[:2].tolist(), dtype=torch.int32).view(torch.int64)
        with _explained():
            return _opened(shared_file.path_of(int(told)), world_size, device)

    try:
        together(f"make a file of {shared_file.SHARED_FOLDER} for all ranks", make)
        board: Board = together(f"map the first rank's file of {shared_file.SHARED_FOLDER}", open_it)
    finally:
        if rank == 0:
            # The memory stays as long as a process maps it.
            shared_file.path_of(number).unlink(missing_ok=True)
    return board


@contextmanager
def _explained() -> Iterator[None]:
    """Turn errors of the shared folder into an ``OverlapError`` that says what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise OverlapError(
            f"{error}; ranks report faults to each other in a file of {shared_file.SHARED_FOLDER}. Give all ranks the"
            " same folder with free space (one container, or --ipc=host), or set OVERLAP_INDUCTOR_SCHEDULE=ring"
        ) from error


def _opened(path: Path, world_size: int, device: torch.device) -> Board:
    """Map the first rank's file. Raises ``OSError`` or ``RuntimeError``."""
    with torch.inference_mode(False):
        # Raises if the file is missing. ``from_file`` would make a new file.
        path.stat()
        words = torch.from_file(str(path), shared=True, size=board_words(world_size), dtype=torch.int32)
    words[1] = 1
    _KEPT.append(words)
    return Board(words, mapped_address(words.data_ptr(), words.nbytes, device.type))
