# SPDX-License-Identifier: Apache-2.0
"""Shows a log line, once, to users who did not configure logging.

A user's configuration takes precedence:

- If the logger ``overlap_inductor`` has a level (by ``logging`` or ``TORCH_LOGS``), the level shows or hides the line.
- If it has handlers, the line goes to them and not to standard error.
"""

from __future__ import annotations

import logging
import sys

from overlap_inductor.torch_compat import telemetry

log = logging.getLogger("overlap_inductor")


def show(text: str) -> None:
    """Log ``text`` at level INFO. If no handler would show it, write it to standard error. It is hidden only if the
    user disabled this level."""
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
