# SPDX-License-Identifier: Apache-2.0
"""Hosts joined by a slow link, on one machine: a network namespace a rank, a bridge, and a rate limit each way.

Needs root and Debian's iproute2. Everything is removed again, also after an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "ovl"


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, stdout=subprocess.DEVNULL, stderr=None if check else subprocess.DEVNULL)


def require_tools() -> None:
    """Raises ``SystemExit`` saying what is missing."""
    if os.geteuid() != 0:
        raise SystemExit("the slow-link benchmark makes network namespaces and needs root; run it as root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"the slow-link benchmark needs {' and '.join(missing)}; install the package iproute2")


@contextmanager
def slow_hosts(count: int, megabits: int) -> Iterator[list[str]]:
    """``count`` namespaces on one bridge, each limited to ``megabits`` Mbit/s each way; yields their names. Host i is
    10.77.0.(i+1)."""
    names = [f"{PREFIX}{i}" for i in range(count)]
    bridge = f"{PREFIX}br"
    # A burst of two full segments and a queue of 20 ms: long queues delay the acknowledgements of the other direction.
    limit = ["rate", f"{megabits}mbit", "burst", "128kb", "latency", "20ms"]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for index, name in enumerate(names):
            inside, outside = f"{PREFIX}i{index}", f"{PREFIX}o{index}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            _run("ip", "link", "set", outside, "master", bridge, "up")
            _run("ip", "netns", "exec", name, "ip", "addr", "add", f"10.77.0.{index + 1}/24", "dev", inside)
            _run("ip", "netns", "exec", name, "ip", "link", "set", inside, "up")
            _run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
            _run("tc", "qdisc", "add", "dev", outside, "root", "tbf", *limit)
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", inside, "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            _run("ip", "netns", "del", name, check=False)
        for index in range(count):
            _run("ip", "link", "del", f"{PREFIX}o{index}", check=False)
        _run("ip", "link", "del", bridge, check=False)
