"""``GroupWorkspace``: what the sites of one process group share on this rank: its arena, its fault record, its
patience.

Made at the first run of a graph that needs it, behind the agreement of the ranks, by all of them together: allocating
symmetric memory is a collective. It lives as long as the group; a destroyed group whose name is used again gets a new
one. Calls of a rank run one after the other on its GPU, whatever their streams and threads (``runtime.call_order``).
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
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.distributed import group_timeout
from overlap_inductor.torch_compat.distributed import is_alive

log = logging.getLogger("overlap_inductor")

MOST_PREPARED = 64
"""Kernels that a site keeps ready."""
MOST_KNOWN = 2**14
"""Calls that a group remembers, of all its sites: a step of a large model has hundreds, with each token count anew.
(Half a KiB each.)"""


@dataclass(frozen=True)
class Launch:
    """Where a site's kernel runs: this rank of a group, its slot, the group's fault record and the site's number in it,
    the patience of waits in ns, and kernels that are ready to be launched there; whole calls, too (``runtime.replay``):
    those seen once, and whether they may be captured, and what launches those seen twice, each with the allocations
    that its copies read and write."""

    rank: int
    world_size: int
    slot: Slot
    faults: FaultRecord
    site: int
    patience_ns: int
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False)
    seen: dict[Any, tuple[tuple[int, ...], bool]] = field(default_factory=dict, compare=False)
    replays: dict[Any, tuple[tuple[int, ...], Callable[[], None]]] = field(default_factory=dict, compare=False)

    def remember(self, key: Any, kernel: Any) -> None:
        """Keep a kernel ready; all are made anew when sizes that change from call to call have made too many."""
        if len(self.prepared) >= MOST_PREPARED:
            self.prepared.clear()
        self.prepared[key] = kernel


_UNKNOWN: Any = object()
Known = TypeVar("Known")


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
    _launches: dict[tuple[str, str], Launch] = field(default_factory=dict)
    _known: dict[Hashable, Any] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    def known(self, call: Hashable, make: Callable[[], Known | None]) -> Known | None:
        """What ``make`` makes for a ``call``, which says all that it depends on: ``launch``, and what else its op has
        to know. Any thread may ask. ``make`` is asked once, and again when a plan has been prepared or too many calls
        are known. ``None`` where the call is served by no kernel. Raises what ``make`` raises."""
        found = self._known.get(call, _UNKNOWN)
        if found is _UNKNOWN:
            with self._lock:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                found = self._known[call] = make()
        return found  # type: ignore[no-any-return]

    def launch(self, site: str, nbytes: int, signals: int, protocol: str = CREDITS) -> Launch | None:
        """Where a call of ``site`` that needs so much runs; ``None`` where there was no room for it.

        Raises:
            OverlapError: the site has not been prepared for.
        """
        request = Request(site, nbytes, signals, protocol)
        key = (request.site, request.protocol)
        if not self.arena.holds(request) and (site in self.without_room or self.arena.knows(*key)):
            # No room was found for the site, or what was planned for is less than this call's size.
            return None
        slot, made = self.arena.slot(*key), self._launches.get(key)
        if made is None or made.slot is not slot:
            made = Launch(
                self.group.rank(), self.group.size(), slot, self.faults, self.faults.number(site), self.patience_ns
            )
            self._launches[key] = made
        return made

    def prepare(self, requests: Sequence[Request], limit: int) -> None:
        """Give every site of a plan its slot, or none of them (``without_room``, on all ranks alike) where they do not
        fit under some rank's ``limit`` bytes, beside what graphs before hold.

        Raises:
            OverlapError: memory would have to be allocated while a CUDA graph is captured.
            NotOnAllRanks: a rank has no memory left; on all ranks alike, and their slots are as before.
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
                "overlap_inductor: %d sites of group %r run as they stood: %s",
                len(requests), self.group.group_name, full,
            )  # fmt: skip
        # (A site's slot may be another one now.)
        self._known.clear()

    def _why_no_room(self, missing: int, limit: int) -> NotOnAllRanks | None:
        """Why the group has no room for ``missing`` bytes more, or ``None``. All ranks decide together, since limits
        may differ: a kernel of one rank would wait in vain for peers that run the collective."""
        if not missing:
            return None

        def fits() -> None:
            if self.arena.nbytes + missing > limit:
                raise OverlapError(
                    f"other graphs hold {self.arena.nbytes}, and OVERLAP_INDUCTOR_WORKSPACE_LIMIT is {limit >> 20} MiB"
                )

        try:
            all_or_none(self.group, f"hold {missing} more bytes of workspace", fits)
        except NotOnAllRanks as error:
            return error
        return None


_WORKSPACES: dict[tuple[dist.ProcessGroup, torch.device], GroupWorkspace] = {}
_MAKING: dict[tuple[str, torch.device], Any] = {}
"""A lock for each group's name and device: ranks may make two groups' workspaces in two threads, in another order here
than there."""


def workspace_of(group: dist.ProcessGroup, device: torch.device) -> GroupWorkspace:
    """The group's workspace on ``device``, made on first use by all ranks of the group together. Those of groups that
    are no more are dropped then.

    Raises:
        NotOnAllRanks: a rank has no memory left; on all ranks alike.
    """
    key = (group, device)
    known = _WORKSPACES.get(key)
    if known is not None:
        return known
    with _MAKING.setdefault((group.group_name, device), threading.Lock()):
        return _WORKSPACES.get(key) or _made(group, device)


def _made(group: dist.ProcessGroup, device: torch.device) -> GroupWorkspace:
    if not symmetric.capturing():
        _drop_destroyed()
    order = call_order(device)

    def together(what: str, attempt: Callable[[], Any]) -> Any:
        return all_or_none(group, what, attempt)

    def allocate(elements: int, dtype: torch.dtype) -> Any:
        return symmetric.allocate(elements, dtype, device, group, together)

    faults = _fault_record(group, device, together)
    arena = WorkspaceArena(group.size(), device, allocate, lambda: symmetric.capturing(), 2**62)
    patience = int(group_timeout(group).total_seconds() * 1e9)
    made = GroupWorkspace(group, arena, faults, patience, symmetric.multiprocessors(device))
    _WORKSPACES[group, device] = made
    if isinstance(order, CallOrder):
        watchdog.watch(faults, lambda: is_alive(group), order.in_flight)
    return made


def _drop_destroyed() -> None:
    """What a destroyed group had started may go on; its memory is not given back under it."""
    for key in [k for k, w in tuple(_WORKSPACES.items()) if not is_alive(w.group)]:
        order = call_order(key[1])
        if isinstance(order, CallOrder):
            order.finish()
        _WORKSPACES.pop(key, None)


def _fault_record(group: dist.ProcessGroup, device: torch.device, together: symmetric.Together) -> FaultRecord:
    """One that all ranks share where their GPUs reach each other."""
    ranks = dist.get_process_group_ranks(group)
    if group.size() == 1 or symmetric.why_no_symmetric_memory(tuple(ranks), device) is not None:
        found: FaultRecord = together(
            "make its fault record", lambda: FaultRecord.of(group.group_name, ranks, device, group.rank())
        )
        return found
    if symmetric.capturing():
        raise OverlapError(
            f"group {group.group_name!r} needs memory to tell its ranks of faults while a CUDA graph is being "
            "captured, where none can be allocated. Run the compiled function once before capturing it."
        )
    return FaultRecord.shared(group, ranks, device, together)


def prepare(group: dist.ProcessGroup, device: torch.device, requests: str, limit: int) -> str | None:
    """Give every site of a plan its slot, once. ``requests``: JSON text, ``[[site, bytes, signals]]`` in the plan's
    order, equal on all ranks; a protocol stands behind them where it is not credits. All ranks of the group together.

    Where they do not fit under ``limit`` bytes all sites of the plan run as they stood (on all ranks alike), and the
    log says so.

    Returns:
        ``None``; or why no site of the plan has a slot, because a rank of the group has no memory left: the same text
        on every rank, which names the rank and the bytes. All ranks must then run without overlap, or none; they may
        ask again.

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
