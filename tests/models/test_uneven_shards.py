# SPDX-License-Identifier: Apache-2.0
"""DTensor layers and a hand-written layer, forward and backward, with sizes that the number of ranks does not divide.
All ranks must have equal plans, and the results must agree with eager PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel import parallelize_module

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.graph_text import waste
from tests.support.interpreted import interpreted

HIDDEN, TOKENS = 24, 7
GATHER, SCATTER, REDUCE, HEAD = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather"


class Mlp(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, width, bias=bias) for _ in range(2))
        self.down = nn.Linear(width, HIDDEN, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A block on a sequence of ``TOKENS`` tokens, which neither 2 nor 3 ranks divide. Input and output are this rank's
    rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.norm, self.mlp = mesh, nn.LayerNorm(HIDDEN), Mlp(30, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = torch.Size([x.shape[0], TOKENS, HIDDEN])
        whole = DTensor.from_local(
            x, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=(TOKENS * HIDDEN, HIDDEN, 1)
        )
        return (whole + self.mlp(self.norm(whole))).to_local()


class RowWise(nn.Module):
    """A row-wise layer as in vLLM: only rank 0 adds the bias, before the sum over ranks."""

    def __init__(self, inner: int, rank: int) -> None:
        super().__init__()
        self.weight, self.bias, self.rank = nn.Parameter(torch.randn(18, inner)), nn.Parameter(torch.randn(18)), rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, self.weight, self.bias if self.rank == 0 else None)
        return _reduced(y)


class _Reduced(torch.autograd.Function):
    """The sum over ranks. ``backward`` returns the gradient as it is, because it is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _reduced(x: torch.Tensor) -> torch.Tensor:
    return _Reduced.apply(x)


Built = tuple[nn.Module, torch.Tensor]


def _head(mesh: DeviceMesh, rank: int, bias: bool) -> Built:
    return parallelize_module(
        nn.Linear(HIDDEN, 101, bias=bias), mesh, ColwiseParallel(output_layouts=Replicate())
    ), torch.randn(2, 6, HIDDEN)


def _row_wise(mesh: DeviceMesh, rank: int) -> Built:
    return parallelize_module(nn.Linear(25, 18), mesh, RowwiseParallel(input_layouts=Replicate())), torch.randn(6, 25)


def _mlp(mesh: DeviceMesh, rank: int, bias: bool) -> Built:
    column = ColwiseParallel(use_local_output=False)
    return parallelize_module(
        Mlp(110, bias), mesh, {"gate": column, "up": column, "down": RowwiseParallel()}
    ), torch.randn(2, 6, HIDDEN)


def _block(mesh: DeviceMesh, rank: int) -> Built:
    column = ColwiseParallel(use_local_output=False)
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.gate": column,
        "mlp.up": column,
        "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(Block(mesh), mesh, plan), torch.randn(2, TOKENS, HIDDEN).chunk(mesh.size(), 1)[
        rank
    ].contiguous()


def _bias_on_one(mesh: DeviceMesh, rank: int) -> Built:
    return RowWise(12 + rank, rank), torch.randn(6, 12 + rank)


LAYERS: dict[str, tuple[Callable[[DeviceMesh, int], Built], dict[str, dict[str, int]]]] = {
    "head": (lambda mesh, rank: _head(mesh, rank, False), {"forward": {HEAD: 1}, "backward": {REDUCE: 1}}),
    "head with bias": (lambda mesh, rank: _head(mesh, rank, True), {"forward": {HEAD: 1}, "backward": {REDUCE: 1}}),
    "row-wise": (_row_wise, {"forward": {REDUCE: 1}, "backward": {HEAD: 1}}),
    "bias on one rank": (_bias_on_one, {"forward": {REDUCE: 1}, "backward": {}}),
    "mlp": (lambda mesh, rank: _mlp(mesh, rank, False), {"forward": {REDUCE: 1}, "backward": {REDUCE: 1}}),
    "mlp with biases": (lambda mesh, rank: _mlp(mesh, rank, True), {"forward": {REDUCE: 1}, "backward": {REDUCE: 1}}),
    "sequence": (_block, {"forward": {GATHER: 1, SCATTER: 1}, "backward": {GATHER: 1, SCATTER: 1}}),
}
"""``{name: (function that makes the layer and its input, {phase: sites that must be overlapped})}``. If two all-reduced
gradients are added, their all-reduces are one site."""


def _run(
    model: Callable[..., torch.Tensor], parameters: dict[str, nn.Parameter], x: torch.Tensor
) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    out.backward(torch.linspace(-1, 1, out.numel()).reshape(out.shape))
    found = {"output": out.detach(), "gradient of the input": x.grad}
    for name, p in parameters.items():
        grad, p.grad = p.grad, None
        found[f"gradient of {name}"] = grad.to_local() if isinstance(grad, DTensor) else grad
    return {name: value for name, value in found.items() if value is not None}


def problems(
    rank: int, world_size: int, names: list[str], generated: bool, device: str = "cpu"
) -> tuple[list[str], list[Any]]:
    """Run the layers in ``names``. Returns the problems on this rank, and its plans, which must be equal on all ranks.

    ``generated``: run Inductor's code. Otherwise the rewritten graphs are interpreted.
    """
    import overlap_inductor
    from overlap_inductor.report import publish as reporting

    compile_anew(kernels=device != "cpu")
    mesh = dist.init_device_mesh(device, (world_size,), mesh_dim_names=("tp",))
    wrong, plans = [], []
    for name in names:
        make, expected = LAYERS[name]
        torch.manual_seed(3)
        model, x = make(mesh, rank)
        model, x = model.to(device), x.to(device)
        parameters = dict(model.named_parameters())
        exact = _run(model, parameters, x)
        torch._dynamo.reset()
        reporting.forget_reports()
        reports: list[OverlapReport] = []
        if generated:
            with overlap_inductor.overlap(schedule="ring", sub_chunks=2):
                found = _run(torch.compile(model, fullgraph=True), parameters, x)
            reports = reporting.all_reports()
        else:
            found = _run(
                torch.compile(
                    model, backend=interpreted(OverlapConfig(schedule="ring", sub_chunks=2), reports), fullgraph=True
                ),
                parameters,
                x,
            )
        for what, value in exact.items():
            if (
                what not in found
                or found[what].shape != value.shape
                or not torch.allclose(found[what], value, rtol=1e-4, atol=1e-4)
            ):
                wrong.append(f"{name}: {what} is {'missing' if what not in found else 'wrong'}")
        counts = {
            r.phase: dict(Counter(s.facts.pattern for s in r.sites if s.decision.status == "overlapped"))
            for r in reports
        }
        if {phase: sites for phase, sites in expected.items() if sites} != {
            phase: sites for phase, sites in counts.items() if sites
        }:
            reasons = [f"{m.reason.code}: {m.reason.text}" for r in reports for m in r.near_misses]
            wrong.append(f"{name}: {counts} overlapped, expected {expected}; {reasons}")
        wrong += [f"{name}: {text}" for r in reports for text in (*waste(r), *r.notices)]
        plans.append(
            [[(s.facts.id, s.facts.collective, s.decision.moving.parameters) for s in r.sites] for r in reports]
        )
    return wrong, plans


THREE = ["row-wise", "sequence"]
"""``make test`` runs these layers, on three ranks. ``head`` is not among them, because ``test_hugging_face``
runs a head with uneven shards."""


@pytest.mark.parametrize(
    ("world_size", "names", "generated"),
    [
        pytest.param(2, list(LAYERS), False, marks=pytest.mark.thorough),
        (3, THREE, False),
        pytest.param(3, [n for n in LAYERS if n not in THREE], False, marks=pytest.mark.thorough),
        pytest.param(2, ["sequence"], True, marks=pytest.mark.thorough),
    ],
    ids=["2 ranks", "3 ranks", "3 ranks, more layers", "2 ranks, generated code"],
)
def test_layers_that_the_group_does_not_divide(world_size: int, names: list[str], generated: bool) -> None:
    """Ranks must find equal sites. No padding row or column may enter a sum or get a gradient."""
    found = run_ranks(world_size, problems, names, generated, timeout=400)
    for rank, (wrong, plans) in enumerate(found):
        assert not wrong, f"rank {rank}: " + "\n".join(wrong)
        assert plans == found[0][1], f"rank {rank} has another plan than rank 0"
