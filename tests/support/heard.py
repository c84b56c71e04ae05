# SPDX-License-Identifier: Apache-2.0
"""Collects the package's warnings on one rank."""

from __future__ import annotations

import logging


class Heard(logging.Handler):
    """Stores the messages of the package's warnings in ``texts``. A rank also warns if it waits long for
    another rank. These messages depend on the load of the machine and are left out."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("overlap_inductor").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if " waits for rank " not in text:
            self.texts.append(text)
