"""Every family of Hugging Face models that shards itself by a plan of its own, on two gloo ranks: are its results the same with overlap, and what was found?

    python tools/check_hugging_face.py [--train] [--out rows.jsonl] [family ...]

Each family is built from a small configuration with random weights (no download), saved, and loaded with ``tp_plan="auto"``. Its logits, and with ``--train`` the gradients of
its parameters, are compared with the same sharded model run eagerly, and so are those of graphs compiled without overlap; sites are overlapped by the ring, whatever they cost, and the rewritten graphs are interpreted, since the
code that is generated of a site does not depend on the family. One JSON row a family: the largest relative error, and the same without overlap, sites and near misses by reason. A family that cannot be
built that small, or does not run eagerly as sharded, says so in its row. Status 1 where a result is wrong, the pass failed, or an error came from a compiled run.

Some eight seconds a family; needs what the tests need, and is run from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from overlap_inductor.config import OverlapConfig  # noqa: E402
from overlap_inductor.report import OverlapReport  # noqa: E402
from tests.numerics.interpreted import interpreted  # noqa: E402
from tests.numerics.ranks import compile_anew  # noqa: E402
from tests.numerics.ranks import run_ranks  # noqa: E402

VOCABULARY, TOKENS = 64, 12
LIMIT = 1e-4
"""Of fp32 results, relative to the largest element; where rounding alone takes those without overlap further off, ten times as far."""
COMPARABLE = 1e-2
"""What is further off without overlap is nothing but rounding."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "hidden_size": 32, "hidden_size_per_layer_input": 8, "num_hidden_layers": 2,
    "intermediate_size": 48, "intermediate_size_mlp": 48, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_intermediate_size": 16,
    "shared_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_attention_heads": 8, "num_key_value_heads": 8, "num_kv_shared_layers": 0, "head_dim": 8,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "sliding_window": 8, "max_position_embeddings": 64,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "decoder_sparse_step": 1, "tie_word_embeddings": False, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Those that a family's configuration knows are set."""


def families() -> list[str]:
    """Causal language models whose configuration has a plan."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING and getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)]


def _load(rank: int, family: str, folder: str) -> Any:
    """The sharded model; rank 0 has saved it."""
    import transformers

    path = Path(folder) / family
    if rank == 0:
        torch.manual_seed(0)
        kind = transformers.CONFIG_MAPPING[family]
        config = kind(**{name: value for name, value in SIZES.items() if hasattr(kind(), name)})
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    dist.barrier()
    return transformers.AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", dtype=torch.float32).eval()


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).abs().max() / exact.abs().max().clamp_min(1e-12))


def row_of(rank: int, world_size: int, family: str, folder: str, trains: bool) -> dict[str, Any]:
    """One rank's row."""
    import transformers

    transformers.logging.set_verbosity_error()
    stage = {"at": "built"}

    @contextmanager
    def at(name: str) -> Iterator[None]:
        stage["at"] = name
        with torch.set_grad_enabled(trains):
            yield

    try:
        model = _load(rank, family, folder)
        ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
        labels = ids if trains else None
        with at("run eagerly"):
            exact = model(ids, labels=labels)
            if trains:
                exact.loss.backward()
        gradients = _gradients(model)
        compile_anew()
        errors: dict[str, dict[str, float]] = {}
        for schedule, name in (("keep", "compiled without overlap"), ("ring", "overlapped")):
            reports: list[OverlapReport] = []
            torch._dynamo.reset()
            with at(name):
                out = torch.compile(model, backend=interpreted(OverlapConfig(schedule=schedule), reports))(ids, labels=labels)
                if trains:
                    out.loss.backward()
            errors[schedule] = {"logits": _off(out.logits, exact.logits), **{name: _off(g, gradients[name]) for name, g in _gradients(model).items()}}
    except Exception as error:  # noqa: BLE001  (whatever a family does on two cores of a CPU is its row)
        said = f"{type(error).__name__}: {str(error)[:200]}"
        return {"family": family, "could_not_be": stage["at"], "error": said, **({"trace": traceback.format_exc()[-1500:]} if stage["at"] == "overlapped" else {})}
    sites = Counter(f"{s.facts.pattern} {s.decision.status}" for r in reports for s in r.sites)
    misses = Counter(m.reason.code for r in reports for m in r.near_misses)
    # (A gradient of about zero is nothing but rounding, in any compiled graph.)
    worst = max(errors["ring"], key=lambda name: errors["ring"][name] / max(errors["keep"][name], LIMIT))
    return {
        "family": family, "graphs": len(reports), "sites": dict(sites), "near_misses": dict(misses), "worst": worst, "off": errors["ring"][worst], "off_without": errors["keep"][worst],
        "notices": [notice for r in reports for notice in r.notices],
    }  # fmt: skip


def judged(row: dict[str, Any]) -> str:
    """``right``; ``wrong``; ``nothing to compare`` where graphs without overlap are as far off; or where the family failed."""
    if row.get("could_not_be", "overlapped") != "overlapped":
        return f"could not be {row['could_not_be']}"
    if "off" not in row or any("failed" in notice for notice in row["notices"]):
        return "wrong"
    off, without = row["off"], row["off_without"]
    if off <= max(LIMIT, 10 * without) and without <= COMPARABLE:
        return "right"
    return "nothing to compare" if without > COMPARABLE and off == off else "wrong"


def main() -> int:
    parser = argparse.ArgumentParser(description="Hugging Face families with a plan of their own: the same results with overlap?")
    parser.add_argument("families", nargs="*", help="all of them without")
    parser.add_argument("--train", action="store_true", help="gradients, too")
    parser.add_argument("--out", type=Path, help="rows are appended here, too")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for family in arguments.families or families():
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(2, row_of, family, folder, arguments.train, timeout=180, expect_failure=True)
        # (Where one rank fails to build its model, the other's barrier does.)
        row = found[0] if isinstance(found[0], dict) else {"family": family, "could_not_be": "run", "error": str(found[0])[-300:]}
        verdict = judged(row)
        counts[verdict] += 1
        row |= {"trains": arguments.train, "verdict": verdict, "seconds": round(time.monotonic() - start, 1)}
        print(json.dumps(row), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(json.dumps({"families": sum(counts.values()), **counts}))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
