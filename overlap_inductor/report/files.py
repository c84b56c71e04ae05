# SPDX-License-Identifier: Apache-2.0
"""Write a file as a whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Replace the file at ``path`` by ``text``, in UTF-8.

    A temporary file in the same folder is renamed to ``path``. So several processes may write the file at once, and a
    reader never sees an incomplete file.

    Raises:
        OSError: the file could not be written. The old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
