# SPDX-License-Identifier: Apache-2.0
"""Choose the bands of ``matmul -> all-gather`` in schedule ``chunked``. This module does not import torch.

A band is multiplied while the band before it is sent. So many bands expose little of the last band's transfer, but
each band has a fixed cost, and its last wave of tiles is rarely full. ``band_rows`` estimates the time of several cuts
and takes the fastest.

All ranks must cut alike, because a band's flag says which rows have arrived. But K may differ between ranks. So the
estimate assumes ``INNER``, and depends only on what all ranks share. Time is counted in FLOPs of an H200.

These rules are our own, and not measured yet.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_BANDS = 8
"""The largest number of bands that is chosen."""
INNER = 8192
"""The K that the estimate assumes. With a smaller K, the link takes longer than the matmul, and bands have enough
bytes."""
TILE = 128, 256
"""Rows and columns of the vendor's tile."""
MATMUL_FLOPS, COPY_FLOPS = 5e9, 3e9
"""Fixed cost of a band's matmul (8 us), and of a copy to a peer (5 us)."""
SENT_FLOPS, MOVED_FLOPS = 1640.0, 400.0
"""Cost of a byte that is sent to a peer (379 GB/s), and of a byte that is copied out of the workspace."""


def band_rows(rows: int, columns: int, peers: int, itemsize: int, sms: int, grain: int) -> tuple[int, ...]:
    """Rows of each band, in order.

    Args:
        rows, columns: M and N of a rank's matmul.
        peers: the number of other ranks.
        sms: SMs of the device.
        grain: a band begins at a multiple of this many rows.
    """
    cuts = dict.fromkeys(cut for count in range(1, MOST_BANDS + 1) for cut in _cuts(rows, count, grain))
    return min(cuts, key=lambda cut: seconds(cut, columns, peers, itemsize, sms))


def _cuts(rows: int, count: int, grain: int) -> list[tuple[int, ...]]:
    """At most ``count`` even bands, and the same with a shorter last band."""
    size = -(-rows // (count * grain)) * grain
    even = tuple(min(size, rows - start) for start in range(0, rows, size))
    half = even[-1] // (2 * grain) * grain
    return [even, (*even[:-1], even[-1] - half, half)] if half and len(even) < MOST_BANDS else [even]


def seconds(bands: Sequence[int], columns: int, peers: int, itemsize: int, sms: int) -> float:
    """Estimated time of a call, in FLOPs. The copies out of the workspace follow the last matmul, in the order in which
    the bands arrive."""
    multiplied = sent = 0.0
    arrived = []
    for rows in bands:
        tiles = -(-rows // TILE[0]) * -(-columns // TILE[1])
        multiplied += -(-tiles // sms) * sms * 2.0 * TILE[0] * TILE[1] * INNER + MATMUL_FLOPS
        sent = max(sent, multiplied) + peers * (COPY_FLOPS + rows * columns * itemsize * SENT_FLOPS)
        arrived.append(sent)
    copied = multiplied
    for rows, there in zip(bands, arrived, strict=True):
        copied = max(copied, there) + peers * rows * columns * itemsize * MOVED_FLOPS
    return copied
