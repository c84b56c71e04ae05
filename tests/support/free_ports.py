# SPDX-License-Identifier: Apache-2.0
"""Ports for the stores of ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

_PORTS = itertools.count(os.getpid() * 7)


def free_port() -> int:
    """A port for the ranks' store, below the range from which the system takes ports for connections. Each of up
    to ten pytest workers has its own ports. Otherwise a rank could talk to another test's store."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw9").removeprefix("gw")) % 10
    for number in itertools.islice(_PORTS, 2000):
        port = 12_000 + 2_000 * worker + number % 2_000
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port of this worker is free; other ranks may still run")
