# SPDX-License-Identifier: Apache-2.0
"""Lists calls of ``torch.distributed`` that broke the graph, for the notices of a report. No graph holds such a call,
so no pass can find the call.

Dynamo appends every break to a list. The first graph that is compiled after a break reports the break, once.
"""

from __future__ import annotations

import re
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
import torch.distributed as dist

_TOLD = "_overlap_inductor_told"


def new_notices() -> list[str]:
    """A sentence for each call of ``torch.distributed`` that has broken a graph and was not reported yet."""
    from torch._dynamo.utils import graph_break_reasons

    found = []
    reasons = list(graph_break_reasons)
    for i, reason in enumerate(reasons):
        if not hasattr(reason, _TOLD):
            setattr(reason, _TOLD, True)
            # A break inside a function also breaks the graph of the function's caller. The list has the break a second
            # time when Dynamo has compiled the function by itself.
            known = any(_ends_with(before, reason) for before in reasons[:i])
            found += [_sentence(reason)] if not known and _users_line(reason) is not None and _calls(reason) else []
    return found


def _ends_with(reason: Any, other: Any) -> bool:
    mine, theirs = ([(f.filename, f.lineno) for f in r.user_stack] for r in (reason, other))
    return mine[-len(theirs) :] == theirs


def _calls(reason: Any) -> str | None:
    """The name of the called function of ``torch.distributed``, or ``None`` for any other break."""
    inside = next((f.name for f in reason.user_stack if _is_distributed(f) and hasattr(dist, f.name)), None)
    named = re.search(r"<function (\w+) at |torch\.distributed\.(\w+)", reason.reason)
    name = inside or (named and (named[1] or named[2]))
    return name if name and hasattr(dist, name) else None


def _sentence(reason: Any) -> str:
    line = _users_line(reason)
    assert line is not None
    how = "(async_op=True)" if reason.reason.startswith("async_op=True") else ""
    why = reason.reason.splitlines()[0]
    return (
        f"torch.distributed.{_calls(reason)}{how} breaks the graph at {line.filename}:{line.lineno} in"
        f" {line.name}{': ' + line.line if line.line else ''}. Dynamo does not trace this call ({why}), so the call is"
        " in no report. Only a call that Dynamo traces can be overlapped."
    )


def _users_line(reason: Any) -> FrameSummary | None:
    """The innermost frame outside torch, or ``None`` if there is none. If a function of torch breaks the graph, Dynamo
    compiles this function by itself. The list then has the break a second time, without the user's frames. For this
    second entry, the result is ``None``."""
    return next(
        (
            f
            for f in reversed(reason.user_stack)
            if not _is_torch(f) and Path(f.filename).name != "typing_extensions.py"
        ),
        None,
    )


def _is_torch(frame: FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(Path(torch.__file__).parent)


def _is_distributed(frame: FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(Path(dist.__file__).parent)
