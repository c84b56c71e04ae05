# SPDX-License-Identifier: Apache-2.0
"""The part of ``check_fused`` that times the projections before and after Ulysses attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import overlap_inductor
from tests.gpu.fused_epilogues import half
from tests.gpu.fused_epilogues import medians
from tests.support.ulysses import to_heads
from tests.support.ulysses import to_tokens

HEAD = 128


def _to_heads(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return to_heads(F.linear(x, a).unflatten(-1, (-1, HEAD)), dist.group.WORLD)


def _from_heads(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return F.linear(to_tokens(x, dist.group.WORLD).flatten(2, 3), a)


def _compiled(function: Callable[..., Any], **switches: Any) -> Callable[..., Any]:
    """Compile ``function`` with these switches. A new code object calls the function. So two compiled functions share
    no entry of Dynamo's cache."""
    namespace = {"function": function}
    exec("def overlapped(*args): return function(*args)", namespace)
    made = torch.compile(namespace["overlapped"], dynamic=False)

    def call(*args: Any) -> Any:
        with overlap_inductor.overlap(**switches):
            return made(*args)

    return call


WAYS: dict[str, dict[str, Any]] = {
    "keep": {"mode": "off"},
    "fused": {"schedule": "fused", "mode": "strict"},
    "fused/sm_push": {"schedule": "fused", "transport": "sm_push", "mode": "strict"},
    "chunked": {"schedule": "chunked", "mode": "strict"},
    "ring": {"schedule": "ring", "mode": "strict"},
}


def exchange_times(world_size: int) -> dict[str, dict[str, float]]:
    """Microseconds (medians on this rank) of a projection with its exchange, for each of ``WAYS``.

    ``matmul`` and ``exchange`` time the two parts alone. ``exchange`` leaves out the permutation of the sent parts.
    Every result must agree with ``keep``. A key of the result, such as ``to heads 8192 4096``, has the direction, the
    number of tokens of all ranks, and the hidden size.
    """
    found = {}
    for hidden in (4096, 8192):
        for tokens in (8192, 16384):
            own, heads = tokens // world_size, hidden // HEAD
            weight = half(hidden, hidden, scale=hidden**-0.5)
            rows = half(own, hidden)
            cases = {
                "to heads": (_to_heads, half(1, own, hidden)),
                "from heads": (_from_heads, half(1, tokens, heads // world_size, HEAD)),
            }
            for name, (function, x) in cases.items():
                torch._dynamo.reset()
                calls = {
                    way: functools.partial(_compiled(function, **switches), x, weight) for way, switches in WAYS.items()
                }
                expected = calls["keep"]().float()
                for way, call in calls.items():
                    assert (call().float() - expected).abs().max() < 2e-2 * expected.abs().max(), f"{name} {way}"
                calls["matmul"] = functools.partial(F.linear, rows, weight)
                calls["exchange"] = functools.partial(dist.all_to_all_single, torch.empty_like(rows), rows)
                found[f"{name} {tokens} {hidden}"] = medians(calls)
    return found
