# SPDX-License-Identifier: Apache-2.0
"""Makes commands ``python`` and ``overlap-inductor`` for shell scripts. The commands run in forks of a ``ForkBase``.

Each command is a small script that imports only the standard library. It sends its arguments, environment and folder
over a socket to the process that holds the ``ForkCommands``. This process answers with the output and the exit status.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path
from types import TracebackType

from tests.support.fork_base import ForkBase

_CLIENT = """#!{python} -S
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    call = {{"arguments": {first!r} + sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}
    server.sendall(json.dumps(call).encode())
    server.shutdown(socket.SHUT_WR)
    with server.makefile() as answer:
        status, out, err = json.load(answer)
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(status)
"""
COMMANDS: dict[str, list[str]] = {"python": [], "overlap-inductor": ["-m", "overlap_inductor"]}
"""The arguments that each command passes to Python before its own arguments."""


class ForkCommands:
    """Makes the commands in ``folder``, whose path must be short enough for a socket's address. The commands work until
    the end of the ``with`` block, one at a time, without standard input."""

    def __init__(self, base: ForkBase, folder: Path) -> None:
        self.base = base
        self.server = socket.socket(socket.AF_UNIX)
        address = folder / "socket"
        self.server.bind(str(address))
        self.server.listen()
        for name, first in COMMANDS.items():
            command = folder / name
            command.write_text(_CLIENT.format(python=sys.executable, address=str(address), first=first))
            command.chmod(0o755)
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.server.accept()
            except OSError:
                return
            with client, client.makefile("rw") as file:
                call = json.load(file)
                done = self.base.run(*call["arguments"], env=call["env"], cwd=Path(call["cwd"]))
                json.dump((done.returncode, done.stdout, done.stderr), file)

    def __enter__(self) -> ForkCommands:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.thread.join(10)
