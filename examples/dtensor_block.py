# SPDX-License-Identifier: Apache-2.0
"""A sequence-parallel block, sharded by DTensor. Its MLP begins with an all-gather and ends with a reduce-scatter.

    torchrun --nproc-per-node 2 examples/dtensor_block.py

Output and gradients are compared with those of eager. Schedule ``ring`` is forced, because ``auto`` keeps small sites.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel

import overlap_inductor


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.SiLU(), nn.Linear(4 * hidden, hidden, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def show() -> None:
    report = overlap_inductor.last_report()  # None before the first compile
    if report is not None and dist.get_rank() == 0:
        for site in report.sites:
            print(f"{report.phase}: {site.facts.module}: {site.facts.pattern}: {site.decision.status}")


def step(block: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = block(x)
    show()
    gradients = torch.autograd.grad(y.square().sum(), list(block.parameters()))
    show()
    return [y.detach(), *(g.to_local() for g in gradients)]


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
plan = {
    "norm": parallel.SequenceParallel(sequence_dim=0),
    "mlp": parallel.PrepareModuleInput(input_layouts=tensor.Shard(0), desired_input_layouts=tensor.Replicate()),
    "mlp.0": parallel.ColwiseParallel(),
    "mlp.2": parallel.RowwiseParallel(output_layouts=tensor.Shard(0)),
}
block = parallel.parallelize_module(Block(32), mesh, plan)
expected = step(block, x := torch.randn(16, 32))  # x: this rank's part of the sequence
block.compile(backend="overlap_inductor", options={"schedule": "ring"})
torch.testing.assert_close(step(block, x), expected)
if dist.get_rank() == 0:
    print("output and gradients: the same as eager's")
dist.destroy_process_group()
