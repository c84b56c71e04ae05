# SPDX-License-Identifier: Apache-2.0
"""Simulates hosts that a slow link joins, on one Linux machine: network namespaces on a bridge with rate limits.

This needs root, and the tools ``ip`` and ``tc`` of iproute2. The namespaces and the bridge are removed at the end, also
after an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        name: the name by which ``ip netns`` knows the namespace.
        address: its IPv4 address on the bridge.
        interface: name of its network interface, which is linked to the bridge.
    """

    name: str
    address: str
    interface: str

    @property
    def command(self) -> list[str]:
        """The words to put before a program's command to run it on this host."""
        return ["ip", "netns", "exec", self.name]


def why_not() -> str | None:
    """Why this process cannot make a slow link, or ``None``. To find out, this function makes one and removes it."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "making network namespaces needs root; run the command as root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"the slow link needs {' and '.join(missing)}; install the package iproute2"
    try:
        with slow_hosts(2, 1000):
            return None
    except OSError as error:
        return str(error)


@contextmanager
def slow_hosts(count: int, megabits: int) -> Iterator[list[Host]]:
    """Make ``count`` hosts on one bridge, and remove them at the end. Each host sends and receives at most ``megabits``
    Mbit/s. Host ``i`` has the address 10.77.0.(i+1).

    Raises:
        OSError: the system refuses a namespace, a link or a rate limit; the message holds the command and its answer.
    """
    # The last digits of the process id keep the names of two runs on one machine apart. An interface name has at most
    # 15 characters.
    prefix = f"ovl{os.getpid() % 100000}"
    hosts = [Host(f"{prefix}h{i}", f"10.77.0.{i + 1}", f"{prefix}i{i}") for i in range(count)]
    bridge = f"{prefix}br"
    # The burst holds two segments of 64 KB. Data wait in the queue for at most 20 ms. A host's acknowledgements wait
    # behind its data, so a longer queue would delay them.
    limit = ["rate", f"{megabits}mbit", "burst", "128kb", "latency", "20ms"]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for index, host in enumerate(hosts):
            outside = f"{prefix}o{index}"
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", host.interface, "netns", host.name)
            _run("ip", "link", "set", outside, "master", bridge, "up")
            _run(*host.command, "ip", "addr", "add", f"{host.address}/24", "dev", host.interface)
            _run(*host.command, "ip", "link", "set", host.interface, "up")
            _run(*host.command, "ip", "link", "set", "lo", "up")
            _run("tc", "qdisc", "add", "dev", outside, "root", "tbf", *limit)
            _run(*host.command, "tc", "qdisc", "add", "dev", host.interface, "root", "tbf", *limit)
        yield hosts
    finally:
        for index, host in enumerate(hosts):
            _remove("ip", "netns", "del", host.name)
            _remove("ip", "link", "del", f"{prefix}o{index}")
        _remove("ip", "link", "del", bridge)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"the slow link cannot be made: `{' '.join(command)}` answered: {done.stderr.strip()}")


def _remove(*command: str) -> None:
    """Run a command that removes something. It may fail, because after an error some things were not made."""
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
