# SPDX-License-Identifier: Apache-2.0
"""The programs of ``bench.layers``: steps of tensor-parallel models that can be compiled, compared and timed.

The models are a Hugging Face Llama with ``tp_plan="auto"`` and random weights, and MLP blocks of DTensor with and
without ``SequenceParallel``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module

from overlap_inductor.cli import demo_models

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama. ``prompt``: the number of tokens in the cache before a decode step."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int = 16384
    prompt: int = 1024


@dataclass(frozen=True)
class Program:
    """One phase of one model.

    Attributes:
        phase: a key of ``PHASES``.
        batch, tokens: the number of sequences, and the number of new tokens in each.
        step: runs the model or its compiled form once, and returns the results to compare.
        cuda_graphs: whether the model is compiled with CUDA graphs on GPUs.
    """

    phase: str
    batch: int
    tokens: int
    model: nn.Module
    step: Callable[[Any], Outputs]
    cuda_graphs: bool = False


def saved(folder: Path, sizes: Sizes, dtype: torch.dtype, device: str) -> Path:
    """Rank 0 writes a Llama with random weights (seed 0) to ``folder``. All ranks call this together, and get
    ``folder``."""
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM

    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.ffn,
            num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
            max_position_embeddings=sizes.positions, tie_word_embeddings=False, use_cache=False, dtype=dtype,
        )  # fmt: skip
        with torch.device(device):
            LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
        if device == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    return folder


def _ids(vocabulary: int, batch: int, tokens: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (batch, tokens), generator=generator).to(device)


def _llama(folder: Path, dtype: torch.dtype) -> Any:
    return demo_models.load_llama(folder, dtype)


def forward(folder: Path, sizes: Sizes, batch: int, tokens: int, dtype: torch.dtype, device: str) -> Program:
    """Inference on whole sequences (prefill)."""
    model, ids = _llama(folder, dtype), _ids(sizes.vocabulary, batch, tokens, device)

    def step(function: Any) -> Outputs:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return {"logits": function(input_ids=ids).logits}

    return Program("forward", batch, tokens, model, step)


def decode(folder: Path, sizes: Sizes, batch: int, tokens: int, dtype: torch.dtype, device: str) -> Program:
    """``tokens`` new tokens for each sequence, after ``sizes.prompt`` tokens in a static cache. Each step starts at the
    same position."""
    from transformers import StaticCache

    model, ids = _llama(folder, dtype), _ids(sizes.vocabulary, batch, sizes.prompt + tokens, device)
    cache = StaticCache(config=model.config, max_cache_len=2 * sizes.prompt)
    with torch.no_grad():
        model(input_ids=ids[:, : sizes.prompt], past_key_values=cache, use_cache=True, logits_to_keep=1)
    new = ids[:, sizes.prompt :].contiguous()

    def step(function: Any) -> Outputs:
        for layer in cache.layers:
            layer.cumulative_length.fill_(sizes.prompt)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return {"logits": function(input_ids=new, past_key_values=cache, use_cache=True).logits}

    return Program("decode", batch, tokens, model, step, cuda_graphs=True)


def training(folder: Path, sizes: Sizes, batch: int, tokens: int, dtype: torch.dtype, device: str) -> Program:
    """The forward, the loss computed from labels, and the backward, without an optimizer."""
    model, ids = _llama(folder, dtype), _ids(sizes.vocabulary, batch, tokens, device)

    def step(function: Any) -> Outputs:
        model.zero_grad(set_to_none=True)
        loss = function(input_ids=ids, labels=ids).loss
        loss.backward()
        return {"loss": loss.detach(), **_gradients(model)}

    return Program("training", batch, tokens, model, step)


def _blocks(sizes: Sizes, batch: int, tokens: int, dtype: torch.dtype, device: str) -> tuple[nn.Module, torch.Tensor]:
    """Sequence-parallel blocks, and this rank's shard of their input."""
    world_size = dist.get_world_size()
    mesh = dist.init_device_mesh(device, (world_size,), mesh_dim_names=("tp",))
    blocks = [demo_models.parallel_block(sizes.hidden, mesh, dtype, sizes.ffn) for _ in range(sizes.layers)]
    generator = torch.Generator().manual_seed(2 + dist.get_rank())
    x = torch.randn(batch, tokens // world_size, sizes.hidden, generator=generator)
    return nn.Sequential(*blocks), x.to(device, dtype)


def _reduced(sizes: Sizes, batch: int, tokens: int, dtype: torch.dtype, device: str) -> tuple[nn.Module, torch.Tensor]:
    """Blocks with DTensor's default layouts, whose last matmul is all-reduced, and their whole input."""
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    blocks = [demo_models.Block(sizes.hidden, sizes.ffn).to(device=device, dtype=dtype) for _ in range(sizes.layers)]
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
    x = torch.randn(batch, tokens, sizes.hidden, generator=torch.Generator().manual_seed(2))
    return nn.Sequential(*(parallelize_module(b, mesh, plan) for b in blocks)), x.to(device, dtype)


def blocks_forward(folder: Path, sizes: Sizes, batch: int, tokens: int, dtype: torch.dtype, device: str) -> Program:
    return _forward_of("blocks_forward", *_blocks(sizes, batch, tokens, dtype, device), batch, tokens)


def blocks_training(folder: Path, sizes: Sizes, batch: int, tokens: int, dtype: torch.dtype, device: str) -> Program:
    return _training_of("blocks_training", *_blocks(sizes, batch, tokens, dtype, device), batch, tokens)


def reduced_forward(folder: Path, sizes: Sizes, batch: int, tokens: int, dtype: torch.dtype, device: str) -> Program:
    return _forward_of("reduced_forward", *_reduced(sizes, batch, tokens, dtype, device), batch, tokens)


def reduced_training(folder: Path, sizes: Sizes, batch: int, tokens: int, dtype: torch.dtype, device: str) -> Program:
    return _training_of("reduced_training", *_reduced(sizes, batch, tokens, dtype, device), batch, tokens)


def _forward_of(phase: str, model: nn.Module, x: torch.Tensor, batch: int, tokens: int) -> Program:
    def step(function: Any) -> Outputs:
        with torch.no_grad():
            return {"output": function(x)}

    return Program(phase, batch, tokens, model, step)


def _training_of(phase: str, model: nn.Module, x: torch.Tensor, batch: int, tokens: int) -> Program:
    x.requires_grad_()

    def step(function: Any) -> Outputs:
        model.zero_grad(set_to_none=True)
        x.grad = None
        output = function(x)
        output.float().square().mean().backward()
        assert x.grad is not None
        return {"output": output.detach(), "input": x.grad, **_gradients(model)}

    return Program(phase, batch, tokens, model, step)


def _gradients(model: nn.Module) -> Outputs:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


PHASES: dict[str, Callable[[Path, Sizes, int, int, torch.dtype, str], Program]] = {
    make.__name__: make
    for make in (
        forward,
        decode,
        training,
        blocks_forward,
        blocks_training,
        reduced_forward,
        reduced_training,
    )
}
