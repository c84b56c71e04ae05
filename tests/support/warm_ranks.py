# SPDX-License-Identifier: Apache-2.0
"""Does the one-time work of a first compile. The process from which ranks are forked imports this module before
it forks, so the ranks do not repeat this work.

With a torch that was built for CUDA or ROCm, a backward would start a thread for each device, and no process could be
forked. So with such a torch, only forwards run. With any other torch, backwards run, too.
"""

from __future__ import annotations

import torch
import tqdm

import overlap_inductor.runtime.agreement  # noqa: F401
import tests.support.with_and_without  # noqa: F401
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report import publish
from overlap_inductor.torch_compat.functional_collectives import all_gather
from tests.support.cheap_compiles import compile_cheaply
from tests.support.cheap_tracing import hash_torch
from tests.support.cheap_tracing import trace_cheaply
from tests.support.fake_group import fake_group
from tests.support.interpreted import interpreted


def compile_once() -> None:
    """Compile and run two functions: one with a site, in a fake group, and one without a collective, by plain Inductor.
    Then clear counters and reports."""
    # This process must start no threads. A fork would not have them, but would wait for them.
    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0
    # With a graph from a cache, the one-time work would not be done.
    caches_off = (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    with fake_group(2) as group, caches_off[0], caches_off[1]:
        backend = interpreted(OverlapConfig(schedule="ring"), [])

        def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (all_gather(x.detach(), 1, group) @ w.repeat(2, 1) + x @ w).relu()

        trains = not torch.backends.cuda.is_built()
        for compiled in (torch.compile(layer, backend=backend), torch.compile(lambda x, w: (x @ w).relu() * 2)):
            total = compiled(torch.randn(4, 4, requires_grad=trains), torch.randn(4, 4)).sum()
            if trains:
                total.backward()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    publish.forget_reports()


hash_torch()
trace_cheaply()
compile_once()
compile_cheaply()
