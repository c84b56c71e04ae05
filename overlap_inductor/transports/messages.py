# SPDX-License-Identifier: Apache-2.0
"""``Messages``: copy engines move messages between ranks, through one workspace slot with protocol ``MESSAGES``. Only
sender and receiver know a message's size. They take part in equally many messages of each lane.

The slot is divided evenly into *channels*: one for each peer and lane. A channel holds one message
(``kernels.messages``). So a message is limited by the slot, and longer tensors need several messages.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING
from typing import Any

import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.layout import QUEUE_WORDS
from overlap_inductor.runtime.arena import ALIGNMENT
from overlap_inductor.runtime.driver import copier
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports.call_arguments import call_arguments

if TYPE_CHECKING:
    from overlap_inductor.torch_compat.triton_launch import PreparedKernel

TRANSPORT = "copy_engine"
"""The name that switches and reports use for these messages."""
LANES = 2
THERE, BACK = range(LANES)
"""The lanes: what is sent to be computed, and what returns."""
MOST_RANKS = 31
"""Masks of ranks have 32 bits, with sign."""
WORD = 4
"""Bytes of a flag and of a counter."""
SIGNALS = 2 * LANES
"""Signals of a slot: two for each lane (``kernels.messages``)."""


def needed(world_size: int, nbytes: int) -> tuple[int, int]:
    """``(bytes, signals)`` of a slot whose messages may have ``nbytes`` bytes each."""
    return LANES * (world_size - 1) * -(-nbytes // ALIGNMENT) * ALIGNMENT, SIGNALS


class Messages:
    """See the module. All methods but ``received`` queue work on the current stream.

    Args:
        launch: a launch whose slot has ``needed`` bytes and signals.
    """

    def __init__(self, launch: Launch) -> None:
        from overlap_inductor.kernels import messages

        self._launch = launch
        channels = LANES * (launch.world_size - 1)
        self.room = launch.slot.nbytes // channels // ALIGNMENT * ALIGNMENT
        """The largest number of bytes of a message."""
        self._copy = copier(launch.slot.data.local.device.type)
        self._begin = self._of_a_round(messages.begin_round)
        self._end = self._of_a_round(messages.end_round)
        self._arrived = {key: self._prepared(messages.wait_for_message, *key) for key in self._channels()}
        self._addresses = {key: self._addresses_of(*key) for key in self._channels()}
        self._places: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def _channels(self) -> list[tuple[int, int]]:
        """Each lane and peer."""
        peers = [p for p in range(self._launch.world_size) if p != self._launch.rank]
        return [(lane, peer) for lane in range(LANES) for peer in peers]

    def _of_a_round(self, kernel: Any) -> PreparedKernel:
        from overlap_inductor.torch_compat.triton_launch import PreparedKernel

        fixed = call_arguments(kernel, self._launch)
        return PreparedKernel(kernel, 1, {"there_mask": 1, "back_mask": 1}, fixed, num_warps=1)

    def _prepared(self, kernel: Any, lane: int, peer: int) -> PreparedKernel:
        from overlap_inductor.torch_compat.triton_launch import PreparedKernel

        fixed = call_arguments(kernel, self._launch) | {"peer": peer, "lane": lane}
        return PreparedKernel(kernel, 1, {}, fixed, num_warps=1)

    def _addresses_of(self, lane: int, peer: int) -> tuple[int, int, int]:
        """The addresses of the channel to ``peer``, of its flag there, and of this rank's counter of sent messages."""
        launch, slot = self._launch, self._launch.slot
        counter = QUEUE_WORDS + peer * slot.signals + 2 * lane
        flag = (launch.world_size + launch.rank * slot.signals + 2 * lane) * FLAG_WORDS
        return (
            slot.data.peers[peer].data_ptr() + self._channel(launch.rank, peer, lane),
            slot.flags.peers[peer].data_ptr() + flag * WORD,
            slot.queues.data_ptr() + counter * WORD,
        )

    def _channel(self, sender: int, receiver: int, lane: int) -> int:
        """Where the channel begins in the receiver's slot, in bytes."""
        world_size = self._launch.world_size
        return (lane * (world_size - 1) + (sender - receiver) % world_size - 1) * self.room

    def begin(self, there: Collection[int], back: Collection[int]) -> None:
        """Wait until the ranks in ``there`` and ``back`` have taken the previous messages of lanes ``THERE`` and
        ``BACK``. Call this before the round's ``send``, with exactly the ranks to which it sends in each lane."""
        self._begin(_mask(there), _mask(back))

    def send(self, lane: int, peer: int, source: torch.Tensor) -> None:
        """Send a contiguous tensor to ``peer``. Work that is queued later may overwrite the tensor.

        Raises:
            UnsupportedError: the message is larger than ``room``.
        """
        if source.nbytes > self.room:
            raise UnsupportedError(f"a message of {source.nbytes} bytes; the workspace has room for {self.room}")
        to, flag, counter = self._addresses[lane, peer]
        stream = symmetric.stream_number(source.device)
        self._copy(to, source.data_ptr(), source.nbytes, stream)
        self._copy(flag, counter, WORD, stream)

    def wait(self, lane: int, peer: int) -> None:
        """Wait until the lane's next message of ``peer`` has arrived. Call ``end`` before the next ``wait`` for this
        lane and peer."""
        self._arrived[lane, peer]()

    def received(self, lane: int, peer: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The message of ``peer`` as ``[rows, width]``, in the slot. Read it after ``wait`` and before ``end``."""
        return self.place(lane, peer, width, dtype)[:rows]

    def place(self, lane: int, peer: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The place of all messages of ``peer`` in the lane, with as many rows as it has room for."""
        key = lane, peer, width, dtype
        found = self._places.get(key)
        if found is None:
            start, row = self._channel(peer, self._launch.rank, lane), width * dtype.itemsize
            room = self._launch.slot.data.local[start : start + self.room // row * row]
            found = self._places[key] = room.view(dtype).view(-1, width)
        return found

    def copy_out(self, lane: int, peer: int, to: torch.Tensor) -> None:
        """Copy the message of ``peer`` into a contiguous tensor. Call this after ``wait`` and before ``end``."""
        source = self._launch.slot.data.local.data_ptr() + self._channel(peer, self._launch.rank, lane)
        self._copy(to.data_ptr(), source, to.nbytes, symmetric.stream_number(to.device))

    def end(self, there: Collection[int], back: Collection[int]) -> None:
        """Let the ranks in ``there`` and ``back`` send their next messages in lanes ``THERE`` and ``BACK``. Queue this
        after everything that reads their messages."""
        self._end(_mask(there), _mask(back))


def _mask(ranks: Collection[int]) -> int:
    return sum(1 << rank for rank in ranks)


def messages_of(launch: Launch) -> Messages:
    """The launch's ``Messages``, made at first use."""
    found = launch.kept.get("messages")
    if found is None:
        found = launch.kept["messages"] = Messages(launch)
    return found
