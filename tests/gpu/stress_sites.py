# SPDX-License-Identifier: Apache-2.0
"""Sites for stress checks. A site is one op of a schedule in a group, with a few inputs.

Inputs are drawn from seeds that all ranks know. So every rank computes the right results alone. A call's first result
is compared with fp64. Later results must be bitwise equal to the first.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
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
from tests.gpu.stress_lookups import Lookups
from tests.gpu.stress_patterns import Sizes
from tests.gpu.stress_patterns import pattern_of
from tests.gpu.stress_variants import REDUCE
from tests.gpu.stress_variants import Variant

define_ops()

INPUTS = 3
"""The number of left operands of each shape. It is odd, because calls of schedule ``small_message`` use the two halves
of a site's workspace in turn. If two operands took turns, each half would always get the same operand. Then a row
that is left from an earlier call would have the right values, so no check would find it."""
LIMIT = 2**33
TOLERANCE = 2e-2
"""The largest error of a matmul that is allowed, relative to the largest element."""
POISON = 0xFF
"""A number in fp16, bf16, fp32 or fp8 whose bytes all have this value is NaN."""
dtype = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Sizes of a call. In most patterns, a rank's whole matmul is ``[tokens, inner] @ [inner, columns]``. See
    ``tests.gpu.stress_patterns`` and ``tests.gpu.stress_lookups`` for the others. Schedule ``small_message`` uses
    ``few`` tokens."""

    tokens: int
    few: int
    inner: int = 1024
    columns: int = 2048


SHAPES = (Shape(1024, 64), Shape(640, 24))
"""The tokens of both shapes are multiples of 8. In the second shape, a shard's rows are not whole tiles."""


@dataclass(frozen=True)
class Call:
    """A call of a site with one of the site's inputs.

    Attributes:
        name: the site's name.
        shape: index of the call's shape.
        run: makes the call.
        exact: computes the right result in fp64.
        tolerance: the largest error that is allowed, relative to the largest element.
    """

    name: str
    shape: int
    run: Callable[[], torch.Tensor]
    exact: Callable[[], torch.Tensor]
    tolerance: float = TOLERANCE


def _number(*seed: object) -> int:
    return zlib.crc32(repr(seed).encode())


def _drawn(*seed: object, size: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator(gpu_ranks.device()).manual_seed(_number(*seed))
    return torch.randn(size, generator=generator, device=gpu_ranks.device()).to(dtype)


class _Site(ABC):
    """A site of ``variant`` in ``group``. Sites with equal seeds have equal inputs."""

    def __init__(self, variant: Variant, group: dist.ProcessGroup, name: str, seed: object) -> None:
        self.variant, self.group, self.name, self.seed = variant, group, name, seed
        self.rank, self.world_size = group.rank(), group.size()
        self.op = getattr(torch.ops.overlap_inductor, f"{variant.schedule}_{variant.pattern}").default
        self.chain = torch.zeros(1, dtype=torch.uint8, device=gpu_ranks.device())

    def sizes(self, shape: Shape) -> Sizes:
        tokens = shape.few if self.variant.schedule == "small_message" else shape.tokens
        return Sizes(self.world_size, tokens, shape.inner, shape.columns)

    def request(self, shapes: Sequence[Shape]) -> list[Any]:
        """``[site, bytes, signals]`` for ``workspace.prepare``: enough for a call of any of ``shapes``. For schedule
        ``small_message``, the protocol is a fourth element."""
        needs = [self.needed(self.sizes(shape)) for shape in shapes]
        return [self.name, max(n[0] for n in needs), max(n[1] for n in needs), *needs[0][2:]]

    @abstractmethod
    def needed(self, sizes: Sizes) -> Sequence[Any]:
        """``(bytes, signals)`` of a call in the workspace. For schedule ``small_message``, also the protocol."""

    @abstractmethod
    def calls(self, shape: Shape, index: int) -> list[Call]:
        """``INPUTS`` calls of ``shape``, whose index is ``index``."""


class _MatmulSite(_Site):
    """A site with a matmul. The calls of a shape have different left operands and the same right operand."""

    def __init__(self, variant: Variant, group: dist.ProcessGroup, name: str, seed: object) -> None:
        super().__init__(variant, group, name, seed)
        self.pattern = pattern_of(variant)

    def needed(self, sizes: Sizes) -> Sequence[Any]:
        v, settings = self.variant, self.variant.settings(0)
        if v.schedule == "small_message":
            return small_plan.needed_up_to(settings, self.world_size, sizes.tokens, sizes.columns, 2)
        plan: Any = fused_plan if v.schedule == "fused" else chunked_plan
        parameters = plan.parameters_of(settings, symmetric.multiprocessors(gpu_ranks.device()))
        matmul, rows = (self.pattern.left(sizes)[1], self.pattern.right(sizes)[1]), self.pattern.planned_rows(sizes)
        return plan.needed(self.pattern.planned_as, self.world_size, rows, *matmul, 2, parameters)

    def calls(self, shape: Shape, index: int) -> list[Call]:
        right = self.right(self.rank, shape)
        return [self.call(shape, index, number, right) for number in range(INPUTS)]

    def left(self, rank: int, shape: Shape, number: int) -> torch.Tensor:
        size = self.pattern.left(self.sizes(shape))
        return _drawn(self.seed, "left", rank, size[0], number, size=size)

    def right(self, rank: int, shape: Shape) -> torch.Tensor:
        """The weight: the transposed view of a ``[columns, inner]`` tensor, as in a linear layer. It is scaled so that
        results are about 1."""
        inner, columns = self.pattern.right(self.sizes(shape))
        return (_drawn(self.seed, "right", rank, size=(columns, inner)) / inner**0.5).t()

    def call(self, shape: Shape, index: int, number: int, b: torch.Tensor) -> Call:
        tokens = self.sizes(shape).tokens
        settings = self.variant.settings(tokens // (1 if self.variant.pattern == REDUCE else self.world_size))
        a, where = self.left(self.rank, shape, number), (self.group.group_name, self.name)
        # If the exchange comes first, calls of every second shape also return what was received. Such a call copies the
        # received tensor after its kernel.
        used = index % 2 == 1

        def run() -> torch.Tensor:
            return self.pattern.run(self.op, self.chain, a, b, used, settings, *where)

        def exact() -> torch.Tensor:
            lefts = [self.left(rank, shape, number).double() for rank in range(self.world_size)]
            return self.pattern.exact(lefts, lambda rank: self.right(rank, shape).double(), self.rank, used)

        return Call(self.name, index, run, exact)


class _LookupSite(_Site):
    """A site that looks up tables. Its calls have different tables and indices."""

    def lookups(self, sizes: Sizes) -> Lookups:
        assert self.variant.lookups is not None
        return Lookups(self.variant.lookups, sizes)

    def needed(self, sizes: Sizes) -> Sequence[Any]:
        return self.lookups(sizes).needed()

    def calls(self, shape: Shape, index: int) -> list[Call]:
        return [self.call(self.lookups(self.sizes(shape)), index, number) for number in range(INPUTS)]

    def call(self, lookups: Lookups, index: int, number: int) -> Call:
        seed, saves = _number(self.seed, lookups.case.batch, number), lookups.way.saves and index % 2 == 1
        settings, where = self.variant.settings(0), (self.group.group_name, self.name)
        mine = lookups.drawn(self.rank, seed, gpu_ranks.device())
        run = lookups.call(self.op, self.chain, mine, saves, settings, *where)

        def exact() -> torch.Tensor:
            every = [lookups.drawn(rank, seed, gpu_ranks.device()) for rank in range(self.world_size)]
            return lookups.exact(every, self.rank, saves)

        return Call(self.name, index, run, exact, lookups.tolerance)


def sites(
    variant: Variant, group: dist.ProcessGroup, names: Sequence[str], shapes: Sequence[Shape] = SHAPES, seed: object = 0
) -> list[list[Call]]:
    """Make a site for each name, and the sites' workspace, which schedule ``wave_groups`` does not need. All ranks of
    the group call this together.

    Returns each site's calls, with ``INPUTS`` inputs of each shape. The group's workspace has up to two parts (slots).
    If there are two, neighbouring sites have different slots. Equal seeds give equal inputs, also in another group.
    """
    kind = _MatmulSite if variant.lookups is None else _LookupSite
    made = [
        kind(variant, group, f"{name} {variant.schedule} {variant.pattern} {variant.way}", (seed, i))
        for i, name in enumerate(names)
    ]
    if variant.schedule != "wave_groups":
        reason = workspace.prepare(
            group, gpu_ranks.device(), json.dumps([site.request(shapes) for site in made]), LIMIT
        )
        assert reason is None, reason
        # A site without room in the workspace would run the plain collective.
        assert not workspace.workspace_of(group, gpu_ranks.device()).without_room
    return [[call for i, shape in enumerate(shapes) for call in site.calls(shape, i)] for site in made]


def first_results(calls: Sequence[Call]) -> list[Repeated]:
    """Make every call once, without waiting for the GPU. Returns each call's name, function and result."""
    return [(call.name, call.run, call.run()) for call in calls]


def off(result: torch.Tensor, call: Call) -> float:
    """The largest error, relative to the largest element. Infinite if the shapes differ or a number is NaN."""
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
    """Fill with NaN the workspace that peers write to, and the memory that tensors like ``like`` will get.

    All ranks call this together. Flags and counters keep their values. The barriers are needed because a peer's next
    call may write here as soon as this rank's last call has ended.
    """
    torch.cuda.synchronize()
    dist.barrier(group)
    for slot in workspace.workspace_of(group, gpu_ranks.device()).arena.slots:
        slot.data.local.fill_(POISON)
    # All of these tensors exist at once, so each has its own memory.
    _ = [torch.full_like(tensor, float("nan")) for tensor in like for _ in range(2)]
    torch.cuda.synchronize()
    dist.barrier(group)
