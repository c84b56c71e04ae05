# SPDX-License-Identifier: Apache-2.0
"""Small torchtitan models, sharded by torchtitan's own functions. They are tensor parallel, with sequence parallelism.
Some runs add a parallel loss or a mesh of two dims.

torchtitan is not a dependency of the tests. Its release 0.2.2 runs with the torch that is supported here::

    pip install --no-deps --target <folder> torchtitan==0.2.2 tyro docstring_parser typeguard torchdata einops \\
        datasets tokenizers tensorboard protobuf absl-py pyarrow dill xxhash multiprocess pandas grpcio markdown \\
        werkzeug httpx requests urllib3 certifi
    PYTHONPATH=<folder> python tools/sweep_models.py --part torchtitan
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend

from tests.support import with_and_without

MODELS = ("llama3", "qwen3", "qwen3_moe", "deepseek_v3")
TOKENS = 12
VOCABULARY = 101
"""The size of the vocabulary, which is not a multiple of 2 or 3."""
MLPS = {"even": 48, "odd": 53}


def _arguments(name: str, world_size: int, mlp: int) -> Any:
    """The arguments of model ``name``, with three heads on each rank."""
    heads = 3 * world_size
    shared = {"n_layers": 2, "n_heads": heads, "vocab_size": VOCABULARY, "max_seq_len": 64}
    if name == "llama3":
        from torchtitan.models.llama3 import TransformerModelArgs

        # The MLP's width is 8/3 of ``dim``, rounded up to a multiple of ``multiple_of``.
        return TransformerModelArgs(dim=8 * heads, n_kv_heads=world_size, multiple_of=4 * mlp, **shared)
    from torchtitan.models.moe import MoEArgs

    experts = MoEArgs(
        num_experts=4,
        num_shared_experts=1,
        top_k=2,
        score_func="softmax",
        route_norm=False,
        score_before_experts=False,
        use_grouped_mm=False,
    )
    if name.startswith("qwen3"):
        from torchtitan.models.qwen3 import Qwen3ModelArgs

        moe = {"moe_enabled": True, "moe_inter_dim": mlp, "moe_args": experts} if name == "qwen3_moe" else {}
        return Qwen3ModelArgs(dim=48, n_kv_heads=world_size, head_dim=8, hidden_dim=mlp, qk_norm=True, **moe, **shared)
    from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs

    ranks = {"q_lora_rank": 0, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    return DeepSeekV3ModelArgs(
        dim=48, inter_dim=mlp, moe_inter_dim=mlp, n_dense_layers=1, moe_args=experts, **ranks, **shared
    )


def _classes(name: str) -> tuple[Any, Any]:
    """``(the model's class, the function that shards the model)``."""
    if name == "llama3":
        from torchtitan.models import llama3

        return llama3.Transformer, llama3.parallelize_llama
    if name.startswith("qwen3"):
        from torchtitan.models import qwen3

        return qwen3.Qwen3Model, qwen3.parallelize_qwen3
    from torchtitan.models import deepseek_v3

    return deepseek_v3.DeepSeekV3Model, deepseek_v3.parallelize_deepseekv3


def row_of(
    rank: int, world_size: int, name: str, tp: int, per_block: bool, parallel_loss: bool, mlp: str, generated: bool
) -> dict[str, Any]:
    """One rank's row of the sweep's table. The loss and the gradients are computed three times: eagerly, compiled
    without overlap, and compiled with overlap.

    Groups of ``tp`` ranks are tensor parallel. The mesh's other dim is data parallel (FSDP, if ``per_block``).
    ``per_block``: compile each block, as torchtitan does, instead of the whole model.
    """

    def build() -> Callable[[Any], dict[str, torch.Tensor]]:
        from torchtitan.config import JobConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed import parallel_dims

        parallel_dims.device_type = "cpu"
        torch.histc = _histc

        class WithoutFsdp(ParallelDims):
            """Switches FSDP off, because its hooks would break the graph of the whole model."""

            fsdp_enabled = property(lambda self: False)

        dims = (ParallelDims if per_block else WithoutFsdp)(
            dp_replicate=1, dp_shard=world_size // tp, cp=1, tp=tp, pp=1, ep=1, etp=1, world_size=world_size
        )
        dims.build_mesh()
        kind, parallelize = _classes(name)
        job = JobConfig()
        job.training.seq_len, job.parallelism.disable_loss_parallel = TOKENS, not parallel_loss
        job.training.mixed_precision_param = "float32"
        job.activation_checkpoint.mode, job.compile.components = "none", ["model"]
        generator = torch.Generator().manual_seed(1 + rank // tp)
        ids, labels = (torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator) for _ in range(2))

        def computation(backend: Any) -> dict[str, torch.Tensor]:
            torch.manual_seed(0)
            arguments = _arguments(name, tp, MLPS[mlp])
            arguments.update_from_config(job)
            model = kind(arguments)
            with torch.no_grad():
                model.init_weights()
            job.compile.enable = per_block and backend != "eager"
            job.compile.backend = backend
            model = parallelize(model, dims, job)
            for module in model.modules():
                if hasattr(module, "sdpa_backends"):
                    _attend_locally(module)
                if isinstance(module, FSDPModule):
                    # Gloo has no sum that also scales its result.
                    module.set_force_sum_reduction_for_comms(True)
            called = model if per_block or backend == "eager" else torch.compile(model, backend=backend)
            if not parallel_loss:
                loss = _loss(called(ids), labels)
                loss.backward()
            else:
                with loss_parallel():
                    loss = _loss(called(ids), labels)
                    loss.backward()
            # ``torch.compile`` adds ``_orig_mod`` to the names in a compiled block.
            named = ((n.replace("._orig_mod", ""), p) for n, p in model.named_parameters())
            gradients = {n: p.grad for n, p in named if p.grad is not None}
            if world_size > tp and not per_block:
                for gradient in gradients.values():
                    dist.all_reduce(gradient.to_local(), group=dims.get_mesh("fsdp").get_group())
            return {"loss": loss, **gradients}

        return computation

    return with_and_without.compared(build, generated)


_HISTC = torch.histc


def _histc(x: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """``histc`` for integers, too, which PyTorch lacks on CPUs."""
    return _HISTC(x.float(), **keywords).to(x.dtype)


def _attend_locally(module: Any) -> None:
    """Run attention on each rank's own shard, because DTensor has no rule for the CPU's attention. Attention treats
    batch entries and heads independently, so the result is the same."""
    attend, module.sdpa_backends = module.forward, [SDPBackend.MATH]

    def forward(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        if not isinstance(q, DTensor):
            return attend(q, k, v, **keywords)
        out = attend(*(x.to_local() for x in (q, k, v)), **keywords)
        return DTensor.from_local(out, q.device_mesh, q.placements)

    module.forward = forward


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert logits.shape[-1] == VOCABULARY or isinstance(logits, DTensor)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
