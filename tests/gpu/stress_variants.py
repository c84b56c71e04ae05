# SPDX-License-Identifier: Apache-2.0
"""The variants of stress checks: each pattern of each schedule, in each way to run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from overlap_inductor.lowerings.fused import parameters as fused_plan

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
SENT, RECEIVED, CONTRACTED = "matmul_all_to_all", "all_to_all_matmul", "contracted_all_to_all_matmul"
"""The patterns with an all-to-all. ``CONTRACTED`` is pattern ``RECEIVED`` whose matmul contracts the exchanged dim. It
has an op of its own, so it counts as a pattern here."""
OUTPUT = "matmul_all_gather"
LOOKED_UP = "embedding_all_to_all"
PATTERNS = (GATHER, SCATTER, REDUCE, SENT, RECEIVED, CONTRACTED, OUTPUT, LOOKED_UP)
BANDED = {"parts": 2, "parts_from": 0}
"""The settings with which schedule ``fused`` cuts each shard into two bands, whatever the shard's size."""


@dataclass(frozen=True)
class LookupWay:
    """How a variant of pattern ``LOOKED_UP`` looks up its tables.

    Attributes:
        mode, pooling: as in ``bench.support.lookups.LookupCase``. Bags have 0 to ``2 * pooling`` indices.
        dtype, index: dtypes of the tables and of the indices.
        last_offset: the offsets also hold the end of the last bag.
        tables_first: what one rank sends to another is ordered by table, then by bag. Otherwise by bag, then by table.
        saves: calls of every second shape also compute what the backward graph reads.
    """

    mode: str = "sum"
    pooling: int = 5
    dtype: torch.dtype = torch.float32
    index: torch.dtype = torch.int64
    last_offset: bool = True
    tables_first: bool = False
    saves: bool = False


@dataclass(frozen=True)
class Variant:
    """A schedule's op for a pattern, in one of the ways to run it.

    Attributes:
        pattern: one of ``PATTERNS``.
        way: the name of the way, for example a transport.
        fixed: the op's settings.
        by_columns: the ranks exchange slices of columns, not of rows (pattern ``SENT``), or the ranks' slices are side
            by side in the result (pattern ``OUTPUT``).
        lookups: set for pattern ``LOOKED_UP`` only.
    """

    schedule: str
    pattern: str
    way: str
    fixed: Mapping[str, Any]
    by_columns: bool = False
    lookups: LookupWay | None = None

    @property
    def may_replay(self) -> bool:
        """Whether the op replays repeated calls as CUDA graphs (``runtime.replay``)."""
        return self.schedule != "wave_groups" and self.lookups is None

    def settings(self, rows: int) -> str:
        """The op's settings for a call. ``rows``: rows of a shard; for an all-reduce, of the whole matmul."""
        if self.schedule != "wave_groups":
            return json.dumps(self.fixed, sort_keys=True)
        # A fixed partition of the rows of tiles into two groups of waves: the first row of tiles, and all others.
        bands = -(-rows // self.fixed.get("block_m", 128))
        return json.dumps({**self.fixed, "partition": [0, 1, bands] if bands > 1 else [0, 1]}, sort_keys=True)


def variants(schedules: Sequence[str], replays: bool = True) -> list[Variant]:
    """Every way of every pattern of these schedules. ``replays``: repeated calls are replayed as CUDA graphs, if the
    op can do so."""
    found = [*_fused(), *_lookups(), *_chunked()]
    found += [
        Variant("small_message", REDUCE, way, {"two_shot": way == "two_shot"}) for way in ("one_shot", "two_shot")
    ]
    found += [Variant("wave_groups", p, "", {"free": [16]}) for p in (SCATTER, REDUCE)]
    if not replays:
        found = [replace(v, fixed={**v.fixed, "replays": False}) if v.may_replay else v for v in found]
    return [v for v in found if v.schedule in schedules]


def _fused() -> list[Variant]:
    tuned = {**fused_plan.TUNED, CONTRACTED: fused_plan.TUNED[RECEIVED]}

    def variant(pattern: str, way: str, by_columns: bool = False, **settings: Any) -> Variant:
        return Variant("fused", pattern, way, {**tuned[pattern], **settings}, by_columns)

    return [
        variant(GATHER, "sm_push", **BANDED, slices=1),
        variant(SCATTER, "", **BANDED),
        variant(REDUCE, "", **BANDED),
        # K is small in all stress checks. So by default, half of the blocks would push (``pushers_of``).
        variant(REDUCE, "few push", parts=0, pushers=4),
        variant(GATHER, "slices", slices_tiles=fused_plan.NEVER),
        variant(GATHER, "copy_engine", copies_from=0),
        variant(SENT, "rows", **BANDED),
        variant(SENT, "columns", by_columns=True, **BANDED),
        variant(RECEIVED, "sm_push", **BANDED, slices=1),
        variant(RECEIVED, "slices", slices_tiles=fused_plan.NEVER),
        variant(RECEIVED, "copy_engine", copies_from=0),
        variant(CONTRACTED, "sm_push", **BANDED),
        variant(CONTRACTED, "copy_engine", **BANDED, copies_from=0),
    ]


def _lookups() -> list[Variant]:
    """Only ``mean`` saves results for the backward graph. For a sum, torch's op returns other shapes on CPUs."""
    ways: dict[str, tuple[LookupWay, dict[str, Any]]] = {
        "sum": (LookupWay(dtype=torch.bfloat16), {}),
        "mean": (LookupWay("mean", 9, index=torch.int32, last_offset=False, tables_first=True, saves=True), {}),
        "weighted": (LookupWay("weighted"), {}),
        "rows": (LookupWay(pooling=0, dtype=torch.bfloat16, tables_first=True), {}),
        # A sixth of the default number of blocks. So each block claims more pieces, and a piece has more bags.
        "few blocks": (LookupWay(), {"blocks_an_sm": 1, "copies": 8}),
    }
    return [Variant("fused", LOOKED_UP, way, fixed, lookups=lookups) for way, (lookups, fixed) in ways.items()]


def _chunked() -> list[Variant]:
    """If a way has the name of a transport, this transport moves the rows in three chunks. If the way is ``in turn``,
    copies of whole shards or bands take turns."""
    ways: dict[str, dict[str, Any]] = {
        "copy_engine": {"transport": "copy_engine", "chunks": 3},
        "sm_push": {"transport": "sm_push", "chunks": 3},
        "in turn": {"transport": "copy_engine", "turns_from": 0},
    }
    found = []
    for patterns in ((GATHER, SCATTER, REDUCE), (SENT, RECEIVED, CONTRACTED)):
        for way, fixed in ways.items():
            found += [
                Variant("chunked", p, way, {**fixed, "bands": 2 if p in (REDUCE, CONTRACTED) else 1}) for p in patterns
            ]
    found += [
        Variant("chunked", SENT, f"columns, {way}", {**ways[way], "bands": 1}, by_columns=True)
        for way in ("copy_engine", "sm_push")
    ]
    found += [
        Variant("chunked", OUTPUT, way, {**fixed, "bands": 3}, by_columns=by_columns)
        for way, fixed, by_columns in (
            ("read", {"transport": "copy_engine", "reads": True}, False),
            ("read side by side", {"transport": "copy_engine", "reads": True}, True),
            ("copy_engine", {"transport": "copy_engine"}, True),
            ("sm_push", {"transport": "sm_push"}, False),
            ("in turn", {"transport": "copy_engine", "turns_from": 0}, False),
        )
    ]
    return found
