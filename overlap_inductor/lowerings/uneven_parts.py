# SPDX-License-Identifier: Apache-2.0
"""Checks the numbers of rows that a rank sends and receives in an all-to-all."""

from __future__ import annotations

from collections.abc import Sequence


def check_parts(rows: int, sent: Sequence[int], received: Sequence[int], rank: int, site: str) -> None:
    """Raises ``ValueError`` if ``sent`` and ``received`` do not describe an all-to-all of ``rows`` rows."""
    if sum(sent) != rows or sent[rank] != received[rank] or min(*sent, *received) < 0:
        raise ValueError(
            f"site {site}: rank {rank} of the group has {rows} rows, sends {list(sent)} and receives {list(received)}."
            " Expected: no negative number, sent numbers that add up to the rank's rows, and in both lists the same"
            f" number at index {rank}"
        )
