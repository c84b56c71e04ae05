# SPDX-License-Identifier: Apache-2.0
"""Sites for stress checks. A site is one op of a schedule in a group, with a few inputs.

Inputs are drawn from seeds that all ranks know. So every rank can compute the right results alone, and no collective is
needed. The first result of a call is compared with fp64. Later results must be bitwise equal to the first result, and
this comparison needs only three small kernels.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bench.support import gpu_ranks
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.fused import parameters as fused_plan
from overlap_inductor.lowerings.registry import define_ops
from overlap_inductor.lowerings.small_message import parameters as small_plan
from overlap_inductor.runtime import workspace
from overlap_inductor.torch_compat import symmetric
from tests.gpu.repeated import Repeated

define_ops()

INPUTS = 3
"""The number of left operands of each shape. A slot has two halves, which calls use in turn. With two operands, each
half would always get the same operand, and stale rows would not be found."""
LIMIT = 2**33
TOLERANCE = 2e-2
"""Largest error that is allowed, relative to the largest element."""
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
POISON = 0xFF
"""If all bytes of a number in fp16, bf16, fp32 or fp8 have this value, the number is NaN."""
dtype = torch.bfloat16


@dataclass(frozen=True)
class Variant:
    """A schedule's op for a pattern, in one of the ways in which it can run. ``way`` is the name of this way, for
    example a transport."""

    schedule: str
    pattern: str
    way: str
    fixed: Mapping[str, Any]

    def settings(self, rows: int) -> str:
        """The op's settings for a call. ``rows``: rows of a shard; for an all-reduce, of the whole matmul."""
        if self.schedule != "wave_groups":
            return json.dumps(self.fixed, sort_keys=True)
        # A fixed partition in place of a measured one. It has two groups of waves: the first band, and all other bands.
        bands = -(-rows // self.fixed.get("block_m", 128))
        return json.dumps({**self.fixed, "partition": [0, 1, bands] if bands > 1 else [0, 1]}, sort_keys=True)


def variants(schedules: Sequence[str], replays: bool = True) -> list[Variant]:
    """Every way of every pattern of these schedules. Most ways have more than one band, chunk or group of
    waves if there are enough rows. ``replays``: repeated calls are replayed as CUDA graphs (``runtime.replay``)."""
    banded = {"parts": 2, "parts_from": 0}
    found = [Variant("fused", GATHER, "sm_push", {**fused_plan.TUNED[GATHER], **banded, "slices": 1})]
    found += [Variant("fused", p, "", {**fused_plan.TUNED[p], **banded}) for p in (SCATTER, REDUCE)]
    # By default, half of the blocks push if K is as small as at these sites (``pushers_of``). In the way ``few push``,
    # four blocks push.
    found.append(Variant("fused", REDUCE, "few push", {**fused_plan.TUNED[REDUCE], "parts": 0, "pushers": 4}))
    found.append(Variant("fused", GATHER, "slices", {**fused_plan.TUNED[GATHER], "slices_tiles": fused_plan.NEVER}))
    found.append(Variant("fused", GATHER, "copy_engine", {**fused_plan.TUNED[GATHER], "copies_from": 0}))
    for transport in ("copy_engine", "sm_push"):
        for pattern in (GATHER, SCATTER, REDUCE):
            found.append(
                Variant(
                    "chunked",
                    pattern,
                    transport,
                    {"transport": transport, "chunks": 3, "bands": 2 if pattern == REDUCE else 1},
                )
            )
    found += [
        Variant(
            "chunked", p, "in turn", {"transport": "copy_engine", "bands": 2 if p == REDUCE else 1, "turns_from": 0}
        )
        for p in (GATHER, SCATTER, REDUCE)
    ]
    found += [
        Variant("small_message", REDUCE, way, {"two_shot": way == "two_shot"}) for way in ("one_shot", "two_shot")
    ]
    found += [Variant("wave_groups", p, "", {"free": [16]}) for p in (SCATTER, REDUCE)]
    if not replays:
        found = [replace(v, fixed={**v.fixed, "replays": False}) if v.schedule != "wave_groups" else v for v in found]
    return [v for v in found if v.schedule in schedules]


@dataclass(frozen=True)
class Shape:
    """Sizes of one rank's whole matmul, ``[tokens, inner] @ [inner, columns]``. Schedule ``small_message`` uses ``few``
    tokens in place of ``tokens``."""

    tokens: int
    few: int
    inner: int = 1024
    columns: int = 2048


SHAPES = (Shape(1024, 64), Shape(640, 24))
"""The tokens of both are multiples of 8. On 2, 4 and 8 ranks, the rows of a shard of the second shape are not a
multiple of a tile."""


@dataclass(frozen=True)
class Call:
    """A call of a site with one of the site's inputs.

    Attributes:
        name: the site's name.
        shape: index of the call's shape.
        run: makes the call.
        exact: computes, in fp64, the result that ``run`` must return.
    """

    name: str
    shape: int
    run: Callable[[], torch.Tensor]
    exact: Callable[[], torch.Tensor]


def _drawn(*seed: object, size: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator(gpu_ranks.device()).manual_seed(zlib.crc32(repr(seed).encode()))
    return torch.randn(size, generator=generator, device=gpu_ranks.device()).to(dtype)


class _Site:
    """A site of ``variant`` in ``group``. Sites with equal seeds have equal inputs."""

    def __init__(self, variant: Variant, group: dist.ProcessGroup, name: str, seed: object) -> None:
        self.variant, self.group, self.name, self.seed = variant, group, name, seed
        self.rank, self.world_size = group.rank(), group.size()
        self.op = getattr(torch.ops.overlap_inductor, f"{variant.schedule}_{variant.pattern}").default
        self.chain = torch.zeros(1, dtype=torch.uint8, device=gpu_ranks.device())
        self.gathers = variant.pattern == GATHER

    def tokens(self, shape: Shape) -> int:
        return shape.few if self.variant.schedule == "small_message" else shape.tokens

    def request(self, shapes: Sequence[Shape]) -> list[Any]:
        """The workspace that the site needs for calls of all ``shapes``."""
        v, needs = self.variant, []
        for shape in shapes:
            tokens, sizes = self.tokens(shape), (shape.inner, shape.columns, 2)
            rows, settings = tokens // self.world_size, v.settings(0)
            if v.schedule == "small_message":
                needs.append(small_plan.needed_up_to(settings, self.world_size, tokens, shape.columns, 2))
            else:
                plan: Any = fused_plan if v.schedule == "fused" else chunked_plan
                parameters = plan.parameters_of(settings, symmetric.multiprocessors(gpu_ranks.device()))
                needs.append(plan.needed(v.pattern, self.world_size, rows, *sizes, parameters))
        return [self.name, max(n[0] for n in needs), max(n[1] for n in needs), *needs[0][2:]]

    def left(self, rank: int, shape: Shape, number: int) -> torch.Tensor:
        rows = self.tokens(shape) // (self.world_size if self.gathers else 1)
        return _drawn(self.seed, "left", rank, rows, number, size=(rows, shape.inner))

    def right(self, rank: int, shape: Shape) -> torch.Tensor:
        """The weight, transposed as a layer holds it. It is scaled so that results are about 1."""
        return (_drawn(self.seed, "right", rank, size=(shape.columns, shape.inner)) / shape.inner**0.5).t()

    def call(self, shape: Shape, index: int, number: int, b: torch.Tensor) -> Call:
        rows = self.tokens(shape) // (1 if self.variant.pattern == REDUCE else self.world_size)
        a, settings, last = (
            self.left(self.rank, shape, number),
            self.variant.settings(rows),
            (self.group.group_name, self.name),
        )
        # Calls of every second shape also return the gathered tensor. The kernel of such a call does not end the call,
        # because the gathered tensor is copied after the kernel.
        used = index % 2 == 1

        def gather() -> torch.Tensor:
            outs, _ = self.op(self.chain, a, [b], [None], used, settings, *last)
            return torch.cat(outs, 1) if used else outs[0]

        def reduce() -> torch.Tensor:
            return self.op(self.chain, a, b, None, settings, "sum", *last)[0]

        def exact() -> torch.Tensor:
            lefts = [self.left(rank, shape, number).double() for rank in range(self.world_size)]
            if self.gathers:
                everyone = torch.cat(lefts)
                product = everyone @ b.double()
                return torch.cat([product, everyone], 1) if used else product
            total = sum(left @ self.right(rank, shape).double() for rank, left in enumerate(lefts))
            assert isinstance(total, torch.Tensor)
            return total if self.variant.pattern == REDUCE else total.chunk(self.world_size)[self.rank]

        return Call(self.name, index, gather if self.gathers else reduce, exact)


def sites(
    variant: Variant, group: dist.ProcessGroup, names: Sequence[str], shapes: Sequence[Shape] = SHAPES, seed: object = 0
) -> list[list[Call]]:
    """Make a site for each name, and the workspace for them. Returns each site's calls, with ``INPUTS`` inputs of each
    shape. All ranks of the group call this together.

    Sites that are made together take the group's slots in turn, and have different inputs. The same seeds give the same
    inputs, also in another group.
    """
    made = [
        _Site(variant, group, f"{name} {variant.schedule} {variant.pattern} {variant.way}", (seed, i))
        for i, name in enumerate(names)
    ]
    if variant.schedule != "wave_groups":
        reason = workspace.prepare(
            group, gpu_ranks.device(), json.dumps([site.request(shapes) for site in made]), LIMIT
        )
        assert reason is None, reason
        # If the workspace had no room for a site, its op would run the plain collective.
        assert not workspace.workspace_of(group, gpu_ranks.device()).without_room
    found = []
    for site in made:
        rights = [site.right(site.rank, shape) for shape in shapes]
        found.append(
            [site.call(shape, i, number, rights[i]) for i, shape in enumerate(shapes) for number in range(INPUTS)]
        )
    return found


def first_results(calls: Sequence[Call]) -> list[Repeated]:
    """Make every call once, one after the other, without waiting. Returns the calls with their results."""
    return [(call.name, call.run, call.run()) for call in calls]


def off(result: torch.Tensor, call: Call) -> float:
    """The largest error, relative to the largest element."""
    exact = call.exact()
    if result.shape != exact.shape:
        return float("inf")
    error = float((result.double() - exact).abs().max() / exact.abs().max())
    return error if error == error else float("inf")


def digest(results: Sequence[torch.Tensor]) -> int:
    """A checksum of the results' bits and positions."""
    found = 0
    for result in results:
        bits = result.contiguous().view(torch.int16).flatten().long()
        places = torch.arange(len(bits), device=bits.device) % 65521 + 1
        found = (31 * found + int((bits * places).sum())) % 2**61
    return found


def poison(group: dist.ProcessGroup, like: Sequence[torch.Tensor]) -> None:
    """Fill with NaN the part of the group's workspace that peers write to, and the memory that the allocator will
    return for tensors like ``like``. All ranks call it together.

    A rank may do this to its own workspace only between two barriers and with nothing in flight on any rank. A peer's
    next call may write there as soon as this rank's last call has ended. Flags and counters are not changed.
    """
    torch.cuda.synchronize()
    dist.barrier(group)
    for slot in workspace.workspace_of(group, gpu_ranks.device()).arena.slots:
        slot.data.local.fill_(POISON)
    # All of these tensors exist at the same time, so that each has its own memory.
    _ = [torch.full_like(tensor, float("nan")) for tensor in like for _ in range(2)]
    torch.cuda.synchronize()
    dist.barrier(group)
