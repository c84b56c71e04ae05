# SPDX-License-Identifier: Apache-2.0
"""Transport ``p2p``: messages by ``torch.distributed`` send and receive, on the group's own backend.

* NCCL: a hop's receives and sends are one coalesced batch. A communicator needs the same order of operations on all
  ranks. A batch is one operation, so every rank can list its receives before its sends.
* gloo: all receives of an exchange are posted before the first send, so both directions of a link are busy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_inductor.errors import TransferError
from overlap_inductor.runtime.group_state import Kind
from overlap_inductor.runtime.group_state import Owner
from overlap_inductor.torch_compat.distributed import why_no_send
from overlap_inductor.transports.transport import Message


def _communicator(owner: Owner) -> torch.Tensor:
    """Create the group's communicator by a collective, in which all ranks take part. Without this collective, the
    group's first messages would create it, and would wait for all ranks. If a rank had no message, the others would
    then wait for ever."""
    one = torch.ones(1, device=owner.device)
    dist.all_reduce(one, group=owner.group)
    return one


_COMMUNICATORS = Kind("communicator", _communicator)


class P2P:
    """Implements ``transports.transport.Exchanges``."""

    name = "p2p"
    moved_by = "torch.distributed send and receive"

    def why_not(self, group_name: str, device: torch.device) -> str | None:
        return why_no_send(group_name, device)

    def receives_first(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def join(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if not self.receives_first(device):
            _COMMUNICATORS.of(group, device)

    def start(self, group: dist.ProcessGroup, receives: Sequence[Message], sends: Sequence[Message]) -> list[dist.Work]:
        def peer(message: Message) -> int:
            return dist.get_global_rank(group, message.peer)

        messages = (*receives, *sends)
        if not messages:
            return []
        if not self.receives_first(messages[0].tensor.device):
            ops = [dist.P2POp(dist.irecv, m.tensor, peer(m), group) for m in receives]
            ops += [dist.P2POp(dist.isend, m.tensor, peer(m), group) for m in sends]
            return list(dist.batch_isend_irecv(ops))
        started = [_work(dist.irecv(m.tensor, peer(m), group, m.tag)) for m in receives]
        return started + [_work(dist.isend(m.tensor, peer(m), group, m.tag)) for m in sends]


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise TransferError("this rank is not in the group of the transfer; an overlap op ran on a wrong rank")
    return work
