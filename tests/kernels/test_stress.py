# SPDX-License-Identifier: Apache-2.0
"""Runs the stress checks for GPUs (``tests.gpu.check_stress``) on gloo processes, with kernels in Triton's interpreter.
The checks must pass if all data is sent, and report wrong results otherwise."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.support import gpu_ranks
from overlap_inductor.lowerings.fused import table_calls
from overlap_inductor.transports.copy_engine import CopyEngine
from tests.gpu import check_stress
from tests.gpu import stress_scenarios
from tests.gpu import stress_sites
from tests.gpu import stress_variants
from tests.gpu.repeated import Repeated
from tests.gpu.stress_sites import Shape
from tests.gpu.stress_variants import CONTRACTED
from tests.gpu.stress_variants import LOOKED_UP
from tests.gpu.stress_variants import RECEIVED
from tests.gpu.stress_variants import REDUCE
from tests.gpu.stress_variants import SCATTER
from tests.gpu.stress_variants import SENT
from tests.support.gloo_ranks import run_ranks
from tests.support.shared_memory import SMALL
from tests.support.shared_memory import SMALL_TILES
from tests.support.shared_memory import use_shared_memory

SHAPES = (Shape(32, 4, 16, 16), Shape(24, 2, 16, 24))
Name = tuple[str, str, str]
"""Schedule, pattern and way of a variant. The way says how the schedule runs, for example its transport."""
NAMES: list[Name] = [(v.schedule, v.pattern, v.way) for v in stress_variants.variants(check_stress.SCHEDULES)]
QUICK: list[Name] = [("chunked", SCATTER, "copy_engine"), ("small_message", REDUCE, "one_shot")]
"""Variants that the interpreter runs quickly."""
QUICK_EXCHANGES: list[Name] = [
    ("fused", SENT, "columns"),
    ("fused", CONTRACTED, "copy_engine"),
    ("chunked", SENT, "columns, copy_engine"),
    ("chunked", RECEIVED, "in turn"),
    ("chunked", CONTRACTED, "copy_engine"),
    ("fused", LOOKED_UP, "mean"),
]
"""Variants that have an all-to-all and that the interpreter runs quickly."""
OTHER_EXCHANGES = [n for n in NAMES if n[1] in (SENT, RECEIVED, CONTRACTED) and n not in QUICK_EXCHANGES]
plain_variants, plain_results = stress_variants.variants, stress_sites.first_results


def _small_variants(schedules: Sequence[str], replays: bool) -> list[stress_variants.Variant]:
    fixed: dict[str, Any] = {
        "fused": SMALL,
        "chunked": {"grain": 8, "pushers": 1},
        "small_message": {"segment": 32, "warps": 4},
        "wave_groups": {**SMALL_TILES, "free": [1], "halves": False},
    }
    tables = {"blocks_an_sm": 2, "unroll": 4, "bags": 8, "most": 1, "copies": 2, "copy_words": 128}
    return [
        replace(v, fixed={**v.fixed, **(tables if v.pattern == LOOKED_UP else fixed[v.schedule])})
        for v in plain_variants(schedules, replays)
    ]


def _chosen_variants(
    names: Sequence[Name], schedules: Sequence[str], replays: bool = True
) -> list[stress_variants.Variant]:
    named = {(v.schedule, v.pattern, v.way): v for v in _small_variants(schedules, replays)}
    return [named[name] for name in names]


class _NoStream:
    """Replaces ``torch.cuda.Stream``: on a CPU, all calls run in order."""

    def __init__(self, priority: int = 0) -> None:
        pass


class _Graph:
    """Replaces ``torch.cuda.CUDAGraph``. A replay repeats the calls of the capture."""

    captured: _Graph | None = None

    def __init__(self) -> None:
        self.held: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []

    def replay(self) -> None:
        for output, run in self.held:
            output.copy_(run())


@contextlib.contextmanager
def _capture(graph: _Graph) -> Iterator[None]:
    _Graph.captured = graph
    yield
    _Graph.captured = None


def _capturable(calls: Sequence[stress_sites.Call]) -> list[Repeated]:
    def run(call: stress_sites.Call) -> torch.Tensor:
        result = call.run()
        if _Graph.captured is not None:
            _Graph.captured.held.append((result, call.run))
        return result

    return plain_results([replace(call, run=functools.partial(run, call)) for call in calls])


def _run(
    rank: int,
    world_size: int,
    folder: str,
    options: list[str],
    names: Sequence[Name],
    break_calls: Callable[[], None] = lambda: None,
) -> int:
    """Run ``check_stress`` with ``options`` as one rank, on the CPU. Returns the number of pairs
    of a scenario and a variant that had wrong results.

    Args:
        names: the variants to run.
        break_calls: called before the run, to break some calls (``_break_copies``, ``_break_facts``).
    """
    use_shared_memory(folder)
    for name in ("synchronize", "_sleep"):
        setattr(torch.cuda, name, lambda *a: None)
    torch.cuda.Stream = torch.cuda.current_stream = _NoStream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.CUDAGraph, torch.cuda.graph, stress_sites.first_results = _Graph, _capture, _capturable
    gpu_ranks.device = lambda: torch.device("cpu")
    stress_sites.dtype, stress_sites.SHAPES = torch.float16, SHAPES
    stress_variants.variants = functools.partial(_chosen_variants, names)
    stress_scenarios.FOREIGN_SIZE, stress_scenarios.BESIDE_ELEMENTS, stress_scenarios.POISON_EVERY = 8, 64, 2
    break_calls()
    return check_stress.check(check_stress.parsed(options), rank, world_size)


def _break_copies() -> None:
    """Break the transport ``copy_engine``: every third transfer sends its signals but no data. The transfers for the
    first results, before the first call of ``drawn_calls``, stay whole."""
    plain_prepare, sent, repeated = CopyEngine.prepare, itertools.count(), _repeated()

    def prepare(
        self: CopyEngine, launch: Any, transfer: Any, numbers: Any, source: Any, share: Any, guarded: bool = False
    ) -> Any:
        send = plain_prepare(self, launch, transfer, numbers, source, share, guarded)
        # This transfer sends its signals, but copies the data to memory that no rank reads.
        signals = plain_prepare(
            self,
            replace(launch, slot=replace(launch.slot, data=_Elsewhere(launch.slot.data))),
            transfer,
            numbers,
            source,
            share,
            guarded,
        )
        return lambda source: (signals if repeated and next(sent) % 3 == 0 else send)(source)

    CopyEngine.prepare = prepare  # type: ignore[method-assign]


def _break_facts() -> None:
    """Break lookups: every third call that has new facts reads the facts of the call before it. So it looks up the
    indices of that call. The calls for the first results stay whole. Calls of the other shape do not share these facts,
    because they have another number of tables."""
    plain, changed, repeated = table_calls._on_device, itertools.count(), _repeated()

    def on_device(values: list[int], launch: Any) -> torch.Tensor:
        facts = launch.kept.get(("facts of tables", len(values)))
        if repeated and facts.values != values and next(changed) % 3 == 0:
            return facts.memory
        return plain(values, launch)

    table_calls._on_device = on_device


def _repeated() -> list[bool]:
    """An empty list that gets elements as soon as ``drawn_calls`` repeats calls."""
    plain, found = stress_scenarios.drawn_calls, list[bool]()

    def drawn_calls(*args: Any, **keywords: Any) -> dict[str, int]:
        found.append(True)
        return plain(*args, **keywords)

    stress_scenarios.drawn_calls = drawn_calls
    return found


class _Elsewhere:
    """Replaces ``launch.slot.data``, the symmetric memory for a call's data. In place of each peer's memory, ``peers``
    holds memory that no rank reads."""

    def __init__(self, buffer: Any) -> None:
        self.peers = tuple(torch.empty_like(peer) for peer in buffer.peers)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param([("chunked", CONTRACTED, "copy_engine")], id="contraction", marks=pytest.mark.thorough),
        pytest.param([("fused", LOOKED_UP, "mean")], id="lookups", marks=pytest.mark.thorough),
    ],
)
def test_every_scenario(names: list[Name], tmp_path: Path) -> None:
    assert run_ranks(2, _run, str(tmp_path), ["--iterations", "10"], names) == [0, 0]


@pytest.mark.parametrize(
    ("names", "world_size"),
    [
        pytest.param([n for n in NAMES if n not in OTHER_EXCHANGES], 2, id="most"),
        pytest.param(OTHER_EXCHANGES, 2, id="other exchanges", marks=pytest.mark.thorough),
        pytest.param(QUICK_EXCHANGES, 4, id="exchanges of four ranks", marks=pytest.mark.thorough),
    ],
)
def test_every_variant(names: list[Name], world_size: int, tmp_path: Path) -> None:
    options = ["--iterations", "1", "--only", "poison"]
    assert run_ranks(world_size, _run, str(tmp_path), options, names) == [0] * world_size


def test_groups_of_a_mesh(tmp_path: Path) -> None:
    options = ["--iterations", "10", "--only", "two_groups", "subgroup"]
    assert run_ranks(4, _run, str(tmp_path), options, QUICK[:1]) == [0] * 4


@pytest.mark.parametrize(
    "name",
    [
        QUICK[0],
        *(
            pytest.param(("chunked", p, "copy_engine"), marks=pytest.mark.thorough)
            for p in (SENT, RECEIVED, CONTRACTED)
        ),
    ],
    ids=lambda name: name[1],
)
def test_missing_transfers_are_reported(name: Name, tmp_path: Path) -> None:
    options = ["--iterations", "40", "--only", "lazy", "delays", "poison", "two_streams", "graphs"]
    assert run_ranks(2, _run, str(tmp_path), options, [name], _break_copies) == [4, 4]


def test_stale_facts_of_tables_are_reported(tmp_path: Path) -> None:
    options = ["--iterations", "6", "--only", "delays"]
    assert run_ranks(2, _run, str(tmp_path), options, [("fused", LOOKED_UP, "rows")], _break_facts) == [1, 1]
