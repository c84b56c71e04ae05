# SPDX-License-Identifier: Apache-2.0
"""Matmuls beside all-to-alls of uneven parts.

With ``by_counts``, as in torchtitan's token dispatcher, the ranks first exchange the sizes of the parts. So the sizes
are unbacked symbols in the graph.

A layer is a function of ``(exchange, x [t, k], w [k, n], v [n, k], bias [n])``. ``exchange(x)`` is the all-to-all;
``exchange(x, back=True)`` returns the parts to the ranks that sent them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

Exchange = Callable[..., torch.Tensor]


def by_counts(counts: torch.Tensor) -> Exchange:
    """An exchange that sends ``counts[r]`` rows to rank r. The ranks exchange the counts first. Tracing needs
    ``capture_scalar_outputs``."""
    arriving = funcol.wait_tensor(funcol.all_to_all_single(counts, None, None, dist.group.WORLD))
    return by_sizes(counts.tolist(), arriving.tolist())


def by_sizes(sent: list[int], received: list[int]) -> Exchange:
    def exchange(x: torch.Tensor, back: bool = False) -> torch.Tensor:
        out, into = (sent, received) if back else (received, sent)
        return funcol.all_to_all_single_autograd(x, out, into, dist.group.WORLD)

    return exchange


LAYERS: dict[str, Callable[..., torch.Tensor]] = {
    "sent": lambda exchange, x, w, v, bias: exchange(x @ w),
    "sent addmm": lambda exchange, x, w, v, bias: exchange(torch.addmm(bias, x, w)),
    "sent sum": lambda exchange, x, w, v, bias: exchange(x @ w + x.relu() @ (v.t() * 2)),
    "received": lambda exchange, x, w, v, bias: exchange(x) @ w,
    "received addmm": lambda exchange, x, w, v, bias: torch.addmm(bias, exchange(x), w),
    "received twice": lambda exchange, x, w, v, bias: (lambda y: y @ w + (y @ v.t()).relu())(exchange(x)),
    "there and back": lambda exchange, x, w, v, bias: exchange(F.silu(exchange(x) @ w) @ v, back=True),
    "activated": lambda exchange, x, w, v, bias: exchange(F.silu(x @ w)) @ v,
}


def layer(name: str, counts: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """The result of layer ``name``. ``counts``: the tensor for ``by_counts``, or the lists ``(sent, received)`` for
    ``by_sizes``."""
    exchange = by_counts(counts) if isinstance(counts, torch.Tensor) else by_sizes(*counts)
    return LAYERS[name](exchange, *inputs)
