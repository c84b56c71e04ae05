# SPDX-License-Identifier: Apache-2.0
"""Decide whether a graph keeps its GPU busy. It does if the GPU needs longer to run the graph than the host needs to
launch the graph.

If the host is slower, the GPU waits for it after every op, and hiding a transfer saves nothing. Overlap can then cost
time. On 4 H200s, two layers of Llama-70B with overlap ran 0.73 to 0.85 times as fast as plain at 1024 tokens. At 4096
tokens, they ran 1.06 to 1.12 times as fast as plain. Estimates::

    GPU   the computation (matmuls, attentions and other ops whose FLOPs torch can count; grouped matmuls; lookups)
          + the collectives, one after the other
    host  ``launch_seconds`` for each of these ops, and for each site of grouped matmuls or of lookups
          + ``call_seconds`` for each collective

If Inductor captures the graph as a CUDA graph, the host needs ``graph_seconds`` for a call. If this is longer than
the GPU's time, ``auto`` uses no schedule, not even ``small_message``. Before each call, the ranks' hosts wait for
each other (``runtime.agreement``). This costs time only if the hosts do not run ahead of their GPUs. On 4 H200s, two
layers of Llama-70B decoded one token 0.73 to 0.85 times as fast with ``small_message`` as without. Eight layers were
1.12 times as fast. Without the wait, two layers were 0.89 times as fast.

The forward and the backward of a joint graph have estimates of their own. A graph with symbolic sizes serves many
token counts. The GPU's time grows with the count, the host's time does not. So there is a count from which on the host
is not the limit (``HostLimit.count``). ``passes.host_guard`` gives the smaller counts a graph of their own. The times
are not compared if

- an estimate covers only one collective, and the graph is not captured. Schedule ``chunked`` itself compares the
  GPU's time for the site with the host's time to launch the site (``chunked/cost.py``);
- a size depends on data;
- the FLOPs of an op cannot be counted (``sites/flops.py``).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.machine import Machine
from overlap_inductor.passes.find import SiteFinder
from overlap_inductor.report.words import microseconds
from overlap_inductor.sites import flops
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import sizes
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.torch_compat.cuda_graphs import captured_by_inductor
from overlap_inductor.torch_compat.guards import surely

MARGIN = 2.2
"""Unless a CUDA graph is captured, sites are overlapped only if the GPU is estimated to need at least this many times
the estimated host time. The slowest host sets the time of each call. Two layers of Llama-70B, rewritten for sequence
parallelism, had 2048 tokens on 4 H200s. The GPU's estimate was 2.1 times the host's. Hosts needed 2.0 to 2.6 times
their estimate. The layers ran 0.89 to 0.99 times as fast as plain ones."""


@dataclass
class _Launched:
    """What a graph launches. ``multiplied``: matmuls, attentions, and other ops whose FLOPs torch can count.
    ``others``: sites of grouped matmuls and of lookups. ``tokens``: the symbolic numbers of tokens of all sites."""

    multiplied: list[fx.Node]
    others: list[OverlapSite]
    collectives: list[CollectiveNode]
    tokens: list[torch.SymInt]


@dataclass(frozen=True)
class HostLimit:
    """The sizes at which the host limits a graph.

    Attributes:
        reason: why the sites are left as written at these sizes.
        size: a symbolic size of the graph; ``None`` if there is none.
        count: a power of two. If ``size`` is at least ``count``, the host is not the limit. ``None``: no such number is
            known. If the graph has one symbolic size, it does not depend on the example, so that ranks agree.
    """

    reason: Reason
    size: torch.SymInt | None = None
    count: int | None = None

    def fewest(self, tokens: Size) -> int | None:
        """The number of a site's ``tokens`` from which on the host is not the limit. 0 if the host is not the limit at
        any size that the graph serves; ``None`` if no such number is known."""
        if self.size is None or self.count is None:
            return None
        if surely(self.size >= self.count):
            return 0
        if isinstance(tokens, int) or surely(self.size < self.count):
            return None
        return math.ceil(sizes.hint(tokens) * self.count / sizes.hint(self.size))


def limits(found: SiteFinder, config: OverlapConfig, by_example: bool = False) -> dict[fx.Node, HostLimit]:
    """``{node of a collective: the sizes at which its site is left as written with schedule=auto}``. If the host limits
    the forward at some size, all collectives of the forward are in the result; likewise for the backward.

    Args:
        by_example: whether only the sizes that ``sizes.hint`` returns count. If not, a graph with symbolic sizes is
            estimated for other sizes too.
    """
    multiplied = [n for n in found.graph.nodes if flops.is_counted(n)]
    others = [s for s in found.sites if not any(flops.is_counted(m.node) for m in s.matmuls)]
    collectives = [c for _, _, c in found.collectives.values() if isinstance(c, CollectiveNode)]
    result: dict[fx.Node, HostLimit] = {}
    later = _backward_of_joint(found)
    for backward in (False, True):
        part = _Launched(
            [n for n in multiplied if (n in later) is backward],
            [s for s in others if (s.collectives[0].node in later) is backward],
            [c for c in collectives if (c.node in later) is backward],
            [
                s.nodes.tokens
                for s in found.sites
                if (s.collectives[0].node in later) is backward and isinstance(s.nodes.tokens, torch.SymInt)
            ],
        )
        if (limit := _limit(part, config, by_example)) is not None:
            result.update({c.node: limit for c in part.collectives})
    return result


def _backward_of_joint(found: SiteFinder) -> Collection[fx.Node]:
    """The nodes of a joint graph that depend on a tangent: the partitioner puts them into the backward graph."""
    later: set[fx.Node] = set()
    if found.phase == "forward":
        for node in found.graph.nodes:
            tangent = node.op == "placeholder" and node.name.startswith("tangents")
            if tangent or not later.isdisjoint(node.all_input_nodes):
                later.add(node)
    return later


def _limit(part: _Launched, config: OverlapConfig, by_example: bool) -> HostLimit | None:
    """The sizes at which hiding the transfers of ``part`` saves no time, or ``None``. Powers of two are tried for the
    largest symbolic number of tokens, beyond ``config.max_tokens`` and the example. Other symbolic sizes are scaled
    with it."""
    symbolic = part.tokens or [s for c in part.collectives for s in _shape_of(c) if isinstance(s, torch.SymInt)]
    if by_example or not symbolic or any(map(tools.has_unbacked, [symbolic, *map(_shape_of, part.collectives)])):
        reason = _reason(part, config)
        return None if reason is None else HostLimit(reason)
    size = max(symbolic, key=sizes.hint)
    example = sizes.hint(size)

    def reason_at(count: int) -> Reason | None:
        with sizes.at_scale(count / example):
            return _reason(part, config)

    counts = [2**exponent for exponent in range(max(config.max_tokens, example).bit_length() + 1)]
    free = bisect.bisect_left(counts, True, key=lambda count: reason_at(count) is None)
    if free == 0:
        return None
    limited = reason_at(counts[free - 1])
    assert limited is not None
    text = f"if the dynamic size {tools.size_text(size)} is {counts[free - 1]}, {limited.text}"
    return HostLimit(Reason(limited.code, text), size, counts[free] if free < len(counts) else None)


def _shape_of(collective: CollectiveNode) -> list[Size]:
    return tools.shape(collective.input)


def _reason(part: _Launched, config: OverlapConfig) -> Reason | None:
    """Why hiding the transfers of ``part`` saves no time at the sizes that ``sizes.hint`` returns. ``None`` if it may
    save time, or if the times are not compared."""
    captured = captured_by_inductor()
    if len(part.collectives) < (1 if captured else 2):
        return None
    machines = [sizes.machine_at(c, config) for c in part.collectives]
    launches = len(part.multiplied) + len(part.others)
    launching = launches * machines[0].launch_seconds + sum(m.call_seconds for m in machines)
    host, margin = (machines[0].graph_seconds, 1) if captured else (launching, MARGIN)
    if not host or any(map(tools.has_unbacked, map(_shape_of, part.collectives))):
        return None
    gpu = 0.0
    for node in part.multiplied:
        if (seconds := _seconds(node, machines[0])) is None:
            return None
        gpu += seconds
    gpu += sum(_seconds_of_site(s, machines[0]) for s in part.others)
    for collective, machine in zip(part.collectives, machines, strict=True):
        gpu += cost_model.collective_seconds(sizes.moved_by(collective), machine)
    if gpu >= margin * host:
        return None
    if captured:
        return Reason(
            "host_bound",
            f"the GPU is estimated to need {microseconds(gpu * 1e6)} for the graph, and the host"
            f" {microseconds(host * 1e6)} to replay it as a CUDA graph. Before each call, the hosts of the ranks wait"
            " for each other, which costs time if the GPU is faster than the host",
        )
    return Reason(
        "host_bound",
        f"the GPU is estimated to need {microseconds(gpu * 1e6)} for the graph, and the host {microseconds(host * 1e6)}"
        f" to launch it ({launches} matmuls or other ops, {len(part.collectives)} collectives). Hiding transfers"
        f" saves time only if the GPU needs {MARGIN} times as long as the host",
    )


def _seconds(node: fx.Node, machine: Machine) -> float | None:
    """Seconds to compute a matmul or an attention, or to read its inputs if that is longer. ``None`` if its FLOPs
    cannot be counted."""
    counted, first = flops.flops(node), next(tools.tensor_inputs(node), None)
    if counted is None or first is None:
        return None
    rate = machine.matmul_flops.get(tools.dtype(first).itemsize, min(machine.matmul_flops.values()))
    return max(counted / rate, flops.bytes_read(node) / machine.memory_bytes)


def _seconds_of_site(site: OverlapSite, machine: Machine) -> float:
    """Seconds of grouped matmuls or of lookups, whose FLOPs PyTorch does not count."""
    return cost_model.written_seconds(sizes.sizes_at(site), machine) if sizes.has_example(site) else 0.0
