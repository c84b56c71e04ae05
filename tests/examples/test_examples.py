# SPDX-License-Identifier: Apache-2.0
"""Runs every example on two gloo ranks and checks its output and the length of its file."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
from pathlib import Path

import pytest
import transformers  # noqa: F401  (if it is missing, the error must come from here, not from a child)

from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# For each example, parts of the lines that it must print, in this order. The first lines name its sites. The last line
# says that the numbers agree, or gives the losses of a training.
LINES: dict[str, list[str]] = {
    "dtensor_block": [
        "forward: mlp.0: all_gather_matmul: overlapped",
        "forward: mlp.2: matmul_reduce_scatter: overlapped",
        "backward: mlp.2: all_gather_matmul: overlapped",
        "backward: mlp.0: matmul_reduce_scatter: overlapped",
        "output and gradients: the same as eager's",
    ],
    "functional_collectives": [
        "all_gather_matmul: overlapped, ring over p2p",
        "matmul_reduce_scatter: overlapped, ring over p2p",
        "output: the same as that of plain torch.compile",
    ],
    "hugging_face_generate": [
        "prefill: model.layers.0.self_attn.q_proj: all_gather_matmul, M = 16: overlapped",
        "prefill: model.layers.0.self_attn.o_proj: matmul_reduce_scatter, M = 16: overlapped",
        "prefill: model.layers.0.mlp.gate_proj: all_gather_matmul, M = 16: overlapped",
        "prefill: model.layers.0.mlp.down_proj: matmul_reduce_scatter, M = 16: overlapped",
        "prefill: lm_head: matmul_all_gather, M = 1: overlapped",
        "decode: model.layers.0.self_attn.o_proj: matmul_all_reduce, M = 1: overlapped",
        "decode: model.layers.0.mlp.down_proj: matmul_all_reduce, M = 1: overlapped",
        "decode: lm_head: matmul_all_gather, M = 1: overlapped",
        "8 tokens, the same as eager's",
    ],
    "hugging_face_train": [
        "backward: lm_head: matmul_all_reduce: overlapped",
        "backward: model.layers.0.mlp.up_proj: matmul_all_reduce: overlapped",
        "backward: model.layers.0.self_attn.v_proj: matmul_all_reduce: overlapped",
        "losses [",
    ],
    "per_block_compile": [
        ": down: matmul_all_reduce: overlapped",
        "4 layers, 1 graph compiled; output: the same as that of the whole model on one rank",
    ],
}

WITH_KERNELS = ("functional_collectives",)
"""The example that compiles C++ kernels and unrolls its rings. In the other examples, kernels and unrolled rings would
take most of the time."""


def test_every_example_is_run_here_and_is_short() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(LINES)
    assert [path.name for path in EXAMPLES if len(path.read_text().splitlines()) >= 60] == []


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One Inductor cache for all ranks of all examples."""
    return tmp_path_factory.mktemp("cache")


def _as_torchrun_does(rank: int, world_size: int, path: str, environment: dict[str, str]) -> str:
    if Path(path).stem not in WITH_KERNELS:
        compile_anew(kernels=False)
        os.environ["OVERLAP_INDUCTOR_STEP_NODE_BUDGET"] = "1"
    os.environ.update(environment)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


# ``make test`` does not train Llama here, because ``tests/models/test_hugging_face.py`` trains it in less time.
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.thorough] * (path.stem == "hugging_face_train"))
        for path in EXAMPLES
    ],
)
def test_example(path: Path, tmp_path: Path, cache: Path) -> None:
    """The ranks are forked from a process that has done the one-time work of a first compile."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    printed = "".join(run_ranks(2, _as_torchrun_does, str(path), environment, grouped=False, timeout=550))
    lines = printed.splitlines()
    assert len(lines) == len(LINES[path.stem]), printed
    wrong = [(line, expected) for line, expected in zip(lines, LINES[path.stem], strict=True) if expected not in line]
    assert wrong == []
