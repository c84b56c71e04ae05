# SPDX-License-Identifier: Apache-2.0
"""Whether a thread is inside a collective."""

from __future__ import annotations

import gc
import itertools
import operator
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from typing import TypeVar

from torch._ops import OpOverload
from torch._ops import OpOverloadPacket
from torch.distributed import distributed_c10d

_FRAMES = 4
"""Number of innermost frames to look at. A call of an op adds at most this many frames to the stack."""
_CALLS = {OpOverload.__call__.__code__, OpOverloadPacket.__call__.__code__}
_NOT_OF_ALL_RANKS = {"monitored_barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv"}
T = TypeVar("T")


def in_collective(thread: int) -> bool:
    """Whether the thread ``thread`` (``threading.get_ident``) is inside a collective: an op of a ``c10d`` namespace, or
    a function of ``distributed_c10d``. Functions that send or receive, and ``monitored_barrier``, are no collectives
    here. In gloo, their sends and receives are part of the count of collectives (``distributed.counter``), and their
    number may differ between ranks."""
    frame = _without_collection(sys._current_frames).get(thread)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        # Only the locals of an op's call are read. Up to Python 3.12, reading a frame's locals keeps them alive until
        # the frame returns. Other frames may hold a tensor that their function deletes to free memory.
        if frame.f_code in _CALLS:
            op = _without_collection(partial(getattr, frame, "f_locals"))["self"]
            op = op._overloadpacket if isinstance(op, OpOverload) else op
            return op._qualified_op_name.split("::")[0].lstrip("_").startswith("c10d")
        if frame.f_code.co_filename == distributed_c10d.__file__:
            return frame.f_code.co_name not in _NOT_OF_ALL_RANKS
        frame = _without_collection(partial(getattr, frame, "f_back"))
    return False


def _without_collection(call: Callable[[], T]) -> T:
    """The result of ``call``, a C function that reads another thread's frame and makes Python objects.

    In Python 3.11, a new object may start a garbage collection inside ``call``. The collection may run Python code, for
    example ``__del__``, and let the other thread go on. That thread's frame may then return, and other data may
    overwrite it while ``call`` still reads it. So there must be no collection. From Python 3.12 on, a collection waits
    until ``call`` has returned. Up to Python 3.10, frames are objects that outlive their return.
    """
    if sys.version_info[:2] != (3, 11):
        return call()
    # ``map`` makes all calls in C, so no other thread runs in between. It cannot see that collections are off, nor
    # switch them off and find them on again.
    steps = {True: iter((gc.disable, call, gc.enable)), False: iter((call,))}
    chosen = itertools.chain.from_iterable(map(steps.__getitem__, map(operator.call, (gc.isenabled,))))
    results: list[Any] = []
    try:
        results.extend(map(operator.call, chosen))
    except BaseException:
        if results:
            gc.enable()
        raise
    # ``pop``, because ``sys._current_frames`` returns this function's own frame, too. If a local variable of this frame
    # held the result, there would be a cycle. Until the next collection, it would keep all threads' locals alive.
    return results.pop(len(results) // 2)
