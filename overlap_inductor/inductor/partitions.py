"""Inductor's partitions of a graph (``torch._inductor.config.graph_partition``): what lies between two nodes that no
CUDA graph can hold is captured by itself.

A transfer of the ring that is in flight from one partition to the next would be captured in halves: a capture cannot
end with work of another stream that nobody waits for, and the host's state of a transfer is made while it is captured,
not when it is replayed. A graph that would be cut so is therefore not captured at all, as Inductor leaves out one with
inputs that it mutates, and its report says so.
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
    "Inductor cuts this graph into parts that CUDA graphs can hold, and a ring's transfer would be in flight from one"
    " part to the next: the graph runs without CUDA graphs. Choose another schedule, or keep what no CUDA graph can"
    " hold (an .item(), an op on the CPU) away from the site."
)
_WHOLE = "_overlap_inductor_whole"


def graph_partition(original: Callable[..., Any], scheduler: Any) -> Any:
    """Around ``Scheduler.graph_partition``: once more, with nothing to be captured, where a transfer would be cut."""
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
    """Around ``Scheduler.should_partition``: the reason to leave ``node`` out of CUDA graphs, or ``None``."""
    return NOTICE if getattr(scheduler, _WHOLE, False) else original(scheduler, node)


def cut(partitions: Sequence[Iterable[Any]], uncaptured: Sequence[bool]) -> bool:
    """Whether a transfer begins in one partition and goes on in another, one of which is captured."""
    places: dict[str, set[int]] = {}
    for index, partition in enumerate(partitions):
        for scheduled in partition:
            for node in scheduled.get_nodes():
                name = _transfer(node.node)
                if name is not None:
                    places.setdefault(name, set()).add(index)
    return any(len(found) > 1 and not all(uncaptured[i] for i in found) for found in places.values())


def _transfer(kernel: Any) -> str | None:
    """The name of the op that started the transfer in which ``kernel`` takes part."""
    from torch._inductor import ir

    op = getattr(kernel, "op_overload", None)
    if not isinstance(kernel, ir.FallbackKernel) or op is None or op.namespace != "overlap_inductor":
        return None
    name = op._schema.name.split("::")[1]
    if name in STARTS:
        return kernel.get_name()
    # (Of all of them the buffer is the second argument.)
    return _maker(kernel.inputs[1]) if name in MEMBERS else None


def _maker(buffer: Any) -> str:
    """The op whose result ``buffer`` is, through views of it and Inductor's node for one of an op's results."""
    from torch._inductor import ir

    while not isinstance(buffer, ir.FallbackKernel):
        if isinstance(buffer, ir.MultiOutput):
            buffer = buffer.inputs[0]
        elif isinstance(buffer, ir.BaseView | ir.MutableBox):
            buffer = buffer.data
        else:
            break
    return buffer.get_name()
