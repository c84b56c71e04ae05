# SPDX-License-Identifier: Apache-2.0
"""The two models of the demo: a Hugging Face Llama as users load it, and a DTensor sequence-parallel block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel import parallelize_module

HEADS = 8
VOCABULARY = 1024


def save_llama(folder: Path, layers: int, hidden: int, tokens: int) -> None:
    """Save a Llama with random weights (seed 0) to ``folder`` as a Hugging Face checkpoint."""
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=max(tokens, 128),
        tie_word_embeddings=False,
        use_cache=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def load_llama(folder: Path, dtype: torch.dtype) -> Any:
    """Load the saved Llama sharded over the ranks of the job, as a user does: ``tp_plan="auto"``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=dtype).eval()


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """``x + mlp(norm(x))``. In ``parallel_block``, ``x``, the norm's output and the result are sharded along the
    sequence."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def parallel_block(
    hidden: int, mesh: DeviceMesh, dtype: torch.dtype, inner: int | None = None, *, values: bool = True
) -> nn.Module:
    """The block in sequence-parallel form. ``inner``: the width of its MLP (default: ``4 * hidden``). Input and output
    are the rank's own shard, ``[1, tokens / W, hidden]`` on W ranks. Without ``values``, the weights are not
    initialized."""
    torch.manual_seed(0)
    if values:
        block = Block(hidden, inner or 4 * hidden).to(device=mesh.device_type, dtype=dtype)
    else:
        with torch.device("meta"):
            block = Block(hidden, inner or 4 * hidden).to(dtype=dtype)
        block.to_empty(device=mesh.device_type)
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(block, mesh, plan)
