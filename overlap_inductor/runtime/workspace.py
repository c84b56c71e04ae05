# SPDX-License-Identifier: Apache-2.0
"""``GroupWorkspace`` holds the objects that the sites of one process group share on this rank: the group's arena
(its symmetric memory, divided into slots), fault record and patience.

All ranks of the group make a workspace together, at the first run of a graph that needs it, because they must allocate
symmetric memory together. The workspace lives at least as long as the group (``runtime.group_state``).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import TypeVar

import torch
import torch.distributed as dist

from overlap_inductor.errors import OverlapError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.runtime import watchdog
from overlap_inductor.runtime.all_or_none import NotOnAllRanks
from overlap_inductor.runtime.all_or_none import all_or_none
from overlap_inductor.runtime.arena import CREDITS
from overlap_inductor.runtime.arena import Request
from overlap_inductor.runtime.arena import Slot
from overlap_inductor.runtime.arena import WorkspaceArena
from overlap_inductor.runtime.call_order import CallOrder
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.runtime.faults import FaultRecord
from overlap_inductor.runtime.group_state import Kind
from overlap_inductor.runtime.group_state import Owner
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.distributed import group_timeout
from overlap_inductor.torch_compat.distributed import is_alive

log = logging.getLogger("overlap_inductor")

MOST_PREPARED = 64
"""The largest number of prepared kernels that a site keeps."""
MOST_KNOWN = 2**14
"""The largest number of calls that a group remembers, over all its sites. Each takes half a KiB."""


@dataclass(frozen=True)
class Launch:
    """The values that a site's kernels need besides their operands.

    Attributes:
        site: the site's number in ``faults``.
        patience_ns: how long a kernel waits for a peer, ns.
        prepared: kernels that are ready to be launched, by the caller's key.
        kept: objects that must live as long as this ``Launch``, by the caller's key.
        seen: for each call that has run once, the ids of the allocations that its memory copies read or write, and
            whether the call may be captured (``runtime.replay``).
        replays: for each captured call, the ids of these allocations, and the function that launches the call's
            graph.
    """

    rank: int
    world_size: int
    slot: Slot
    faults: FaultRecord
    site: int
    patience_ns: int
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False)
    kept: dict[Any, Any] = field(default_factory=dict, compare=False)
    seen: dict[Any, tuple[tuple[int, ...], bool]] = field(default_factory=dict, compare=False)
    replays: dict[Any, tuple[tuple[int, ...], Callable[[], None]]] = field(default_factory=dict, compare=False)

    def check_room(self, nbytes: int, signals: int, protocol: str = CREDITS) -> None:
        """Raise ``UnsupportedError`` if the slot is too small for a call, or is used with another protocol."""
        slot = self.slot
        if nbytes > slot.nbytes or signals > slot.signals or protocol != slot.protocol:
            raise UnsupportedError(
                f"the call needs {nbytes} bytes and {signals} signals with protocol {protocol}; its slot has"
                f" {slot.nbytes} and {slot.signals} with protocol {slot.protocol}"
            )

    def remember(self, key: Any, kernel: Any) -> None:
        """Keep a prepared kernel. If there are already ``MOST_PREPARED``, drop them first."""
        if len(self.prepared) >= MOST_PREPARED:
            self.prepared.clear()
        self.prepared[key] = kernel


_UNKNOWN: Any = object()
Known = TypeVar("Known")


@dataclass
class GroupWorkspace:
    """One group's workspace on one device.

    Attributes:
        patience_ns: how long a kernel waits for a peer, ns: the group's timeout.
        blocks: the number of SMs of the device.
        without_room: sites of plans whose workspace would have exceeded the limit. A call of such a site runs without
            overlap, unless another plan, earlier or later, gave the site a slot that suffices.
        prepared: requests of plans that ``prepare`` has handled, as JSON texts.
    """

    group: dist.ProcessGroup
    arena: WorkspaceArena
    faults: FaultRecord
    patience_ns: int
    blocks: int
    without_room: set[str] = field(default_factory=set)
    prepared: set[str] = field(default_factory=set)
    _launches: dict[tuple[str, str], Launch] = field(default_factory=dict)
    _known: dict[Hashable, Any] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    def known(self, call: Hashable, make: Callable[[], Known | None]) -> Known | None:
        """Return what ``make`` made for ``call``. Any thread may ask. Results are dropped when a plan is prepared, or
        when there are ``MOST_KNOWN``.

        Args:
            call: everything on which the result depends.
            make: makes a launch and what else the op needs. It returns ``None`` if the call runs without a kernel, for
                example because its site has no slot that suffices. Several threads may run ``make`` for the same
                call, one after the other. Its errors are passed on.
        """
        found = self._known.get(call, _UNKNOWN)
        if found is _UNKNOWN:
            with self._lock:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                found = self._known[call] = make()
        return found

    def launch(self, site: str, nbytes: int, signals: int, protocol: str = CREDITS) -> Launch | None:
        """The launch of a call of ``site``. ``None`` if the site's slot is too small for the call, or if there was no
        room for a slot.

        Args:
            nbytes: number of bytes that peers write.
            signals: number of signals that each peer sends.

        Raises:
            OverlapError: ``prepare`` was not called for the site.
        """
        request = Request(site, nbytes, signals, protocol)
        key = (request.site, request.protocol)
        if not self.arena.holds(request) and (site in self.without_room or self.arena.knows(*key)):
            # There was no room for a slot, or this call is larger than planned.
            return None
        slot, made = self.arena.slot(*key), self._launches.get(key)
        if made is None or made.slot is not slot:
            made = Launch(
                self.group.rank(), self.group.size(), slot, self.faults, self.faults.number(site), self.patience_ns
            )
            self._launches[key] = made
        return made

    def prepare(self, requests: Sequence[Request], limit: int) -> None:
        """Give every site of a plan its slot. If all slots together exceed the limit of some rank, none of these sites
        gets a new slot on any rank (``without_room``). All ranks of the group call this together.

        Args:
            requests: the requests of the plan's sites, in the plan's order, equal on all ranks.
            limit: bytes that all slots of the group may take on this rank.

        Raises:
            OverlapError: memory would have to be allocated while a CUDA graph is captured.
            NotOnAllRanks: a rank failed to allocate or map memory, or the ranks did not tell each other in time whether
                they succeeded (``all_or_none``). The slots of a rank that raises are as before.
        """
        with self._lock:
            self._prepare(requests, limit)

    def _prepare(self, requests: Sequence[Request], limit: int) -> None:
        self.arena.limit = limit
        full = self._why_no_room(self.arena.missing_bytes(requests), limit)
        if full is None:
            self.arena.prepare(requests)
        else:
            self.without_room.update(r.site for r in requests)
            log.warning(
                "overlap_inductor: %d sites of group %r run without overlap: %s Raise the limit to overlap them.",
                sum(not self.arena.holds(r) for r in requests), self.group.group_name, full,
            )  # fmt: skip
        # A site may have another slot now.
        self._known.clear()

    def _why_no_room(self, missing: int, limit: int) -> NotOnAllRanks | None:
        """Why the group has no room for ``missing`` more bytes, or ``None``. All ranks decide together, because their
        limits may differ. If each rank decided alone, a kernel could wait for peers that run the plain collective."""
        if not missing:
            return None

        def fits() -> None:
            if self.arena.nbytes + missing > limit:
                raise OverlapError(
                    f"other graphs hold {self.arena.nbytes} bytes, and OVERLAP_INDUCTOR_WORKSPACE_LIMIT is"
                    f" {limit >> 20} MiB"
                )

        try:
            all_or_none(self.group, f"hold {missing} more bytes of workspace", fits)
        except NotOnAllRanks as error:
            return error
        return None


def workspace_of(group: dist.ProcessGroup, device: torch.device) -> GroupWorkspace:
    """The group's workspace on ``device``, made at first use by all ranks of the group together.

    Raises:
        OverlapError: the group was destroyed, or memory would have to be allocated while a CUDA graph is captured.
        NotOnAllRanks: a step failed on a rank, such as allocating memory. Or the ranks did not tell each other in time
            whether they succeeded (``all_or_none``).
    """
    return _WORKSPACES.of(group, device)


def _made(owner: Owner) -> GroupWorkspace:
    group, device = owner.group, owner.device
    assert device is not None
    order = call_order(device)

    def together(what: str, attempt: Callable[[], Any]) -> Any:
        return all_or_none(group, what, attempt)

    def allocate(elements: int, dtype: torch.dtype) -> Any:
        return symmetric.allocate(elements, dtype, device, group, together)

    faults = _fault_record(group, device, together)
    arena = WorkspaceArena(group.size(), device, allocate, lambda: symmetric.capturing(), 2**62)
    patience = int(group_timeout(group).total_seconds() * 1e9)
    made = GroupWorkspace(group, arena, faults, patience, symmetric.multiprocessors(device))
    if isinstance(order, CallOrder):
        watchdog.watch(faults, lambda: is_alive(group), order.in_flight)
    return made


def _calls_ended(workspace: GroupWorkspace) -> None:
    """Wait until no call of the destroyed group runs, because its memory is about to be freed."""
    order = call_order(workspace.arena.device)
    if isinstance(order, CallOrder):
        order.finish()


_WORKSPACES = Kind("workspace", _made, _calls_ended)


def _fault_record(group: dist.ProcessGroup, device: torch.device, together: symmetric.Together) -> FaultRecord:
    """The group's fault record. The ranks share one if their GPUs reach each other; otherwise each rank has its own."""
    ranks = dist.get_process_group_ranks(group)
    if group.size() == 1 or symmetric.why_no_symmetric_memory(tuple(ranks), device) is not None:
        found: FaultRecord = together(
            "make its fault record", lambda: FaultRecord.of(group.group_name, ranks, device, group.rank())
        )
        return found
    if symmetric.capturing():
        raise OverlapError(
            f"group {group.group_name!r} needs memory for its fault record while a CUDA graph is being captured, and"
            " none can be allocated then. Run the compiled function once before capturing it."
        )
    return FaultRecord.shared(group, ranks, device, together)


def prepare(group: dist.ProcessGroup, device: torch.device, requests: str, limit: int) -> str | None:
    """``GroupWorkspace.prepare``, once for each plan. If there is no room, the plan's sites without a sufficient slot
    run without overlap on all ranks, and the log says how many.

    Args:
        requests: JSON text, ``[[site, bytes, signals], ...]`` in the plan's order, equal on all ranks. A site whose
            protocol is not ``credits`` has the protocol as a fourth element.
        limit: bytes that all slots of the group may take on this rank.

    Returns:
        ``None``. After ``NotOnAllRanks``: its text. The first rank writes this text. Only a rank that the text does not
        reach in time has another text.

    Raises:
        OverlapError: memory would have to be allocated while a CUDA graph is captured.
    """
    try:
        place = workspace_of(group, device)
        if requests not in place.prepared:
            place.prepare([Request(*request) for request in json.loads(requests)], limit)
            place.prepared.add(requests)
    except NotOnAllRanks as error:
        return str(error)
    return None
