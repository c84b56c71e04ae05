"""``GroupWorkspace``: what the fused kernels of one process group share on this rank: its arena, its fault record, its patience.

Made at the first run of a graph that needs it, behind the agreement of the ranks, by all of them together: allocating symmetric memory is a
collective. It lives as long as the group; a destroyed group whose name is used again gets a new one. Calls of a rank run one after the
other on its GPU, whatever their streams.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from dataclasses import field

import torch
import torch.distributed as dist

from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.distributed import group_timeout
from overlap_inductor.torch_compat.distributed import is_alive
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
        without_room: sites of plans whose workspace would have exceeded the limit; they run as they stood.
        prepared: the plans' requests that have been dealt with.
    """

    group: dist.ProcessGroup
    arena: WorkspaceArena
    faults: FaultRecord
    patience_ns: int
    blocks: int
    without_room: set[str] = field(default_factory=set)
    prepared: set[str] = field(default_factory=set)
    _launches: dict[str, Launch] = field(default_factory=dict)

    def launch(self, site: str, need: tuple[int, int]) -> Launch | None:
        """Where the current stream may start a call of ``site`` that needs ``(bytes, signals)``; ``None`` where there was no room for it.

        Raises:
            OverlapError: the site has not been prepared for.
        """
        if not self.arena.holds(Request(site, *need)) and site in self.without_room:
            return None
        slot, made = self.arena.slot(site), self._launches.get(site)
        if made is None or made.slot is not slot:
            made = Launch(self.group.rank(), self.group.size(), slot, self.faults, self.faults.number(site), self.patience_ns)
            self._launches[site] = made
        if slot.calls.is_cuda:
            one_after_the_other(slot.calls.device)
        return made


_LAST_STREAM: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}


def one_after_the_other(device: torch.device) -> None:
    """The current stream waits for the stream of the call before, whatever its site, slot or group, so that all ranks run their calls in host order.

    A kernel that waits for its peers fills the GPU: two on two streams, begun here in one order and there in the other, would wait for each
    other for ever. Inside a capture the same among the streams of that capture; whoever replays a graph orders it behind what ran before.
    """
    stream, captured = torch.cuda.current_stream(device), symmetric.capturing()
    last = _LAST_STREAM.get((device, captured), stream)
    if last != stream:
        with torch.cuda.stream(last):
            same_capture = symmetric.capturing() == captured
        if same_capture:
            stream.wait_stream(last)
    _LAST_STREAM[device, captured] = stream


_WORKSPACES: dict[tuple[str, torch.device], GroupWorkspace] = {}


def workspace_of(group: dist.ProcessGroup, device: torch.device) -> GroupWorkspace:
    """The group's workspace on ``device``, made on first use. Those of groups that are no more are dropped then."""
    key = (group.group_name, device)
    known = _WORKSPACES.get(key)
    if known is None or known.group is not group:
        for other in [k for k, w in _WORKSPACES.items() if not is_alive(w.group)]:
            del _WORKSPACES[other]
        arena = WorkspaceArena(group.size(), device, lambda n, dtype: symmetric.allocate(n, dtype, device, group), lambda: symmetric.capturing(), 2**62)
        faults = FaultRecord.of(group.group_name, dist.get_process_group_ranks(group), device)
        patience = int(group_timeout(group).total_seconds() * 1e9)
        known = GroupWorkspace(group, arena, faults, patience, symmetric.multiprocessors(device))
        _WORKSPACES[key] = known
    return known


def prepare(group: dist.ProcessGroup, device: torch.device, requests: str, limit: int) -> None:
    """Give every site of a plan its slot, once. ``requests``: JSON text, ``[[site, bytes, signals]]`` in the plan's order, equal on all ranks.

    Where they do not fit under ``limit`` bytes, beside what graphs before hold, all sites of the plan run as they stood (on all ranks alike), and
    the log says so.

    Raises:
        OverlapError: memory would have to be allocated while a CUDA graph is captured.
    """
    place = workspace_of(group, device)
    if requests in place.prepared:
        return
    wanted = [Request(*request) for request in json.loads(requests)]
    place.arena.limit = limit
    missing = place.arena.missing_bytes(wanted)
    if missing and place.arena.nbytes + missing > limit:
        place.without_room.update(r.site for r in wanted)
        log.warning(
            "overlap_inductor: %d sites of group %r run as they stood: their kernels need %d bytes of workspace beyond the %d that other graphs hold, and "
            "OVERLAP_INDUCTOR_WORKSPACE_LIMIT is %d MiB", len(wanted), group.group_name, missing, place.arena.nbytes, limit >> 20,
        )  # fmt: skip
    else:
        place.arena.prepare(wanted)
    place.prepared.add(requests)
