# SPDX-License-Identifier: Apache-2.0
"""Train a Hugging Face Llama that is sharded by its own ``tp_plan``. Two steps are compared with eager steps.

    torchrun --nproc-per-node 2 examples/hugging_face_train.py

The weights are random and small. ``auto`` would not overlap sites of this size, so schedule ``ring`` is forced.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig
from transformers import LlamaForCausalLM

import overlap_inductor

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


def save() -> str:
    """Rank 0 saves a model with random weights. Returns the model's folder on every rank."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder[0])
    dist.barrier()
    return folder[0]


def train(folder: str, **compile_options: Any) -> list[float]:
    """Train two steps from the saved weights. Returns the losses."""
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    model.compile(**compile_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids, losses = torch.arange(32).reshape(2, 16), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


dist.init_process_group("gloo")
checkpoint = save()
expected = train(checkpoint, backend="eager")
found = train(checkpoint, backend="overlap_inductor", options={"schedule": "ring"})
torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
if dist.get_rank() == 0:
    for site in overlap_inductor.last_report().sites:  # of the backward graph, which was compiled last
        print(f"backward: {site.facts.module}: {site.facts.pattern}: {site.decision.status}")
    print(f"losses {found}: the same as eager's, up to a relative difference of 1e-5")
dist.destroy_process_group()
