# SPDX-License-Identifier: Apache-2.0
"""Write a file as a whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and move it there: several processes may write the same file at once, and a reader
    never meets half of one. Raises ``OSError`` if it cannot be written; the old file is then as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
