"""``GroupWorkspace``: what the fused kernels of one process group share on this rank: its arena, its fault record, its patience.

Made at the first run of a graph that needs it, behind the agreement of the ranks, by all of them together: allocating symmetric memory is a
collective. It lives as long as the group; a destroyed group whose name is used again gets a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch
import torch.distributed as dist

from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.distributed import group_timeout
from overlap_inductor.transports.arena import Request
from overlap_inductor.transports.arena import Slot
from overlap_inductor.transports.arena import WorkspaceArena
from overlap_inductor.transports.faults import FaultRecord

log = logging.getLogger("overlap_inductor")


@dataclass(frozen=True)
class Launch:
    """Where a site's kernel runs: this rank of a group, its slot, the group's fault record and the site's number in it, the patience of waits in ns."""

    rank: int
    world_size: int
    slot: Slot
    faults: FaultRecord
    site: int
    patience_ns: int


@dataclass
class GroupWorkspace:
    """One group's workspace on one device.

    Attributes:
        patience_ns: how long a kernel waits for a peer: the group's timeout.
        blocks: SMs of the device.
        without_room: sites whose workspace would exceed the limit; they run as they stood.
    """

    group: dist.ProcessGroup
    arena: WorkspaceArena
    faults: FaultRecord
    patience_ns: int
    blocks: int
    without_room: set[str] = field(default_factory=set)
    _launches: dict[str, Launch] = field(default_factory=dict)
    _last_stream: dict[int, torch.cuda.Stream] = field(default_factory=dict)

    def launch(self, site: str) -> Launch:
        """Where the current stream may start a call of ``site``.

        Raises:
            OverlapError: the site has not been prepared for.
        """
        slot, made = self.arena.slot(site), self._launches.get(site)
        if made is None or made.slot is not slot:
            made = Launch(self.group.rank(), self.group.size(), slot, self.faults, self.faults.number(site), self.patience_ns)
            self._launches[site] = made
        # (A graph that is captured may wait for nothing outside it; whoever replays it orders it behind what ran before.)
        if made.slot.calls.is_cuda and not symmetric.capturing():
            stream = torch.cuda.current_stream(made.slot.calls.device)
            last = self._last_stream.get(id(made.slot), stream)
            if last != stream:
                # Two streams in one slot: a kernel's queues are for one call at a time.
                stream.wait_stream(last)
            self._last_stream[id(made.slot)] = stream
        return made


_WORKSPACES: dict[tuple[str, torch.device], GroupWorkspace] = {}


def workspace_of(group: dist.ProcessGroup, device: torch.device, limit: int | None = None) -> GroupWorkspace:
    """The group's workspace on ``device``; made on first use, where ``limit`` (bytes a rank) is that of the first plan that needs it."""
    key = (group.group_name, device)
    known = _WORKSPACES.get(key)
    if known is None or known.group is not group:
        arena = WorkspaceArena(
            group.size(), device, lambda n, dtype: symmetric.allocate(n, dtype, device, group), symmetric.capturing, 2**62 if limit is None else limit
        )
        faults = FaultRecord.of(group.group_name, dist.get_process_group_ranks(group), device)
        patience = int(group_timeout(group).total_seconds() * 1e9)
        known = GroupWorkspace(group, arena, faults, patience, symmetric.multiprocessors(device))
        _WORKSPACES[key] = known
    return known


def prepare(group: dist.ProcessGroup, device: torch.device, requests: Sequence[Sequence[object]], limit: int) -> None:
    """Give every site of a plan its slot. ``requests``: ``(site, bytes, signals)`` in the plan's order, equal on all ranks.

    Where they do not fit under the limit, beside what graphs before hold, they are told to run without (on all ranks alike), and the log says so.

    Raises:
        OverlapError: memory would have to be allocated while a CUDA graph is captured.
    """
    wanted = [Request(str(site), int(nbytes), int(signals)) for site, nbytes, signals in requests]  # type: ignore[call-overload]
    place = workspace_of(group, device, limit)
    missing = place.arena.missing_bytes(wanted)
    if place.arena.nbytes + missing > place.arena.limit:
        place.without_room.update(r.site for r in wanted)
        log.warning(
            "overlap_inductor: %d sites of group %r run as they stood: their kernels need %d bytes of workspace beyond the %d that other graphs hold, and "
            "OVERLAP_INDUCTOR_WORKSPACE_LIMIT is %d MiB", len(wanted), group.group_name, missing, place.arena.nbytes, place.arena.limit >> 20,
        )  # fmt: skip
        return
    place.arena.prepare(wanted)
