# SPDX-License-Identifier: Apache-2.0
"""Forks the workers of pytest-xdist from one process that has imported torch and Inductor.

xdist would start each worker as a new interpreter, and each worker would import torch, Dynamo and Inductor for itself.
These imports take five seconds of processor time. Here xdist's process starts a *base*, which does these imports once.
For each worker, xdist starts a small script that sends its standard streams to the base. The base forks itself, and the
fork takes these streams and runs what xdist sends. The script ends when the fork ends.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from tests.support.fork_base import end_process

ROOT = Path(__file__).parents[2]
IMPORTED = ("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor")
_SCRIPT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as base:
    base.connect(sys.argv[1])
    socket.send_fds(base, [b"a worker"], [0, 1, 2])
    base.recv(1)
"""


class WorkerBase:
    """The base. ``python``: the command that takes the place of ``python`` for a worker."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="workers-")
        address, script = os.path.join(self.folder.name, "socket"), Path(self.folder.name, "worker.py")
        script.write_text(_SCRIPT)
        self.python = shlex.join([sys.executable, "-S", "-E", str(script), address])
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), os.getcwd()],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
            )

    def end(self) -> None:
        self.process.communicate()
        self.folder.cleanup()


def _serve(listener: socket.socket) -> None:
    """Fork this process for each connection. In the fork, this function returns after it has taken over the standard
    streams that came with the connection. In the base, it does not return: it ends the base when xdist's process closes
    the base's standard input."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while all(key.fileobj is listener for key, _ in selector.select()):
            connection, _ = listener.accept()
            _, streams, _, _ = socket.recv_fds(connection, 16, 3)
            if not os.fork():
                break
            for stream in streams:
                os.close(stream)
            # Only the fork keeps its connection open.
            connection.close()
        else:
            end_process(None)
    listener.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    connection.detach()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)


if __name__ == "__main__":
    own = socket.socket(fileno=int(sys.argv[1]))
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    try:
        _serve(own)
    except KeyboardInterrupt:
        # An interrupt of pytest reaches this process, too. It then ends without a traceback.
        sys.exit(130)
    os.chdir(sys.argv[2])
    # xdist starts its own workers with ``python -c``, which sets ``sys.argv`` to this.
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(eval(sys.stdin.readline()), main.__dict__)
    end_process(None)
