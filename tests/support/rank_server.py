# SPDX-License-Identifier: Apache-2.0
"""Forks the process of the tests, once, into the process from which warm ranks are forked.

``multiprocessing`` would start a new interpreter, which takes six seconds and more for imports. The fork has imported
torch, the models' libraries and the tests already.
"""

from __future__ import annotations

import importlib
import os
import selectors
import socket
import sys
import tempfile
from multiprocessing import forkserver
from multiprocessing import util
from typing import Any

from tests.support import gloo_ranks


def fork_server() -> None:
    """Fork the server, and tell ``multiprocessing`` its address. Call this after all tests are collected and before the
    first test runs: a test may start threads, which a fork does not have. The server ends when this process ends.

    The server imports modules when a first rank is started. If a server is running, nothing is done.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        return
    address = os.path.join(tempfile.mkdtemp(prefix="ranks-"), "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive, ours = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        try:
            os.close(ours)
            _serve(listener, alive)
        finally:
            os._exit(1)
    listener.close()
    os.close(alive)
    util.Finalize(None, _remove, (address,), exitpriority=0)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, ours, pid


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


def _remove(address: str) -> None:
    os.unlink(address)
    os.rmdir(os.path.dirname(address))
