# SPDX-License-Identifier: Apache-2.0
"""Functions with the layers of tensor-parallel models, as common frameworks write them: matmuls with a rank's shards,
and all-reduces. ``BLOCKS`` makes their inputs for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.support.spellings import world

Make = Callable[[int], tuple[torch.Tensor, ...]]
H, OWN, VOCABULARY, HEADS = 16, 8, 32, 2
"""The hidden size, a rank's features in a column-parallel layer, the size of the vocabulary, and a rank's heads."""


class ReduceForward(torch.autograd.Function):
    """The result of a row-parallel layer: ``forward`` computes an all-reduce, ``backward`` does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "sum", world())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class ReduceBackward(torch.autograd.Function):
    """The input of a column-parallel layer: ``backward`` computes an all-reduce, ``forward`` does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return all_reduce(grad.contiguous(), "sum", world())


def reduced(x: torch.Tensor) -> torch.Tensor:
    return all_reduce(x, "sum", world())


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm as Hugging Face writes it. It computes in fp32."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def attention(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """The rank's partial sum of the attention layer's result."""
    batch, length, _ = x.shape
    heads = [(x @ w).view(batch, length, HEADS, OWN // HEADS).transpose(1, 2) for w in (q, k, v)]
    scores = (heads[0] @ heads[1].transpose(2, 3)).softmax(-1)
    return (scores @ heads[2]).transpose(1, 2).reshape(batch, length, OWN) @ o


def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def llama(ids: torch.Tensor, table: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
    """A pre-norm model, from the embedding to the head. Each rank's embeddings are partial sums."""
    x = reduced(F.embedding(ids, table))
    x = x + reduced(attention(rms_norm(x, w[0]), *w[1:5]))
    x = x + reduced(mlp(rms_norm(x, w[5]), *w[6:9]))
    return rms_norm(x, w[9]) @ w[10]


def llama_trained(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
    enter, leave = ReduceBackward.apply, ReduceForward.apply
    n = enter(rms_norm(x, w[0]))
    x = x + leave((n @ w[1] * (n @ w[2])) @ w[3])
    n = enter(rms_norm(x, w[4]))
    return x + leave(mlp(n, *w[5:8]))


def layer_norm(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
    x = x + (reduced(F.gelu(F.layer_norm(x, (H,), w[0], w[1]) @ up) @ down) + w[2])
    return F.layer_norm(x, (H,), w[3], w[4]) @ up


def positions(ids: torch.Tensor, table: torch.Tensor, places: torch.Tensor, w: torch.Tensor, up: torch.Tensor) -> Any:
    """Learned position embeddings, one for each place of a sequence."""
    x = reduced(F.embedding(ids, table)) + places[: ids.shape[1]]
    return rms_norm(x, w) @ up


def post_norm(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
    """Gemma2 and Olmo2: the result of a layer is normalised before it is added."""
    x = x + rms_norm(reduced(F.gelu(x @ up) @ down), w[0])
    return x + rms_norm(reduced(F.gelu(rms_norm(x, w[1]) @ up) @ down), w[2])


def parallel(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
    """Cohere: attention and MLP read one norm. Their results are added to the residual one after the other."""
    n = rms_norm(x, w[0])
    x = x + reduced(attention(n, *w[1:5])) + reduced(mlp(n, *w[5:8]))
    return rms_norm(x, w[8]) @ w[9]


def parallel_summed(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
    """Phi: the results of attention and MLP are added to each other. Then their sum is added to the residual."""
    n = rms_norm(x, w[0])
    x = (reduced(attention(n, *w[1:5])) + reduced(mlp(n, *w[5:8]))) + x
    return rms_norm(x, w[8]) @ w[9]


def router(x: torch.Tensor, w: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A mixture of experts. All ranks hold the whole weight of the router."""
    x = x + reduced(x @ up[0] @ down[0])
    n = rms_norm(x, w)
    shares = (n @ gate).float().softmax(-1).to(x.dtype)
    parts = [(n @ up[i] @ down[i]) * shares[..., i : i + 1] for i in range(2)]
    return x + reduced(parts[0] + parts[1])


def one_layer(x: torch.Tensor, first: torch.Tensor, w: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    x = x + reduced(x @ first)
    return x + reduced(F.relu(rms_norm(x, w) @ up) @ down)


def quantised(x: torch.Tensor, first: torch.Tensor, w: torch.Tensor, up: torch.Tensor, scale: torch.Tensor) -> Any:
    """The activations are quantised to fp8 with one scale for all tokens."""
    x = x + reduced(x @ first)
    n = rms_norm(x, w)
    largest = (n.abs().amax().float() / 448.0).clamp(min=1e-12)
    narrow = (n.float() / largest).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).flatten(0, 1)
    return x, torch._scaled_mm(narrow, up.t(), largest, scale, out_dtype=x.dtype)


def dropout(x: torch.Tensor, first: torch.Tensor, w: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    x = x + F.dropout(reduced(x @ first), 0.1, training=True)
    return rms_norm(x, w) @ up


def _floats(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype) for shape in shapes)


_UP, _DOWN = (H, OWN), (OWN, H)
_ATTENTION, _MLP = (_UP, _UP, _UP, _DOWN), (_UP, _UP, _DOWN)
_LAYER = ((H, H), (H,), _UP, _DOWN)


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.int64)


def _fp8(world_size: int) -> tuple[torch.Tensor, ...]:
    wide = _floats((1, 16 * world_size, H), (H, H), (H,), dtype=torch.bfloat16)
    return *wide, torch.empty(OWN * 2, H, dtype=torch.float8_e4m3fn), torch.empty(())


BLOCKS: dict[str, tuple[Callable[..., Any], Make]] = {
    "llama": (
        llama,
        lambda n: (_ids(1, 4 * n), *_floats((VOCABULARY, H), (H,), *_ATTENTION, (H,), *_MLP, (H,), (H, VOCABULARY))),
    ),
    "llama trained": (llama_trained, lambda n: _floats((1, 4 * n, H), (H,), *_MLP, (H,), *_MLP)),
    "layer norm": (layer_norm, lambda n: _floats((2, 2 * n, H), _UP, _DOWN, (H,), (H,), (H,), (H,), (H,))),
    "positions": (positions, lambda n: (_ids(2, 2 * n), *_floats((VOCABULARY, H), (8 * n, H), (H,), _UP))),
    "post norm": (post_norm, lambda n: _floats((1, 4 * n, H), _UP, _DOWN, (H,), (H,), (H,))),
    "parallel": (parallel, lambda n: _floats((1, 4 * n, H), (H,), *_ATTENTION, *_MLP, (H,), _UP)),
    "parallel summed": (parallel_summed, lambda n: _floats((1, 4 * n, H), (H,), *_ATTENTION, *_MLP, (H,), _UP)),
    "router": (router, lambda n: _floats((1, 4 * n, H), (H,), (H, 2), (2, *_UP), (2, *_DOWN))),
    "batch": (one_layer, lambda n: _floats((3, 2 * n, H), *_LAYER)),
    "two dims": (one_layer, lambda n: _floats((4 * n, H), *_LAYER)),
    "uneven": (one_layer, lambda n: _floats((1, 4 * n + 1, H), *_LAYER)),
    "dynamic": (one_layer, lambda n: _floats((4 * n, H), *_LAYER)),
    "dynamic odd": (one_layer, lambda n: _floats((4 * n + 1, H), *_LAYER)),
    "dynamic odd trained": (llama_trained, lambda n: _floats((4 * n + 1, H), (H,), *_MLP, (H,), *_MLP)),
    "bf16": (one_layer, lambda n: _floats((1, 4 * n, H), *_LAYER, dtype=torch.bfloat16)),
    "fp8": (quantised, _fp8),
    "dropout": (dropout, lambda n: _floats((1, 4 * n, H), (H, H), (H,), _UP)),
    "few tokens": (one_layer, lambda n: _floats((1, 1, H), *_LAYER)),
}


def file_of(name: str) -> str:
    return f"sequence/{name.replace(' ', '_')}.txt"
