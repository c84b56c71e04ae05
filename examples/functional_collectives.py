# SPDX-License-Identifier: Apache-2.0
"""Hand-written tensor parallelism: functional collectives beside plain matmuls, and nothing else.

    torchrun --nproc-per-node 2 examples/functional_collectives.py

The result is compared with that of plain ``torch.compile``. ``auto`` would not overlap sites of this size, so schedule
``ring`` is forced.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import overlap_inductor


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """``x``: this rank's rows. ``up``: this rank's columns of the first weight. ``down``: this rank's rows of the
    second weight."""
    everything = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    partial = torch.relu(everything @ up) @ down
    return functional.reduce_scatter_tensor(partial, "sum", 0, dist.group.WORLD)


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
x, up, down = torch.randn(16, 32), torch.randn(32, 64), torch.randn(64, 32)
expected = torch.compile(mlp)(x, up, down)
found = torch.compile(mlp, backend="overlap_inductor", options={"schedule": "ring"})(x, up, down)
if dist.get_rank() == 0:
    for site in overlap_inductor.last_report().sites:
        (piece,) = site.decision.plan
        print(f"{site.facts.pattern}: {site.decision.status}, {piece.schedule} over {piece.transport}")
torch.testing.assert_close(found, expected)
if dist.get_rank() == 0:
    print("output: the same as that of plain torch.compile")
dist.destroy_process_group()
