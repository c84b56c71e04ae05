# SPDX-License-Identifier: Apache-2.0
"""A user's script without this project: it compiles a model, runs it on all ranks, and saves the results.

Arguments: the model's name (see ``MODELS``), a folder for the model's weights, and a folder for the results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module

from bench.support.experts import SMALL
from bench.support.experts import DispatchedExperts
from tests.support import hugging_face
from tests.support.dlrm import DLRM
from tests.support.dlrm import batch_of
from tests.support.ulysses import UlyssesAttention

Results = dict[str, torch.Tensor]


class MoE(torch.nn.Module):
    """torchtitan's layer: a router chooses the experts of each token, and tokens travel to their experts and back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(SMALL.hidden, SMALL.experts, bias=False)
        self.experts = DispatchedExperts(dist.get_rank(), dist.get_world_size(), shared=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, ids = torch.softmax(self.gate(x).float(), dim=-1).topk(SMALL.chosen)
        return self.experts(x, ids, scores)


def gradients(model: torch.nn.Module) -> Results:
    return {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def language_model(family: str, weights: str) -> Results:
    """A model of ``transformers``, loaded by its expert-parallel plan."""
    model = hugging_face.load(family, weights, "cpu", experts=dist.get_world_size()).eval()
    with torch.no_grad():
        return {"logits": torch.compile(model)(hugging_face.ids("cpu"), use_cache=False).logits}


def llama(weights: str) -> Results:
    """A training step of a model of ``transformers``, loaded by its tensor-parallel plan."""
    from transformers import AutoModelForCausalLM
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM

    if dist.get_rank() == 0:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(weights)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(weights, tp_plan="auto")
    ids = torch.arange(24)[None]
    loss = torch.compile(model)(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss, **gradients(model)}


class Block(torch.nn.Module):
    def __init__(self, hidden: int = 16, inner: int = 32) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.up, self.down = torch.nn.Linear(hidden, inner), torch.nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def blocks(weights: str) -> Results:
    """A training step of blocks of ``DTensor`` with the default layouts."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(Block(), Block())
    plan = {f"{i}.{n}": s() for i in (0, 1) for n, s in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    model = parallelize_module(model, mesh, plan)
    x = torch.randn(2, 12, 16).requires_grad_()
    out = torch.compile(model)(x)
    out.sin().sum().backward()
    found = gradients(model)
    return {
        "output": out,
        "gradient of the input": x.grad,
        **{name: g.to_local() if isinstance(g, DTensor) else g for name, g in found.items()},
    }


def torchtitan(weights: str) -> Results:
    # torchtitan sets this switch before it compiles layers of experts.
    torch._dynamo.config.capture_scalar_outputs = True
    model = MoE()
    x = torch.randn(
        16 + dist.get_rank(), SMALL.hidden, generator=torch.Generator().manual_seed(dist.get_rank())
    ).requires_grad_()
    out = torch.compile(model)(x)
    out.sin().sum().backward()
    return {"output": out, "gradient of the input": x.grad, **gradients(model)}


def ulysses(weights: str) -> Results:
    """Flux's attention: each head of q and k is normed, and neighbours are rotated together."""
    rank, ranks, own = dist.get_rank(), dist.get_world_size(), 6
    model = UlyssesAttention(8 * ranks, 2 * ranks, dist.group.WORLD, norm="heads", rotary="pairs")
    tokens = torch.randn(2, own * ranks, 8 * ranks)[:, rank * own : (rank + 1) * own].contiguous()
    places = torch.arange(rank * own, (rank + 1) * own).float()
    with torch.no_grad():
        return {"output": torch.compile(model)(tokens, places)}


def dlrm(weights: str) -> Results:
    model = DLRM(3, 50, 8, 6)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for table in model.tables:
        torch.nn.init.normal_(table.weight, generator=generator)
    out = torch.compile(model)(*batch_of(model, 4, 3, generator).arguments())
    out.square().mean().backward()
    return {"output": out, **gradients(model)}


MODELS: dict[str, Callable[[str], Results]] = {
    "mixtral": partial(language_model, "mixtral"),
    "qwen2_moe": partial(language_model, "qwen2_moe, one layer"),
    "qwen3_moe": partial(language_model, "qwen3_moe, one layer"),
    "llama": llama,
    "blocks": blocks,
    "torchtitan": torchtitan,
    "ulysses": ulysses,
    "dlrm": dlrm,
}


def main(name: str, weights: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    found = {name: tensor.detach() for name, tensor in MODELS[name](weights).items()}
    place = Path(results, f"rank{dist.get_rank()}")
    torch.save(found, place.with_suffix(".pt"))
    # What the compiler counted (for example graph breaks), and what is imported.
    about = {"counts": torch._dynamo.utils.counters, "modules": sorted(sys.modules)}
    place.with_suffix(".json").write_text(json.dumps(about))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
