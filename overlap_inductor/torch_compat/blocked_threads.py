# SPDX-License-Identifier: Apache-2.0
"""Whether a thread is inside a collective."""

from __future__ import annotations

import sys

from torch._ops import OpOverload
from torch._ops import OpOverloadPacket
from torch.distributed import distributed_c10d

_FRAMES = 4
"""Number of innermost frames to look at. A call of an op adds at most this many frames to the stack."""
_CALLS = {OpOverload.__call__.__code__, OpOverloadPacket.__call__.__code__}
_NOT_OF_ALL_RANKS = {"monitored_barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv"}


def in_collective(thread: int) -> bool:
    """Whether the thread ``thread`` (``threading.get_ident``) is inside a collective: an op of a ``c10d`` namespace, or
    a function of ``distributed_c10d``. Functions that send or receive, and ``monitored_barrier``, are no collectives
    here. In gloo, their sends and receives are part of the count of collectives (``distributed.counter``), and their
    number may differ between ranks."""
    frame = sys._current_frames().get(thread)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        # Only the locals of an op's call are read. Up to Python 3.12, reading a frame's locals keeps them alive until
        # the frame returns. Other frames may hold a tensor that their function deletes to free memory.
        if frame.f_code in _CALLS:
            op = frame.f_locals["self"]
            op = op._overloadpacket if isinstance(op, OpOverload) else op
            return op._qualified_op_name.split("::")[0].lstrip("_").startswith("c10d")
        if frame.f_code.co_filename == distributed_c10d.__file__:
            return frame.f_code.co_name not in _NOT_OF_ALL_RANKS
        frame = frame.f_back
    return False
