# SPDX-License-Identifier: Apache-2.0
"""Files in a machine's memory (``/dev/shm``), through which processes of the machine share pages.

One process makes a file under a random name and tells the name to the others, which map it. Then the file is removed
from the folder. Its memory stays as long as a process maps it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

SHARED_FOLDER = Path("/dev/shm")
"""A folder of a file system in memory. (Pages of files on a disk cannot be given to a GPU.)"""


def new_number() -> int:
    """A random number of 62 bits that names a file."""
    return secrets.randbits(62)


def path_of(number: int) -> Path:
    """The path of the file with this ``new_number``."""
    return SHARED_FOLDER / f"overlap_inductor_{number:016x}"


def make_file(path: Path, nbytes: int) -> None:
    """Make a file of ``nbytes`` zeros and allocate its memory at once. If the memory were allocated at the first write,
    a full folder would end the writing process with SIGBUS.

    Raises:
        OSError: the file exists, or the folder has no room for it.
    """
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
