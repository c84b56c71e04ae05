# SPDX-License-Identifier: Apache-2.0
"""Forks the process of the tests once. From this fork, the *server*, all warm ranks are forked. A rank is warm if
it starts with the server's imports (argument ``warm`` of ``gloo_ranks.run_ranks``).

Without this module, ``multiprocessing`` would start the server as a new interpreter, whose imports take six seconds or
more. The fork has imported torch, the models' libraries and the tests already. All workers of one run of pytest have
collected the same tests, so they share one such process.
"""

from __future__ import annotations

import importlib
import os
import selectors
import shutil
import socket
import sys
import tempfile
import time
from multiprocessing import forkserver
from typing import Any

from tests.support import gloo_ranks

LATEST = 60
"""Seconds that a worker waits at most for the server, which another worker forks. Forking takes milliseconds."""


def fork_server() -> None:
    """Fork the server if no other worker of this run has done so, and tell ``multiprocessing`` its address. Call this
    after all tests are collected and before one runs: a test may start threads, which a fork does not have. The server
    ends when all workers have ended.

    When the first rank is started, the server imports those modules of ``gloo_ranks.preloaded`` that are still missing.
    If this process already has a server, this function does nothing."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        return
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = _fork(
            tempfile.mkdtemp(prefix="ranks-")
        )
        return
    folder = os.path.join(tempfile.gettempdir(), f"ranks-{run[:12]}")
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        # The server is no child of this process, so ``multiprocessing`` must not ask whether it still runs.
        server.ensure_running = lambda: None
        server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = *_join(folder), 0
    else:
        server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = _fork(folder)


def _paths(folder: str) -> tuple[str, str]:
    """The server's address, and a named pipe. The server ends when no other process holds the pipe open."""
    return os.path.join(folder, "socket"), os.path.join(folder, "alive")


def _fork(folder: str) -> tuple[str, int, int]:
    """Fork a server that uses ``folder``. Returns its address, the end of the pipe that this process holds, and the
    server's process ID."""
    address, pipe = _paths(folder)
    os.mkfifo(pipe)
    alive = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ours = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        try:
            os.close(ours)
            _serve(listener, alive)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
    listener.close()
    os.close(alive)
    return address, ours, pid


def _join(folder: str) -> tuple[str, int]:
    """Wait until another worker has forked the server. Returns the server's address, and the end of the pipe that this
    process holds.

    Raises:
        RuntimeError: there is no server after ``LATEST`` seconds.
    """
    address, pipe = _paths(folder)
    end = time.monotonic() + LATEST
    while not os.path.exists(address):
        if time.monotonic() > end:
            raise RuntimeError(f"no server of ranks listens at {address}")
        time.sleep(0.05)
    return address, os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)


def _serve(listener: socket.socket, alive: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(alive, selectors.EVENT_READ)
        if any(key.fd == alive for key, _ in selector.select()):
            return
    for name in gloo_ranks.preloaded():
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    try:
        forkserver.main(listener.detach(), alive, [])
    except SystemExit:
        return
