# SPDX-License-Identifier: Apache-2.0
"""Compare, between the ranks of a group, the inputs of a graph that the sequence-parallel rewrite assumes to be equal.

A graph cannot show that such an input, for example a norm's weight, is the same on all ranks. So each rank hashes these
inputs:

- *Parameters and buffers*: their digests are part of the plan that ranks compare before they run the graph
  (``ExchangePlan.inputs``). A digest is taken once, when the process first sees the memory, and not again after
  training steps.
- *Arguments* of a call: ``difference`` compares them in the call in which the ranks agree upon a plan. Arguments whose
  digests differ may be equal up to rounding (``sketches``). Each rank then computes its rows from its own copy.

If a graph has several groups, ``difference`` also compares its parameters, once for each set of parameters
(``were_compared``). The plan of a graph is compared in all its groups. It cannot hold these digests, because a
parameter may rightly differ between the ranks of one of the groups.

An example of ``difference`` on three ranks. The verdict is the text that ``difference`` returns on all three::

    rank 0                    rank 1                          rank 2
    writes digests, sketches  reads them; all equal its own   reads them; "primals_7" differs from its own
    verdict: "rank 2 cannot ..."   -> all ranks run the plain program

Reading the inputs waits for the device. Later calls with the same parameters hash nothing.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import threading
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.errors import OverlapError
from overlap_inductor.runtime import sketches
from overlap_inductor.runtime.all_or_none import SECONDS
from overlap_inductor.runtime.all_or_none import NotOnAllRanks
from overlap_inductor.runtime.all_or_none import all_or_none
from overlap_inductor.runtime.group_state import Kind
from overlap_inductor.runtime.group_state import Owner
from overlap_inductor.torch_compat.distributed import group_store
from overlap_inductor.torch_compat.storages import ByStorage


class InputsDiffer(OverlapError):
    """An input does not have the values that it has on the group's first rank."""


def _keys(owner: Owner) -> Iterator[str]:
    return (f"overlap_inductor/same_inputs/{owner.incarnation}/{number}" for number in itertools.count(1))


_KEYS = Kind("count of compared inputs", _keys)
_LOCK = threading.Lock()


def difference(group: dist.ProcessGroup, inputs: Mapping[str, torch.Tensor], exact: Collection[str] = ()) -> str:
    """A text that says which of ``inputs`` differ between the ranks of ``group``, or why a rank could not compare
    them. ``""`` if all inputs are equal, apart from rounding. The text is equal on all ranks that get the
    verdict (``all_or_none``). All ranks of the group call this together, with inputs of the same names.

    Args:
        exact: names of the inputs that must be equal bit for bit. The others may differ by rounding.
    """
    if dist.get_backend(group) == "fake":
        return ""
    keys = _KEYS.of(group)
    with _LOCK:
        key = next(keys)
    store = group_store(group)
    mine = {name: (digest(t), None if name in exact else sketches.sketch(t)) for name, t in inputs.items()}
    if group.rank() == 0:
        store.set(key, json.dumps(mine))

    def compare() -> None:
        store.wait([key], datetime.timedelta(seconds=SECONDS))
        first = json.loads(store.get(key))
        differing = sorted(
            name
            for name, (found, sketched) in mine.items()
            if found != first[name][0] and not sketches.differ_by_rounding(sketched, first[name][1], inputs[name].dtype)
        )
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise InputsDiffer(f"its values of {', '.join(differing[:3])}{more} are not those of the first rank")

    try:
        all_or_none(group, "run a graph that was rewritten to divide tokens among the ranks", compare)
    except NotOnAllRanks as error:
        return str(error)
    return ""


_LASTING: ByStorage[dict[tuple[Any, ...], str]] = ByStorage()
_COMPARED: ByStorage[set[str]] = ByStorage()
"""The names of the groups in which ``difference`` has compared a set of parameters."""


def were_compared(group_name: str, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether ``note_compared`` was called with these parameters and this group."""
    return group_name in (_COMPARED.get(parameters) or ())


def note_compared(group_name: str, parameters: Sequence[torch.Tensor]) -> None:
    """Note that the ranks of the group have compared these parameters, and found them equal."""
    with _LOCK:
        names = _COMPARED.get(parameters)
        if names is None:
            _COMPARED.put(parameters, names := set())
        names.add(group_name)


def lasting_digest(tensor: torch.Tensor) -> str:
    """The ``digest`` of a parameter or buffer at the time when this process first asked for the digest."""
    with _LOCK:
        digests = _LASTING.get([tensor])
        if digests is None:
            _LASTING.put([tensor], digests := {})
        layout = tensor.dtype, tuple(tensor.shape), tensor.stride()
        if layout not in digests:
            digests[layout] = digest(tensor)
        return digests[layout]


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's shape, dtype and bytes, as 16 hex digits."""
    # ``numpy()`` fixes the size of a storage, but FSDP2 resizes the storages of its parameters. So hash a copy.
    flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
    if flat.numel():
        found.update(flat.view(torch.uint8).numpy())
    return found.hexdigest()
