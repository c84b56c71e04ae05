# SPDX-License-Identifier: Apache-2.0
"""Shows a log line even to users who did not configure logging.

A line never goes both to log handlers and to this module's own output on standard error.

A user's configuration takes precedence:

- If the logger ``overlap_inductor`` has a level (by ``logging`` or ``TORCH_LOGS``), the level shows or hides the line.
- If the user gave handlers to this logger or to a logger above it, the line goes to them. This module then writes
  nothing to standard error.
"""

from __future__ import annotations

import logging
import sys

from overlap_inductor.torch_compat import telemetry

log = logging.getLogger("overlap_inductor")


def show(text: str) -> None:
    """Log ``text`` at level INFO. If the logger has no handler, write ``text`` to standard error. If INFO
    is off only because a logger above has a higher level, PyTorch's own handler does not count as a handler.

    The line is hidden if the logger is disabled, if the logger's own level is above INFO, or if ``logging.disable``
    switched INFO off. A handler's own level or filter may hide the line, too.
    """
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info("%s", text)
        return
    refused = log.disabled or log.manager.disable >= logging.INFO or log.level > logging.INFO
    if refused:
        return
    record = log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None)
    if telemetry.has_handlers_of_others(log):
        log.handle(record)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    handler.handle(record)
