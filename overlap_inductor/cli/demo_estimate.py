# SPDX-License-Identifier: Apache-2.0
"""The demo's block with the hidden size of Llama-3-8B, to estimate how much overlap gains on other machines.

    overlap-inductor explain --machine h200 --ranks 8 --short demo_estimate.py

``explain`` plans the graphs of this script and runs none of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlap_inductor.cli.demo_models import parallel_block

HIDDEN, TOKENS = 4096, 16384


def main() -> None:
    dist.init_process_group()
    ranks = dist.get_world_size()
    block = parallel_block(HIDDEN, init_device_mesh("cpu", (ranks,)), torch.bfloat16, values=False)
    x = torch.empty(1, TOKENS // ranks, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(block)(x).sum().backward()


if __name__ == "__main__":
    main()
