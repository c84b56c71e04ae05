# SPDX-License-Identifier: Apache-2.0
"""Compile a model block by block. Every layer is compiled by itself, and equal layers share one graph.

    torchrun --nproc-per-node 2 examples/per_block_compile.py

The report of the shared graph holds for every layer. The result is compared with that of the unsharded model, which
every rank runs eagerly. ``auto`` would not overlap sites of this size, so schedule ``ring`` is forced.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module

import overlap_inductor

LAYERS, HIDDEN = 4, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = nn.Sequential(*(Layer() for _ in range(LAYERS))).requires_grad_(False)
x = torch.randn(64, HIDDEN)
expected = model(x)

for layer in model:
    parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
overlap_inductor.enable(schedule="ring")
for layer in model:
    layer.compile()
found = model(x)
report = overlap_inductor.last_report()
if dist.get_rank() == 0:
    for site in report.sites:
        print(f"graph {report.graph}: {site.facts.module}: {site.facts.pattern}: {site.decision.status}")
torch.testing.assert_close(found, expected)
if dist.get_rank() == 0:
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"{LAYERS} layers, {graphs} graph compiled; output: the same as that of the whole model on one rank")
dist.destroy_process_group()
