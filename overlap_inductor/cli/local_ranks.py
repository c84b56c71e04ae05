# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a small job on this machine, watch them, and stop all of them at the end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from overlap_inductor.cli.slow_link import Host
from overlap_inductor.errors import OverlapError

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0
_TAIL_LINES = 40


class RankError(OverlapError):
    """A rank failed or hung; the message holds the end of that rank's own log."""


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[str]
    log: Path
    log_file: IO[str]


def free_port() -> int:
    """A TCP port of the loopback interface that was free at the time of this call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    command: Sequence[str],
    ranks: int,
    folder: Path,
    *,
    environment: Mapping[str, str],
    hosts: Sequence[Host] = (),
    timeout: float,
    on_line: Callable[[str], None],
    on_wait: Callable[[], None],
) -> None:
    """Run ``python *command`` as ``ranks`` processes with the ``env://`` variables of ``torch.distributed``, until all
    have ended.

    Args:
        folder: the folder of the logs. ``rank_<r>.log`` holds a rank's standard error and, except for rank 0, its
            standard output.
        environment: variables of the ranks, without those that this function sets.
        hosts: network namespaces to run in, one for each rank. If empty, the ranks run in this process's network.
        timeout: seconds after which all ranks are stopped.
        on_line: called, on another thread, with every line that rank 0 writes to its standard output.
        on_wait: called several times a second.

    Raises:
        RankError: a rank ended with an error, or the timeout expired. All ranks have been stopped by then.
    """
    first = hosts[0].address if hosts else "127.0.0.1"
    shared = {**environment, "MASTER_ADDR": first, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    started: list[_Rank] = []
    try:
        for rank in range(ranks):
            log = folder / f"rank_{rank}.log"
            log_file = log.open("w")
            host = hosts[rank] if hosts else None
            interface = {} if host is None else {"GLOO_SOCKET_IFNAME": host.interface}
            process = subprocess.Popen(
                [*(() if host is None else host.command), sys.executable, *command],
                env={**shared, **interface, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else log_file,
                stderr=log_file,
                text=True,
            )
            started.append(_Rank(rank, process, log, log_file))
        reader = threading.Thread(target=_read, args=(started[0].process.stdout, on_line), daemon=True)
        reader.start()
        _watch(started, timeout, on_wait)
        reader.join(_GRACE_SECONDS)
    finally:
        _stop(started)


def rank_environment(device: str) -> dict[str, str]:
    """An environment for ranks: that of this process, without the switches ``OVERLAP_INDUCTOR*``. Each rank gets one
    OpenMP thread. On ``cpu``, no GPU is visible."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OVERLAP_INDUCTOR")}
    kept.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1")
    if device == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept


def _read(stream: IO[str] | None, on_line: Callable[[str], None]) -> None:
    for line in stream or ():
        on_line(line.rstrip("\n"))


def _watch(ranks: list[_Rank], timeout: float, on_wait: Callable[[], None]) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [rank.process.poll() for rank in ranks]
        failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
        if failed:
            raise RankError(_failure(_first_to_blame(failed)))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            stuck = [rank for rank, code in zip(ranks, codes, strict=True) if code is None]
            names = ", ".join(str(rank.number) for rank in stuck)
            raise RankError(
                f"rank {names} did not finish within {timeout:.0f} s; all ranks were stopped. The log of rank"
                f" {stuck[0].number} ends:\n{_tail(stuck[0])}"
            )
        on_wait()
        time.sleep(_POLL_SECONDS)


def _first_to_blame(failed: list[_Rank]) -> _Rank:
    """The failed rank to report: the first one with a traceback, but no word "connection", in its log's last lines. If
    there is none, the first failed rank. A rank that names a connection may have failed only because it lost a
    peer."""
    blamed = [r for r in failed if "Traceback" in _tail(r) and "onnection" not in _tail(r)]
    return (blamed or failed)[0]


def _failure(rank: _Rank) -> str:
    return f"rank {rank.number} ended with exit status {rank.process.returncode}. The end of its log:\n{_tail(rank)}"


def _tail(rank: _Rank) -> str:
    lines = rank.log.read_text(errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:]) or "  | (its log is empty)"


def _stop(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
        if rank.process.stdout is not None:
            rank.process.stdout.close()
        rank.log_file.close()
