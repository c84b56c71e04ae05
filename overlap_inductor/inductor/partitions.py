# SPDX-License-Identifier: Apache-2.0
"""Keeps Inductor from capturing only a part of a ring's transfer in a CUDA graph.

Inductor may cut a graph into partitions, and capture those that a CUDA graph can hold (``config.graph_partition``)::

    | gather_start  mm |  .item()  | gather_step  mm |        two captures, the transfer begins in one and ends in the
                                                              other
    ->  one uncaptured graph, and a notice in its report or in the log

A transfer cannot be in two captures, or only partly in one:

- A capture cannot end before its stream has waited for the work of all other captured streams.
- The host's state of a transfer is created during the capture, but not during a replay. So after a replay of the
  transfer's start, the host has no state for steps that are not captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from overlap_inductor.inductor import compile_scope
from overlap_inductor.torch_compat.ordering import MEMBERS
from overlap_inductor.torch_compat.ordering import STARTS

log = logging.getLogger("overlap_inductor")

NOTICE = (
    "Inductor would run parts of this graph as CUDA graphs, and a ring's transfer would be in flight from one part"
    " to the next. So the graph runs without CUDA graphs. Choose another schedule, or keep what no CUDA graph can"
    " hold (an .item(), an op on the CPU) away from the site."
)
_WHOLE = "_overlap_inductor_whole"


def graph_partition(original: Callable[..., Any], scheduler: Any) -> Any:
    """Around ``Scheduler.graph_partition``: if a transfer would be cut, call ``original`` again with nothing captured.
    Then all partitions run without CUDA graphs."""
    found = original(scheduler)
    partitions, signatures = found
    scope = compile_scope.current()
    if scope is None or not cut(partitions, [bool(s.skip_cudagraph) for s in signatures]):
        return found
    setattr(scheduler, _WHOLE, True)
    if scope.reports:
        scope.reports[-1].notices.append(NOTICE)
    else:
        log.warning(NOTICE)
    return original(scheduler)


def should_partition(original: Callable[..., Any], scheduler: Any, node: Any) -> Any:
    """Around ``Scheduler.should_partition``: the reason why ``node`` cannot be in a CUDA graph, or ``None``."""
    return NOTICE if getattr(scheduler, _WHOLE, False) else original(scheduler, node)


def cut(partitions: Sequence[Iterable[Any]], uncaptured: Sequence[bool]) -> bool:
    """Whether a transfer has nodes in several partitions, at least one of them captured. ``uncaptured``: for each
    partition, whether no CUDA graph holds it."""
    places: dict[str, set[int]] = {}
    for index, partition in enumerate(partitions):
        for scheduled in partition:
            for node in scheduled.get_nodes():
                name = _transfer(node.node)
                if name is not None:
                    places.setdefault(name, set()).add(index)
    return any(len(found) > 1 and not all(uncaptured[i] for i in found) for found in places.values())


def _transfer(kernel: Any) -> str | None:
    """The name of the op that started the transfer to which op ``kernel`` belongs. ``None`` if ``kernel`` belongs to no
    transfer."""
    from torch._inductor import ir

    op = getattr(kernel, "op_overload", None)
    if not isinstance(kernel, ir.FallbackKernel) or op is None or op.namespace != "overlap_inductor":
        return None
    name = op._schema.name.split("::")[1]
    if name in STARTS:
        return kernel.get_name()
    if name not in MEMBERS:
        return None
    # ``MEMBERS[name]`` is the argument that takes the transfer's buffer. All arguments before it are tensors. So its
    # index among the arguments is also its index among the inputs.
    names = [argument.name for argument in op._schema.arguments]
    return _maker(kernel.inputs[names.index(MEMBERS[name])])


def _maker(buffer: Any) -> str:
    """The name of the op that computed ``buffer``, which may be a view or one of several results."""
    from torch._inductor import ir

    while not isinstance(buffer, ir.FallbackKernel):
        if isinstance(buffer, ir.MultiOutput):
            buffer = buffer.inputs[0]
        elif isinstance(buffer, ir.BaseView | ir.MutableBox):
            buffer = buffer.data
        else:
            break
    return buffer.get_name()
