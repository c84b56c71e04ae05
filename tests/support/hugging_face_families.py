# SPDX-License-Identifier: Apache-2.0
"""Builds small models, with random weights, of every Hugging Face family of causal language models with a
``tp_plan``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import with_and_without

TOKENS = 12
_SIZES: dict[str, Any] = {
    "vocab_size": 72, "vocab_size_per_layer_input": 72, "unpadded_vocab_size": 72,
    "hidden_size": 72, "hidden_size_per_layer_input": 12, "num_hidden_layers": 2,
    "intermediate_size": 48, "intermediate_size_mlp": 48,
    "ffn_hidden_size": 48, "expert_ffn_hidden_size": 48, "moe_intermediate_size": 48,
    "shared_intermediate_size": 48, "shared_expert_intermediate_size": 48, "num_kv_shared_layers": 0, "head_dim": 8,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "rotary_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "sliding_window": 8, "max_position_embeddings": 64,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "decoder_sparse_step": 1, "tie_word_embeddings": False,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Sizes of the models. A size is set only if the family's configuration has a field of that name."""
_VOCABULARY = {"vocab_size": 101, "vocab_size_per_layer_input": 101, "unpadded_vocab_size": 101}
_FFN = {
    "intermediate_size": 53, "intermediate_size_mlp": 53,
    "ffn_hidden_size": 53, "expert_ffn_hidden_size": 23, "moe_intermediate_size": 23,
    "shared_intermediate_size": 23, "shared_expert_intermediate_size": 23,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "even": {},
    "odd": {**_VOCABULARY, **_FFN},
    "odd vocabulary": _VOCABULARY,
}
"""The sizes that each variant has in place of those in ``_SIZES``. They are primes. ``_heads`` sets the numbers of
heads."""
_NO_ORIGINAL_FORMAT = {"sarvam_moe"}
"""Families whose weights are not saved in the original format. It joins Q, K and V, and shards of it cannot be
loaded."""


def families() -> list[str]:
    """Names of the families of causal language models whose configuration has a ``tp_plan``."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING and getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)
    ]


def _heads(variant: str, world_size: int) -> dict[str, int]:
    """The numbers of heads, and a hidden size if these numbers do not divide that of ``_SIZES``. A rank has four heads
    in ``even``, otherwise three. In ``odd``, all heads of a rank share one key-value head. For families that do not run
    in ``odd``, ``tools/sweep_models.py`` tries ``odd vocabulary``. In ``even``, a head has 8 features, because
    many families rotate two halves of a head's features, or of half of them."""
    heads = {"even": 4, "odd": 3, "odd vocabulary": 3}[variant] * world_size
    hidden = {} if _SIZES["hidden_size"] % heads == 0 else {"hidden_size": 6 * heads}
    if variant == "even":
        hidden = {"hidden_size": 8 * heads}
    return {"num_attention_heads": heads, "num_key_value_heads": world_size if variant == "odd" else heads, **hidden}


def _own(family: str, variant: str, world_size: int) -> dict[str, Any]:
    """Arguments of the family's configuration, in addition to those of ``_SIZES`` and ``_heads``, or in their place."""
    # This number must divide twice the hidden size. By default it is 128.
    mamba = {"mamba_n_heads": _heads(variant, world_size)["num_attention_heads"]}
    # Features of a head in the layers without a sliding window. By default 512.
    gemma4 = {"global_head_dim": 16}
    return {
        "bamba": mamba,
        # The model looks this up by the type of a layer. The configuration's default has no types.
        "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        # Layers of type "hash_moe" route by a table. A new table has one expert only, so the gate's gradient is zero.
        "deepseek_v4": {"mlp_layer_types": ["moe", "moe"]},
        "gemma4_text": gemma4,
        "gemma4_unified_text": gemma4,
        "granitemoehybrid": mamba,
        # The types of layers have no default. By default, the first two layers have no experts.
        "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        # Layers with a sliding window have twice as many key-value heads, at most as many as heads.
        "mimo_v2_flash": {"num_attention_heads": 4 * world_size, "num_key_value_heads": world_size},
    }.get(family, {})


def _config(kind: Any, sizes: dict[str, Any], own: dict[str, Any]) -> Any:
    """A configuration of class ``kind``, with the ``sizes`` for which ``kind`` has fields, and all of ``own``. If
    ``kind`` nests the language model's configuration, the nested configuration gets the ``sizes`` for which it has
    fields of its own."""

    def known(config: Any) -> dict[str, Any]:
        config.allow_global_per_layer_attribute_access = True  # else hasattr fails if a field differs between layers
        return {name: value for name, value in sizes.items() if hasattr(config, name)}

    usual = kind()
    text = usual.get_text_config()
    known_and_own = {**known(usual), **own}
    return kind(**known_and_own) if text is usual else kind(**known_and_own, text_config=known(text))


def _load(rank: int, world_size: int, family: str, folder: str, variant: str) -> Any:
    """The sharded model. Rank 0 makes and saves the whole model. Then all ranks load their shards."""
    import transformers

    transformers.logging.set_verbosity_error()
    path = Path(folder) / family
    if rank == 0:
        torch.manual_seed(0)
        kind = transformers.CONFIG_MAPPING[family]
        sizes = {**_SIZES, **_heads(variant, world_size), **VARIANTS[variant]}
        config = _config(kind, sizes, _own(family, variant, world_size))
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        model.save_pretrained(path, save_original_format=family not in _NO_ORIGINAL_FORMAT)
    dist.barrier()
    return transformers.AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", dtype=torch.float32).eval()


def row_of(
    rank: int,
    world_size: int,
    family: str,
    folder: str,
    variant: str,
    trains: bool,
    generated: bool,
    fields: dict[str, Any],
) -> dict[str, Any]:
    """One rank's row of the sweep's table (``with_and_without.compared``). The row compares the logits with and without
    overlap. If ``trains``, it compares all gradients, too. ``fields`` are fields of ``OverlapConfig``."""

    def build() -> Callable[[Any], dict[str, torch.Tensor]]:
        model = _load(rank, world_size, family, folder, variant)
        ids = torch.randint(0, 64, (1, TOKENS), generator=torch.Generator().manual_seed(1))

        def computation(backend: Any) -> dict[str, torch.Tensor]:
            model.zero_grad(set_to_none=True)
            with torch.set_grad_enabled(trains):
                out = (model if backend == "eager" else torch.compile(model, backend=backend))(
                    ids, labels=ids if trains else None
                )
                if trains:
                    out.loss.backward()
            return {
                "logits": out.logits,
                **{name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            }

        return computation

    return with_and_without.compared(build, generated, **fields)
