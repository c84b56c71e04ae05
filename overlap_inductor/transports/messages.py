# SPDX-License-Identifier: Apache-2.0
"""``Messages``: copy engines move messages between ranks, through one workspace slot with protocol ``MESSAGES``. Only
sender and receiver know a message's size. They take part in equally many messages of each lane.

The slot is divided evenly into *channels*: one for each peer and lane. A channel holds one message
(``kernels.messages``). So a message is limited by the slot, and longer tensors need several messages.
"""

from __future__ import annotations

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
        self._to_send = self._prepared(messages.wait_to_send)
        self._arrived = self._prepared(messages.wait_for_message)
        self._taken = self._prepared(messages.take)
        self._addresses = {key: self._addresses_of(*key) for key in self._to_send}

    def _prepared(self, kernel: Any) -> dict[tuple[int, int], PreparedKernel]:
        """``kernel`` for each lane and peer."""
        from overlap_inductor.torch_compat.triton_launch import PreparedKernel

        fixed = call_arguments(kernel, self._launch)
        return {
            (lane, peer): PreparedKernel(kernel, 1, {}, {**fixed, "peer": peer, "lane": lane}, num_warps=1)
            for lane in range(LANES)
            for peer in range(self._launch.world_size)
            if peer != self._launch.rank
        }

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

    def send(self, lane: int, peer: int, source: torch.Tensor) -> None:
        """Send a contiguous tensor to ``peer``, when the peer has taken the lane's previous message. Work that is
        queued later may overwrite the tensor.

        Raises:
            UnsupportedError: the message is larger than ``room``.
        """
        if source.nbytes > self.room:
            raise UnsupportedError(f"a message of {source.nbytes} bytes; the workspace has room for {self.room}")
        self._to_send[lane, peer]()
        to, flag, counter = self._addresses[lane, peer]
        stream = symmetric.stream_number(source.device)
        self._copy(to, source.data_ptr(), source.nbytes, stream)
        self._copy(flag, counter, WORD, stream)

    def wait(self, lane: int, peer: int) -> None:
        """Wait until the lane's next message of ``peer`` has arrived. Call ``taken`` before the next ``wait``."""
        self._arrived[lane, peer]()

    def received(self, lane: int, peer: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The message of ``peer`` as ``[rows, width]``, in the slot. Read it after ``wait`` and before ``taken``."""
        start = self._channel(peer, self._launch.rank, lane)
        nbytes = rows * width * dtype.itemsize
        return self._launch.slot.data.local[start : start + nbytes].view(dtype).view(rows, width)

    def taken(self, lane: int, peer: int) -> None:
        """Let ``peer`` send the lane's next message. Queue this after everything that reads the message."""
        self._taken[lane, peer]()


def messages_of(launch: Launch) -> Messages:
    """The launch's ``Messages``, made at first use."""
    found = launch.kept.get("messages")
    if found is None:
        found = launch.kept["messages"] = Messages(launch)
    return found
