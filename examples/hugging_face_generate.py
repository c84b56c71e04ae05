# SPDX-License-Identifier: Apache-2.0
"""Generate text with a Hugging Face Llama that is sharded by its own ``tp_plan``: prefill and decode with a static
cache.

    torchrun --nproc-per-node 2 examples/hugging_face_generate.py

The model is small, and its weights are random. ``auto`` would not overlap sites of this size, so
schedule ``ring`` is forced.
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig
from transformers import LlamaForCausalLM

import overlap_inductor
from overlap_inductor.report.publish import all_reports
from overlap_inductor.report.report import OverlapReport

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": None}


def load_sharded() -> torch.nn.Module:
    """Rank 0 saves a model with random weights. Every rank reads its shards, as from any checkpoint."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder[0])
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto").eval()


def show(what: str, report: OverlapReport) -> None:
    if dist.get_rank() == 0:
        for site in report.sites:
            m = site.facts.matmuls[0].m
            print(f"{what}: {site.facts.module}: {site.facts.pattern}, M = {m}: {site.decision.status}")


dist.init_process_group("gloo")
model = load_sharded()
prompt = torch.arange(1, 17)[None]
options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
expected = model.generate(prompt, **options)

# There are two graphs: one for the prompt, and one that all later tokens share.
model.forward = torch.compile(model.forward, backend="overlap_inductor", options={"schedule": "ring"})
tokens = model.generate(prompt, **options)
show("prefill", all_reports()[0])
show("decode", overlap_inductor.last_report())
assert torch.equal(tokens, expected), f"{tokens} differ from eager's {expected}"
if dist.get_rank() == 0:
    print(f"{tokens.shape[1] - prompt.shape[1]} tokens, the same as eager's")
dist.destroy_process_group()
