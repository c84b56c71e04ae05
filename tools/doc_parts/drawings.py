# SPDX-License-Identifier: Apache-2.0
"""The drawings of ``docs/schedules.md``: the work of one of four ranks, as written and with one schedule.

Lengths are in arbitrary units. As written, the matmul takes 12, an all-gather or reduce-scatter 6, an all-reduce 10. In
the drawing of ``small_message``, the matmul takes 6, and the all-reduce as written takes 4.5.
"""

from __future__ import annotations

from tools.doc_parts.timeline import OTHER
from tools.doc_parts.timeline import TRANSFER
from tools.doc_parts.timeline import Box
from tools.doc_parts.timeline import Timeline
from tools.doc_parts.timeline import svg

PEERS = 3
MATMUL, SHARD, REDUCE = 12.0, 6.0, 10.0
"""The lengths of the whole matmul, of an all-gather or reduce-scatter, and of an all-reduce."""


def gather_as_written() -> Timeline:
    t = Timeline("keep", ("SMs", "link"))
    gathered = t.add("link", "all-gather", SHARD, TRANSFER)
    t.add("SMs", "matmul", MATMUL, after=[gathered])
    return t


def reduce_as_written(collective: str, length: float) -> Timeline:
    t = Timeline("keep", ("SMs", "link"))
    t.add("link", collective, length, TRANSFER, after=[t.add("SMs", "matmul", MATMUL)])
    return t


def ring_gather() -> Timeline:
    t = Timeline("ring, all_gather_matmul", ("matmuls", "receives"))
    hops = [t.add("receives", f"shard r-{i + 1}", SHARD / PEERS, TRANSFER) for i in range(PEERS)]
    t.add("matmuls", "own shard", MATMUL / 4)
    for i, hop in enumerate(hops):
        t.add("matmuls", f"shard r-{i + 1}", MATMUL / 4, after=[hop])
    return t


def ring_reduce() -> Timeline:
    t = Timeline("ring, matmul_reduce_scatter", ("matmuls", "sends"))
    sends = []
    for i in range(PEERS):
        partial = t.add("matmuls", f"for r+{i + 1}", MATMUL / 4)
        sends.append(t.add("sends", f"to r+{i + 1}", SHARD / PEERS, TRANSFER, after=[partial]))
    t.add("matmuls", "own shard", MATMUL / 4)
    t.add("matmuls", "sum", 1.2, OTHER, after=sends)
    return t


def fused_gather() -> Timeline:
    t = Timeline("fused, all_gather_matmul: one kernel", ("tiles", "arrivals"))
    parts = [t.add("arrivals", "", SHARD / 9, TRANSFER) for _ in range(9)]
    for _ in range(3):
        t.add("tiles", "own", MATMUL / 12)
    for part in parts:
        t.add("tiles", "", MATMUL / 12, after=[part])
    return t


def fused_reduce() -> Timeline:
    t = Timeline("fused, matmul_reduce_scatter: one kernel", ("tiles", "stores to peers"))
    sends: list[Box] = []
    for i in range(9):
        tile = t.add("tiles", f"r+{i % PEERS + 1}", MATMUL / 12)
        sends.append(t.add("stores to peers", "", SHARD / 9, TRANSFER, after=[tile]))
    for _ in range(3):
        t.add("tiles", "own", MATMUL / 12)
    t.add("tiles", "sum", 1.0, OTHER, after=sends)
    return t


def fused_all_reduce() -> Timeline:
    t = Timeline("fused, matmul_all_reduce: one kernel", ("blocks: matmul", "blocks: transfer"))
    for i in range(3):
        band = t.add("blocks: matmul", f"band {i + 1}", MATMUL / 3 * 1.08)
        pushed = t.add("blocks: transfer", "push", 1.6, TRANSFER, after=[band])
        t.add("blocks: transfer", "sum, send", 2.4, TRANSFER, after=[pushed])
    return t


def chunked_gather() -> Timeline:
    t = Timeline("chunked, all_gather_matmul", ("matmul stream", "copy engines"))
    copies = [t.add("copy engines", f"from r+{i + 1}", SHARD / PEERS, TRANSFER) for i in range(PEERS)]
    t.add("matmul stream", "own shard", MATMUL / 4)
    t.add("matmul stream", "shard r+1", MATMUL / 4, after=copies[:1])
    t.add("matmul stream", "shards r+2, r+3", MATMUL / 2, after=copies)
    return t


def chunked_all_reduce() -> Timeline:
    t = Timeline("chunked, matmul_all_reduce in two bands", ("matmul stream", "side stream"))
    for i in range(2):
        band = t.add("matmul stream", f"band {i + 1}", MATMUL / 2)
        sent = t.add("side stream", "partials", REDUCE / 4, TRANSFER, after=[band])
        total = t.add("side stream", "sum", 0.9, TRANSFER, after=[sent])
        t.add("side stream", "send sums", REDUCE / 4, TRANSFER, after=[total])
    return t


def wave_groups() -> Timeline:
    t = Timeline("wave_groups, matmul_all_reduce", ("matmul kernel", "collectives"))
    for i, share in enumerate((3, 3, 2, 2)):
        group = t.add("matmul kernel", f"group {i + 1}", MATMUL * 1.1 * share / 10)
        t.add("collectives", f"NCCL {i + 1}", REDUCE * share / 10 + 0.4, TRANSFER, after=[group])
    return t


def small_as_written() -> Timeline:
    t = Timeline("keep", ("SMs", "link"))
    reduced = t.add("link", "all-reduce", 4.5, TRANSFER, after=[t.add("SMs", "matmul", 6.0)])
    t.add("SMs", "add, norm", 2.5, OTHER, after=[reduced])
    return t


def small_message() -> Timeline:
    t = Timeline("small_message, matmul_all_reduce", ("SMs", "link"))
    sent = t.add("link", "push", 1.5, TRANSFER, after=[t.add("SMs", "matmul", 6.0)])
    t.add("SMs", "sum, add, norm", 3.6, OTHER, after=[sent])
    return t


PICTURES = {
    "ring": [
        [gather_as_written, ring_gather],
        [lambda: reduce_as_written("reduce-scatter", SHARD), ring_reduce],
    ],
    "fused": [
        [gather_as_written, fused_gather],
        [lambda: reduce_as_written("reduce-scatter", SHARD), fused_reduce],
        [lambda: reduce_as_written("all-reduce", REDUCE), fused_all_reduce],
    ],
    "chunked": [
        [gather_as_written, chunked_gather],
        [lambda: reduce_as_written("all-reduce", REDUCE), chunked_all_reduce],
    ],
    "wave_groups": [[lambda: reduce_as_written("all-reduce", REDUCE), wave_groups]],
    "small_message": [[small_as_written, small_message]],
}
"""For each schedule that is drawn, its drawings. For each drawing, the functions that make the two timelines."""


def picture(schedule: str) -> str:
    drawn = []
    for makers in PICTURES[schedule]:
        timelines = [make() for make in makers]
        ends = ", ".join(f"{t.title}: ends at {t.end:.1f}" for t in timelines)
        drawn.append(svg(timelines, f"Timelines of one rank of four. {ends}."))
    return "\n\n".join(drawn)
