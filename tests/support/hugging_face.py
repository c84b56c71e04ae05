# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models with small configurations and random weights. ``load`` shards a model by the model's own
``tp_plan`` or, if it is asked to divide experts, by the model's expert-parallel plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LAYERS, TOKENS, VOCABULARY = 2, 12, 64

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# The first llama and the first mixtral have two layers, so that matmuls read the first layer's all-reduce. The other
# models have one layer. Starcoder2 has a bias in every projection. Cohere computes attention and MLP in parallel. Olmo2
# gathers whole activations for a norm.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, one layer": ("Llama", {"num_hidden_layers": 1}),
    "starcoder2, one layer": (
        "Starcoder2",
        {"use_bias": True, "residual_dropout": 0.0, "embedding_dropout": 0.0, "num_hidden_layers": 1},
    ),
    "cohere, one layer": ("Cohere", {"num_hidden_layers": 1}),
    "olmo2, one layer": ("Olmo2", {"num_hidden_layers": 1}),
    # Norms before and after each half of a layer.
    "gemma2, one layer": ("Gemma2", {"num_hidden_layers": 1, "head_dim": 4}),
    # One matmul for q, k and v, and one for gate and up.
    "phi3, one layer": ("Phi3", {"num_hidden_layers": 1}),
    # LayerNorms, parallel attention and MLP, learned biases.
    "gpt_neox, one layer": ("GPTNeoX", {"num_hidden_layers": 1}),
    # In the next two models, the vocabulary is no multiple of 2 or 3. In the second one, the ffn is no multiple of 3.
    "llama, odd vocabulary": ("Llama", {"vocab_size": 101, "num_hidden_layers": 1}),
    "llama, odd vocabulary, ffn of 50": (
        "Llama",
        {
            "vocab_size": 101,
            "hidden_size": 36,
            "intermediate_size": 50,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "num_hidden_layers": 1,
        },
    ),
    # Experts. Qwen2 also has a shared expert.
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral, one layer": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 1}),
    # For GPUs, whose grouped matmuls need rows of a multiple of 16 bytes.
    "mixtral, wide": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 512, "intermediate_size": 1024},
    ),
    "qwen2_moe, one layer": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_moe, one layer": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 4,
        },
    ),
}


def load(family: str, folder: str, device: str, experts: int = 1) -> Any:
    """The model, loaded as a user loads it: rank 0 saves it (seed 0), then all ranks read their shards. ``experts``:
    the number of ranks among which the experts are divided."""
    import transformers

    name, fields = FAMILIES[family]
    path = Path(folder) / family
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**_SIZES, **fields})
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(path)
    dist.barrier()
    shards: dict[str, Any] = {"tp_plan": "auto"}
    if experts > 1:
        from transformers.distributed import DistributedConfig

        # Older versions of transformers divide the experts among all ranks.
        assert experts == dist.get_world_size() or hasattr(DistributedConfig, "ep_size")
        told = {"ep_size": experts} if hasattr(DistributedConfig, "ep_size") else {"enable_expert_parallel": True}
        shards = {"distributed_config": DistributedConfig(tp_size=dist.get_world_size(), **told)}
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **shards)


def whole(family: str, folder: str, device: str, **options: Any) -> Any:
    """The model that ``load`` saved, unsharded and in fp64. ``options`` are passed to ``from_pretrained``."""
    import transformers

    path = Path(folder) / family
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **options).to(device)


def ids(device: str) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
