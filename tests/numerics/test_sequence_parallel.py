# SPDX-License-Identifier: Apache-2.0
"""The sequence-parallel rewrite on tensor-parallel blocks, compiled and trained as in users' programs. The rewrite
must replace the blocks' all-reduces, and must not change the blocks' results."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel import parallelize_module

from overlap_inductor.errors import OverlapError
from overlap_inductor.report import publish as reporting
from tests.support import reduced_blocks
from tests.support import with_and_without
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.heard import Heard
from tests.support.reduced_blocks import CASES
from tests.support.reduced_blocks import HIDDEN
from tests.support.reduced_blocks import TOKENS
from tests.support.with_and_without import Computation

LIMIT = 1e-5
"""The largest difference from eager PyTorch or from the plain compile, relative to a result's largest element."""
RANDOM = {"refused: no_token_wise_work"}
# ``{block: (all-reduces, rewritten all-reduces, overlapped sites, reasons why other all-reduces are left)}``.
EXPECTED: dict[str, tuple[int, int, int, set[str]]] = {
    "[B, S, H], odd, accumulated gradients": (6, 6, 10, set()),
    "[B, S, H], odd batch, gated": (4, 4, 6, set()),
    # Each rank must draw dropout's random numbers of all tokens, so the forward's all-reduces are not rewritten. In the
    # backward, the backward of a norm follows each all-reduce, so these all-reduces are rewritten.
    "dropout": (6, 3, 7, RANDOM),
    "autocast": (6, 6, 10, set()),
    "each layer compiled": (4, 4, 6, set()),
    "checkpointing, odd": (6, 6, 12, set()),
    # The forward saves the results of matmuls, which are partial sums. An overlapped scatter never holds its whole
    # partial sum, so the forward's scatters cannot be overlapped.
    "selective checkpointing": (6, 6, 9, set()),
    "DTensor": (4, 4, 6, set()),
    # One graph serves the numbers of tokens that are multiples of the number of ranks. Another graph serves all other
    # numbers of tokens.
    "dynamic": (8, 8, 12, set()),
    "dynamic, even": (4, 4, 6, set()),
    "dynamic, [B, S, H]": (8, 8, 12, set()),
    "dynamic, NaN in the padding": (4, 4, 6, set()),
}
FAST = (
    "[B, S, H], odd, accumulated gradients",
    "[B, S, H], odd batch, gated",
    "dynamic",
    "dynamic, NaN in the padding",
)
"""``make test`` runs these blocks. Other blocks are thorough only. ``tests/compile`` has golden graphs of similar
blocks."""


def _rows(
    rank: int, world_size: int, cases: Mapping[str, Callable[[], Computation]] | Iterable[str]
) -> dict[str, dict[str, Any]]:
    builds = cases if isinstance(cases, Mapping) else {name: CASES[name] for name in cases}
    return {
        name: with_and_without.compared(build, close=LIMIT, sequence_parallel="on", sub_chunks=2)
        for name, build in builds.items()
    }


def _problems(rows: Mapping[str, dict[str, Any]], expected: Mapping[str, tuple[int, int, int, set[str]]]) -> list[str]:
    found = []
    for name, row in rows.items():
        if "could_not_be" in row:
            found.append(f"{name}: {row}")
            continue
        overlapped = sum(n for site, n in row["sites"].items() if site.endswith("overlapped"))
        counts = (row["all_reduces"], row["rewritten"], overlapped, set(row["left"]))
        if not row["error"] < LIMIT:
            found.append(f"{name}: {row['worst']} is off by {row['error']:.2g}")
        if counts != expected[name]:
            found.append(f"{name}: {counts}, expected {expected[name]}: {row}")
        if row["fell_back"] or row["warnings"] or row["notices"]:
            found.append(f"{name}: {row}")
    return found


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, FAST),
        pytest.param(3, (*FAST, "dynamic, [B, S, H]"), marks=pytest.mark.thorough),
        pytest.param(2, tuple(n for n in CASES if n not in FAST), marks=pytest.mark.thorough),
    ],
    ids=["2 ranks", "3 ranks", "2 ranks, more blocks"],
)
def test_blocks(world_size: int, names: tuple[str, ...]) -> None:
    """No gradient may be summed twice, and no sum may be missing. Sums must not hold padding or rows of a wrong rank.
    Every gather must be overlapped."""
    for rank, rows in enumerate(run_ranks(world_size, _rows, names, timeout=500)):
        problems = _problems(rows, EXPECTED)
        assert not problems, f"rank {rank}: {problems}"


def _with_budget(rank: int, world_size: int, budget: float) -> dict[str, Any]:
    with torch._functorch.config.patch(activation_memory_budget=budget):
        return _rows(rank, world_size, FAST[:1])[FAST[0]]


@pytest.mark.parametrize("budget", [0.5, pytest.param(0.0, marks=pytest.mark.thorough)])
def test_a_memory_budget(budget: float) -> None:
    """The backward repeats gathers. With budget 0, it repeats the whole forward."""
    for row in run_ranks(2, _with_budget, budget, timeout=300):
        overlapped = {site: n for site, n in row["sites"].items() if site.endswith("overlapped")}
        assert row["error"] < LIMIT and row["rewritten"] == 6 and not row["warnings"] + row["notices"], row
        assert sum(overlapped.values()) > EXPECTED[FAST[0]][2], row


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(101, HIDDEN), nn.Linear(HIDDEN, 101, bias=False)
        self.block, self.norm = reduced_blocks.Mlp(), nn.RMSNorm(HIDDEN, eps=1e-6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.embedding(ids))))


PLANS: dict[str, dict[str, Any]] = {
    "all-reduces": {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "block.up": ColwiseParallel(),
        "block.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    },
    "sequence-parallel": {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "block.norm": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=Shard(1)),
        "block.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    },
}


def _on_a_mesh(plan: str, shards: bool = False) -> Computation:
    """Train a model with a parallel loss. Each row of the mesh has its own data. With ``shards``, FSDP2 shards the
    parameters over the mesh dim ``dp``, and gathers them outside of the compiled graphs."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(dist.get_rank() // 2)
    ids, labels = (torch.randint(0, 101, (2, TOKENS), generator=generator) for _ in range(2))

    def computation(backend: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = parallelize_module(_Model(), mesh["tp"], PLANS[plan])
        if shards:
            fully_shard(model.block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        called = model if backend == "eager" else torch.compile(model, backend=backend)
        for step in range(3 if shards else 1):
            # On rank 1, other tensors take the memory that FSDP2 frees between the steps. So rank 1's parameters
            # move to other addresses. They must still count as the same parameters.
            taken = [torch.empty(HIDDEN) for _ in range(50 * step * (dist.get_rank() == 1))]
            with loss_parallel():
                loss = F.cross_entropy(called(ids).flatten(0, 1), labels.flatten(0, 1))
                loss.backward()
            del taken
        return {"loss": loss, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}

    return computation


@pytest.mark.parametrize(
    ("world_size", "plan", "shards", "expected"),
    [
        pytest.param(2, "all-reduces", False, (4, 4, 6, set()), marks=pytest.mark.thorough),
        pytest.param(4, "all-reduces", False, (4, 4, 6, set()), marks=pytest.mark.thorough),
        # FSDP2's hooks break the model into several graphs, one of which holds only the embedding's all-reduce.
        (4, "all-reduces", True, (4, 3, 3, {"refused: no_token_wise_work"})),
        # (Thorough only, because ``tests/models/test_blocks.py`` runs a block that is written as sequence-parallel.)
        pytest.param(2, "sequence-parallel", False, (0, 0, 6, set()), marks=pytest.mark.thorough),
    ],
    ids=[
        "all-reduces, 1 x 2 ranks",
        "all-reduces, 2 x 2 ranks",
        "all-reduces and FSDP2, 2 x 2 ranks",
        "sequence-parallel, 1 x 2 ranks",
    ],
)
def test_on_a_mesh_with_a_parallel_loss(
    world_size: int, plan: str, shards: bool, expected: tuple[int, int, int, set[str]]
) -> None:
    """On 2 x 2 ranks, each pair of ranks divides the tokens of its own data. A sequence-parallel model has no
    all-reduce to rewrite."""
    for rank, rows in enumerate(run_ranks(world_size, _rows, {plan: partial(_on_a_mesh, plan, shards)}, timeout=500)):
        problems = _problems(rows, {plan: expected})
        assert not problems, f"rank {rank}: {problems}"


def _other_weights(rank: int, world_size: int, trains: bool, schedule: str) -> tuple[float, list[str], int]:
    """``(difference from eager, warnings, number of rewritten stretches)``. The second norm's weights differ between
    the ranks."""
    compile_anew()
    heard, model, x = Heard(), reduced_blocks.Layers(2), reduced_blocks.input_of(TOKENS, HIDDEN)
    torch.nn.init.constant_(model.halves[1].norm.weight, 1.0 + rank)
    options = {"schedule": schedule, "sequence_parallel": "on"}
    with torch.set_grad_enabled(trains):
        found, exact = torch.compile(model, backend="overlap_inductor", options=options)(x), model(x)
    rewritten = sum(s.status == "rewritten" for r in reporting.all_reports() for s in r.stretches)
    return with_and_without.off(found, exact), heard.texts, rewritten


# Thorough only, because ``tests/numerics/test_same_inputs.py`` also tests norm weights that differ between ranks, and
# compiles faster.
@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["ring", "auto"])
def test_ranks_with_other_norms_run_the_plain_program(schedule: str) -> None:
    """As written, each rank scales all tokens by its own norm weights. After the rewrite, each rank would scale only
    its own rows, so results would differ. So all ranks must run the plain program."""
    found = run_ranks(2, _other_weights, False, schedule, timeout=300)
    assert all(error < LIMIT and rewritten == 1 for error, _, rewritten in found), found
    texts = [text for _, heard, _ in found for text in heard]
    assert any("must be the same on all ranks" in text for text in texts), found


def _error_of_training(rank: int, world_size: int) -> str:
    with pytest.raises(OverlapError) as error:
        _other_weights(rank, world_size, True, "ring")
    return str(error.value)


@pytest.mark.thorough
def test_training_ranks_with_other_norms_is_an_error() -> None:
    for text in run_ranks(2, _error_of_training, timeout=300):
        assert "OVERLAP_INDUCTOR_SEQUENCE_PARALLEL=off on all ranks" in text
