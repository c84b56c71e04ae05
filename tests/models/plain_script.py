# SPDX-License-Identifier: Apache-2.0
"""A user's script without this project: a Hugging Face Llama, sharded by the model's own plan and compiled."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig
from transformers import LlamaForCausalLM

torch.set_num_threads(1)
dist.init_process_group("gloo")
folder, results = sys.argv[1:]
if dist.get_rank() == 0:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
dist.barrier()
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
ids = torch.arange(24)[None]
with torch.no_grad():
    eager = model(ids, use_cache=False).logits
    compiled = torch.compile(model)(ids, use_cache=False).logits
breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
# Each rank writes a file, because lines that two processes print at once may mix.
difference = ((compiled - eager).abs().max() / eager.abs().max()).item()
Path(results, f"rank{dist.get_rank()}.json").write_text(json.dumps([difference, breaks]))
dist.barrier()
dist.destroy_process_group()
