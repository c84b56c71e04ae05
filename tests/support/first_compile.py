# SPDX-License-Identifier: Apache-2.0
"""Does the one-time work of a first compile in the process that imports this module. The package is not imported."""

from __future__ import annotations

import torch
import torch._inductor.compile_fx
import torch.distributed._functional_collectives
import torch.testing._internal.distributed.fake_pg
import tqdm

from tests.support.cheap_compiles import compile_cheaply
from tests.support.cheap_tracing import hash_torch
from tests.support.cheap_tracing import trace_cheaply


def compile_once() -> None:
    """Compile a graph for which Inductor generates no kernel, and forget the graph."""
    # This process must start no threads. A fork would not have them, but would wait for them.
    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0
    # With a graph from a cache, the one-time work would not be done.
    caches_off = (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    with caches_off[0], caches_off[1]:
        torch.compile(lambda x: x @ x)(torch.ones(2, 2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


hash_torch()
trace_cheaply()
compile_once()
compile_cheaply()
