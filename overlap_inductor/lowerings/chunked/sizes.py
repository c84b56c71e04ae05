# SPDX-License-Identifier: Apache-2.0
"""Choose the sizes of schedule ``chunked``'s chunks, in shards: transfers should be hidden, and matmuls few. This
module does not import torch.

Time is counted in matmuls of one shard; ``ratio`` is the time of a shard's transfer. Transfers run one after the other,
and so do matmuls. The own shard is multiplied first in a gather, last in a scatter.

* Gather: when the own shard and the earlier chunks have been multiplied, a chunk takes all further shards that have
  arrived by then. If none has arrived, the chunk is the next shard.
* Scatter, from the last chunk to the first: a chunk is as large as possible. The last chunk's transfer must end before
  the own shard's matmul ends. An earlier chunk's transfer must end before the next transfer has to begin. Then the
  chunks are sorted, the largest first. The sizes of all but the last are evened out, if the last transfer still ends
  before the own shard's matmul ends.
* ``ratio > 1``: the link is the bottleneck, and a few even chunks keep it busy.

These rules are our own. Measurements: ``bench/results/mirrored.jsonl``.
"""

from __future__ import annotations

from collections.abc import Sequence

FEW_CHUNKS = 3
"""Largest number of chunks in two cases: the link is the bottleneck (smallest chunk last), or a gathered shard's matmul
is too small (smallest chunk first)."""
LATE = 0.35
"""Safety margin, in matmuls of one shard. A gathered shard counts as arrived if it arrives this much before its chunk
begins. If a scatter has a single chunk, the chunk's transfer must end this much before the own shard's matmul ends. If
the transfer ends later, a chunk of several shards becomes two."""
FLOPS_A_BYTE = 2300
"""FLOPs (bf16) that an H200 computes while it sends one byte. It computes 620 TFLOP/s. It sends a piece in 5 us plus
the time of the piece's bytes at 379 GB/s. The number is for pieces of about 4.7 MB."""


def transfer_ratio(sent_itemsize: int, operand_itemsize: int, other: int) -> float:
    """Time of a shard's transfer, divided by the time of its matmul. Item sizes in bytes. ``other``: size of the
    matmul's dim that is not sent, N in a gather and K in a scatter."""
    return sent_itemsize * FLOPS_A_BYTE * (2 / operand_itemsize) / (2 * other)


LEAST_WAVES = 0.4
"""A matmul with fewer waves of tiles takes as long as one with this many. So a shard with such a matmul is too small
for a chunk."""


def gather_sizes(peers: int, ratio: float, waves: float) -> tuple[int, ...]:
    """The number of shards in each chunk of a gather, in order. ``peers``: the number of other ranks' shards.
    ``waves``: waves of tiles of one shard's matmul."""
    if ratio > 1:
        return even_sizes(peers, FEW_CHUNKS)
    if waves < LEAST_WAVES:
        return even_sizes(peers, FEW_CHUNKS)[::-1]
    sizes: list[int] = []
    while (done := sum(sizes)) < peers:
        arrived = min(peers, int((1 + done - LATE) / ratio))
        sizes.append(max(1, arrived - done))
    return tuple(sizes)


def scatter_sizes(peers: int, ratio: float) -> tuple[int, ...]:
    if ratio > 1:
        return even_sizes(peers, FEW_CHUNKS)
    sizes: list[int] = []
    left, deadline = peers, float(peers + 1)
    while left:
        size = min(left, max(1, int((deadline - left) / ratio)))
        sizes.insert(0, size)
        left, deadline = left - size, deadline - size * ratio
    if len(sizes) == 1 and peers * ratio > 1 - LATE:
        return even_sizes(peers, 2)[::-1]
    sizes.sort(reverse=True)
    even = (*even_sizes(peers - sizes[-1], len(sizes) - 1), sizes[-1]) if len(sizes) > 1 else tuple(sizes)
    return even if last_transfer(even, ratio) <= peers + 1 else tuple(sizes)


def last_transfer(sizes: Sequence[int], ratio: float) -> float:
    """When a scatter's last transfer ends, in matmuls of one shard. ``sizes``: shards of each chunk."""
    multiplied, sent = 0, 0.0
    for size in sizes:
        multiplied += size
        sent = max(sent, multiplied) + size * ratio
    return sent


def even_sizes(shards: int, most: int) -> tuple[int, ...]:
    """The number ``shards`` as a sum of at most ``most`` sizes. They differ by at most one; larger ones come first."""
    count = min(shards, most)
    return tuple(shards // count + (i < shards % count) for i in range(count))
