# SPDX-License-Identifier: Apache-2.0
"""The programs of the slow-link benchmark: matmuls and lookups beside collectives, and layers of experts.

A larger ``Sizes.columns`` makes a case's computation longer, and leaves the number of transferred bytes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn import functional

from bench.support.experts import DispatchedExperts
from bench.support.experts import Experts
from bench.support.experts import ExpertSizes
from overlap_inductor.torch_compat.functional_collectives import all_to_all

all_gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)

EXPERTS, CHOSEN = 8, 2
PARTS = {2: (3, 5), 4: (1, 3, 2, 2)}
"""``{number of ranks: how many eighths of its rows a rank sends to each rank}`` for uneven parts. The first number is
for the rank itself, the second for the next rank, and so on."""


@dataclass(frozen=True)
class Case:
    """One program on this rank.

    Attributes:
        whole: the program, to be compiled.
        compute: the computation without transfers, to be compiled. Its result is not compared.
        transfer: the transfers alone.
        inputs: the arguments of ``whole`` and ``compute``.
        sites: the number of overlapped sites in the graphs of ``whole``.
        trains: whether a call runs a forward and a backward.
        tolerance: the largest allowed error, relative to the largest element.
    """

    whole: Callable[..., torch.Tensor]
    compute: Callable[..., torch.Tensor]
    transfer: Callable[[], Any]
    inputs: tuple[torch.Tensor, ...]
    sites: int = 1
    trains: bool = False
    tolerance: float = 1e-4


@dataclass(frozen=True)
class Sizes:
    """Sizes of a case. A collective moves a tensor ``[rows, inner]``. If a case has one matmul, its three sizes are
    ``rows``, ``inner`` and ``columns``."""

    rank: int
    world_size: int
    rows: int
    inner: int
    columns: int

    def drawn(self, *shape: int) -> torch.Tensor:
        """Random numbers in fp32, which differ between ranks."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.rank + sum(shape))) / 16


def _gathered(of: Sizes) -> Case:
    x, w, full = (
        of.drawn(of.rows // of.world_size, of.inner),
        of.drawn(of.inner, of.columns),
        of.drawn(of.rows, of.inner),
    )
    return Case(
        lambda x, w: all_gather(x, 0, dist.group.WORLD) @ w,
        lambda x, w: full @ w,
        lambda: funcol.wait_tensor(all_gather(x, 0, dist.group.WORLD)),
        (x, w),
    )


def _scattered(of: Sizes) -> Case:
    full = of.drawn(of.rows, of.inner)
    return Case(
        lambda x, w: reduce_scatter(x @ w, "sum", 0, dist.group.WORLD),
        lambda x, w: x @ w,
        lambda: funcol.wait_tensor(reduce_scatter(full, "sum", 0, dist.group.WORLD)),
        (of.drawn(of.rows, of.columns), of.drawn(of.columns, of.inner)),
    )


def _sent(of: Sizes) -> Case:
    full = of.drawn(of.rows, of.inner)
    return Case(
        lambda x, w: all_to_all(x @ w, dist.group.WORLD),
        lambda x, w: x @ w,
        lambda: funcol.wait_tensor(all_to_all(full, dist.group.WORLD)),
        (of.drawn(of.rows, of.columns), of.drawn(of.columns, of.inner)),
    )


def _received(of: Sizes) -> Case:
    full = of.drawn(of.rows, of.inner)
    return Case(
        lambda x, w: all_to_all(x, dist.group.WORLD) @ w,
        lambda x, w: full @ w,
        lambda: funcol.wait_tensor(all_to_all(full, dist.group.WORLD)),
        (full, of.drawn(of.inner, of.columns)),
    )


def _uneven_parts(of: Sizes) -> tuple[torch.Tensor, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """How many rows this rank sends to each rank, and a function that exchanges the rows. The returned function first
    exchanges the numbers of rows, as a dispatcher of tokens does. So the sizes are not known when a graph is
    compiled."""
    shares = PARTS[of.world_size]
    counts = torch.tensor([of.rows * shares[(to - of.rank) % of.world_size] // 8 for to in range(of.world_size)])

    def exchange(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        arriving = funcol.wait_tensor(funcol.all_to_all_single(counts, None, None, dist.group.WORLD))
        return funcol.all_to_all_single(x, arriving.tolist(), counts.tolist(), dist.group.WORLD)

    return counts, exchange


def _sent_uneven(of: Sizes) -> Case:
    full = of.drawn(of.rows, of.inner)
    counts, exchange = _uneven_parts(of)
    return Case(
        lambda x, w, counts: exchange(x @ w, counts),
        lambda x, w, counts: x @ w,
        lambda: funcol.wait_tensor(exchange(full, counts)),
        (of.drawn(of.rows, of.columns), of.drawn(of.columns, of.inner), counts),
    )


def _received_uneven(of: Sizes) -> Case:
    full = of.drawn(of.rows, of.inner)
    counts, exchange = _uneven_parts(of)
    return Case(
        lambda x, w, counts: exchange(x, counts) @ w,
        lambda x, w, counts: full @ w,
        lambda: funcol.wait_tensor(exchange(full, counts)),
        (full, of.drawn(of.inner, of.columns), counts),
    )


def _looked_up(of: Sizes) -> Case:
    """Lookups in tables whose rows have 64 elements. A bag has ``of.columns / 4`` indices."""
    full = of.drawn(of.rows, of.inner)
    made = torch.Generator().manual_seed(of.rank)
    indices = torch.randint(10_000, (of.rows, of.columns // 4), generator=made)

    def looked_up(*tables: torch.Tensor) -> torch.Tensor:
        return torch.cat([functional.embedding_bag(indices, table, mode="sum") for table in tables], 1)

    return Case(
        lambda *tables: all_to_all(looked_up(*tables), dist.group.WORLD),
        looked_up,
        lambda: funcol.wait_tensor(all_to_all(full, dist.group.WORLD)),
        tuple(of.drawn(10_000, 64) for _ in range(of.inner // 64)),
    )


def _expert_inputs(of: Sizes, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens, the ids of each token's experts, and the factors by which the results of these experts are
    multiplied. Every expert has the same number of tokens."""
    made = torch.Generator().manual_seed(7)
    ids = (torch.randperm(tokens * CHOSEN, generator=made) % EXPERTS).view(tokens, CHOSEN)
    return of.drawn(tokens, of.inner).bfloat16(), ids, torch.rand(tokens, CHOSEN, generator=made)


def _experts(of: Sizes) -> Case:
    """The experts of ``transformers`` at inference, in bf16. The all-reduce moves ``[rows, inner]``."""
    sizes = ExpertSizes(EXPERTS, CHOSEN, of.inner, of.columns)
    # All ranks have the same tokens.
    x, ids, weights = _expert_inputs(Sizes(0, of.world_size, of.rows, of.inner, of.columns), of.rows)
    return Case(
        Experts(of.rank, of.world_size, sizes=sizes),
        Experts(of.rank, of.world_size, sizes=sizes, reduce=torch.clone),
        lambda: funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD)),
        (x, ids, weights.bfloat16()),
        tolerance=4e-2,
    )


def _dispatched(of: Sizes, trains: bool) -> Case:
    """The experts of torchtitan, in bf16. ``rows`` rows of ``inner`` elements travel to the experts and back. A
    backward has two more exchanges."""
    sizes = ExpertSizes(EXPERTS, CHOSEN, of.inner, of.columns)
    x, ids, scores = _expert_inputs(of, of.rows // CHOSEN)
    full, even = of.drawn(of.rows, of.inner).bfloat16(), [of.rows // of.world_size] * of.world_size

    def transfer() -> None:
        for _ in range(4 if trains else 2):
            funcol.wait_tensor(funcol.all_to_all_single(full, even, even, dist.group.WORLD))

    return Case(
        DispatchedExperts(of.rank, of.world_size, sizes=sizes),
        DispatchedExperts(of.rank, of.world_size, sizes=sizes, exchange=lambda x, received, sent: x),
        transfer,
        (x.requires_grad_(trains), ids, scores.requires_grad_(trains)),
        sites=2 if trains else 1,
        trains=trains,
        tolerance=4e-2,
    )


CASES: dict[str, Callable[[Sizes], Case]] = {
    "all_gather_matmul": _gathered,
    "matmul_reduce_scatter": _scattered,
    "matmul_all_to_all": _sent,
    "all_to_all_matmul": _received,
    "matmul_all_to_all, uneven": _sent_uneven,
    "all_to_all_matmul, uneven": _received_uneven,
    "embedding_all_to_all": _looked_up,
    "experts, all-reduce": _experts,
    "experts, dispatched": lambda of: _dispatched(of, trains=False),
    "experts, dispatched, training": lambda of: _dispatched(of, trains=True),
}
_OF_EXPERTS = [name for name in CASES if name.startswith("experts")]
ROWS = dict.fromkeys(CASES, 1) | dict.fromkeys(_OF_EXPERTS, 4)
"""By which factor the rows of a case are more than ``--rows``. Each piece of a layer of experts reads the matrices of
all experts of the rank. With few rows, these reads take longer than the multiplications."""
SUB_CHUNKS = dict.fromkeys(CASES, 2) | dict.fromkeys(_OF_EXPERTS, 4)
"""The number of sub-chunks of a case, unless ``--sub-chunks`` is given. After the last matmul of an all-reduce in S
bands, one band is still broadcast, so more bands expose less."""


def results(case: Case, function: Callable[..., torch.Tensor], module: Any) -> list[torch.Tensor]:
    """The output of one call. If the case trains, also the gradients of its inputs and of ``module``'s parameters."""
    if not case.trains:
        with torch.no_grad():
            return [function(*case.inputs)]
    parameters = [*module.parameters(), *(x for x in case.inputs if x.requires_grad)]
    for parameter in parameters:
        parameter.grad = None
    out = function(*case.inputs)
    out.backward(torch.ones_like(out))
    return [out.detach(), *(p.grad for p in parameters if p.grad is not None)]
