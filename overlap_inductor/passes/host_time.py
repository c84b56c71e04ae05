# SPDX-License-Identifier: Apache-2.0
"""Decide whether a graph keeps its GPU busy: whether the GPU needs longer to run it than the host needs to launch it.

If the host is slower, a GPU waits for its host after every op, and hiding a transfer saves nothing. Overlap can then
even cost time. The hosts of a group compare their plans before each call, so each call waits for the slowest of them.
And the sequence-parallel rewrite replaces one collective by two, so the host must launch more collectives. On 4 H200s,
two layers of Llama-70B ran 0.73 to 0.99 times as fast with overlap at 1024 tokens, and 1.12 times as fast at 4096.

Both times are estimates::

    GPU   all matmuls, attentions and sites of lookups + all collectives, one after the other
    host  ``launch_seconds`` for each matmul, attention and site of lookups + ``call_seconds`` for each collective

The two times are not compared in three cases:

- Inductor captures the graph as a CUDA graph, which is one launch.
- The graph has only one collective. Then the schedules' own estimates allow for the host time
  (``chunked/cost.py``). Rows that ``bench.operators`` measured with the host in the loop agree with these estimates.
- A size is known only at run time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.machine import Machine
from overlap_inductor.passes.find import SiteFinder
from overlap_inductor.report.words import microseconds
from overlap_inductor.sites import sizes
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.torch_compat.cuda_graphs import captured_by_inductor

MARGIN = 2.0
"""The GPU must need this many times the estimated host time, because the slowest host sets the time of each call. On
the slowest of four machines with 4 H200s, two layers as written took 2.1 times their estimated host time. The same
layers as rewritten took twice their estimate."""


def limits(found: SiteFinder, config: OverlapConfig) -> Reason | None:
    """Why the sites of a graph are left as written with ``schedule=auto``: the host limits the graph. ``None`` if it
    does not, or if that is not known."""
    collectives = [c for _, _, c in found.collectives.values() if isinstance(c, CollectiveNode)]
    if len(collectives) < 2 or captured_by_inductor():
        return None
    machine = sizes.machine_at(collectives[0], config)
    multiplied = [n for n in found.graph.nodes if _flops_of(n.target) is not None]
    others = [s for s in found.sites if not any(_flops_of(m.node.target) for m in s.matmuls)]
    host = (len(multiplied) + len(others)) * machine.launch_seconds + len(collectives) * machine.call_seconds
    if not host or any(map(_is_dynamic, [*multiplied, *(c.input for c in collectives)])):
        return None
    gpu = sum(_seconds(n, machine) for n in multiplied) + sum(_seconds_of_site(s, machine) for s in others)
    gpu += sum(cost_model.collective_seconds(sizes.moved_by(c), machine) for c in collectives)
    if gpu >= MARGIN * host:
        return None
    return Reason(
        "host_bound",
        f"the GPU is estimated to need {microseconds(gpu * 1e6)} for the graph, and the host {microseconds(host * 1e6)}"
        f" to launch it ({len(multiplied) + len(others)} matmuls, {len(collectives)} collectives). Hiding transfers"
        f" saves time only if the GPU needs {MARGIN} times as long as the host",
    )


def _flops_of(target: Any) -> Any:
    """The function that counts the FLOPs of a matmul or an attention; ``None`` for other ops."""
    return flop_registry.get(getattr(target, "overloadpacket", None))


def _is_dynamic(node: fx.Node) -> bool:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return any(not isinstance(s, int) for v in values if isinstance(v, torch.Tensor) for s in v.shape)


def _seconds(node: fx.Node, machine: Machine) -> float:
    """Seconds of a matmul or an attention: its FLOPs, or the bytes of its inputs if reading them takes longer."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    flops = _flops_of(node.target)(*args, **kwargs, out_val=node.meta["val"])
    read = [v for n in node.all_input_nodes if isinstance(v := n.meta["val"], torch.Tensor)]
    itemsize = read[0].dtype.itemsize
    nbytes = sum(v.numel() * v.dtype.itemsize for v in read)
    return max(
        flops / machine.matmul_flops.get(itemsize, min(machine.matmul_flops.values())), nbytes / machine.memory_bytes
    )


def _seconds_of_site(site: OverlapSite, machine: Machine) -> float:
    """Seconds of grouped matmuls or of lookups, whose FLOPs PyTorch does not count."""
    return cost_model.written_seconds(sizes.sizes_at(site), machine) if sizes.has_example(site) else 0.0
