# SPDX-License-Identifier: Apache-2.0
"""The registry of the objects that belong to a process group, here called *things*. Of each *kind* of thing, a group
has one, or one for each device::

    STATES = Kind("record of calls", lambda owner: GroupState(owner.group, owner.incarnation))
    STATES.of(group)            # made at first use, then the same one while the group lives

A thing belongs to a group object, not to the group's name. When a group is destroyed, torch calls no hook. So the
group's things are dropped when the next thing of any kind is made::

    group "tp" made             STATES.of(tp): a new thing, incarnation 0
    group "tp" destroyed        its things are held, because its calls may still run on the GPU
    another group "tp" made     STATES.of(tp): closes all things of the first "tp", then drops all of them, then makes
                                a new thing, incarnation 1
    STATES.of(the first "tp")   OverlapError

Nothing is dropped while a CUDA graph is captured, because closing a thing may wait for its GPU. ``of`` does not check
whether the group of a held thing is alive. An op's look-up of its group does
(``torch_compat.distributed.resolve_group``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from typing import Generic
from typing import TypeVar

import torch
import torch.distributed as dist

from overlap_inductor.errors import OverlapError
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.distributed import is_alive

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Owner:
    """The group and device for which a thing is made.

    Attributes:
        device: the thing's device; ``None`` if a group has one thing of the kind for all devices.
        incarnation: number of earlier groups of this name for which this process made a thing of this kind (on this
            device). Keys in the group's store (``torch.distributed``) hold it, so that no group uses the keys of an
            earlier group.
    """

    group: dist.ProcessGroup
    device: torch.device | None
    incarnation: int


class Kind(Generic[Thing]):
    """One kind of thing that process groups have.

    Args:
        name: for errors, such as ``"workspace"``.
        make: makes the thing. It is called once for a group and device, and again if it raised. All ranks of the
            group may have to call it together.
        close: called before any thing of a destroyed group is dropped, for example to wait for the group's calls. If it
            raises, nothing is dropped, and it is called again when the next thing is made.
    """

    def __init__(self, name: str, make: Callable[[Owner], Thing], close: Callable[[Thing], None] | None = None) -> None:
        self.name, self._make, self._close = name, make, close
        self._things: dict[tuple[dist.ProcessGroup, torch.device | None], Thing] = {}
        self._incarnations: dict[tuple[str, torch.device | None], int] = {}
        # One lock for all groups could deadlock. Two ranks may make things of two groups in different orders. Each rank
        # would then hold the lock while it waits for the other rank to make the same thing.
        self._making: dict[tuple[str, torch.device | None], threading.Lock] = {}

    def of(self, group: dist.ProcessGroup, device: torch.device | None = None) -> Thing:
        """The thing of ``group`` on ``device``, made at first use. Any thread may ask.

        Raises:
            OverlapError: the group was destroyed, and nothing of this kind is left of it.
            Exception: what ``make`` raises, and what the ``close`` of a destroyed group's thing raises.
        """
        found = self._things.get((group, device))
        return self._made(group, device) if found is None else found

    def known(self, group: dist.ProcessGroup, device: torch.device | None = None) -> Thing | None:
        """The thing of ``group`` on ``device`` if it was made and is still held, else ``None``."""
        return self._things.get((group, device))

    def close(self, owner: Owner) -> None:
        """Make the thing of ``owner`` ready to be dropped. Raises what the kind's ``close`` raises."""
        thing = self.known(owner.group, owner.device)
        if self._close is not None and thing is not None:
            self._close(thing)

    def drop(self, owner: Owner) -> None:
        self._things.pop((owner.group, owner.device), None)

    def _made(self, group: dist.ProcessGroup, device: torch.device | None) -> Thing:
        name = group.group_name
        with self._making.setdefault((name, device), threading.Lock()):
            found = self._things.get((group, device))
            if found is not None:
                return found  # another thread has made it
            if not is_alive(group):
                raise OverlapError(
                    f"process group {name!r} was destroyed, and its {self.name} with it. Use the group that took its"
                    " place, or create it again."
                )
            drop_destroyed()
            owner = Owner(group, device, self._incarnations.get((name, device), 0))
            made = self._make(owner)
            self._incarnations[name, device] = owner.incarnation + 1
            self._things[group, device] = made
            _HELD[self, group, device] = owner
            return made


_HELD: dict[tuple[Kind[Any], dist.ProcessGroup, torch.device | None], Owner] = {}
"""All things of all kinds, in the order in which they were made. A thing may depend on earlier things."""


def drop_destroyed() -> None:
    """Close the things of all destroyed groups, the last made first, then drop all of them. Does nothing while a CUDA
    graph is captured on the current stream. If a ``close`` raises, nothing is dropped."""
    if symmetric.capturing():
        return
    left = [(key, owner) for key, owner in reversed(tuple(_HELD.items())) if not is_alive(owner.group)]
    for key, owner in left:
        key[0].close(owner)
    # All are closed first: the ``close`` of one kind may wait for a call that uses the memory of another kind.
    for key, owner in left:
        key[0].drop(owner)
        _HELD.pop(key, None)


def held_by(group: dist.ProcessGroup) -> dict[tuple[str, torch.device | None], Any]:
    """The things that are held for ``group``, by the kind's name and the device, in the order in which they were
    made."""
    return {(kind.name, device): kind.known(group, device) for kind, owner, device in tuple(_HELD) if owner is group}
