# SPDX-License-Identifier: Apache-2.0
"""Estimate how long a seam takes as two rings, one after the other, and how long it takes in bands.

Two clocks, of the matmuls and of the link, step through the sends, matmuls and waits of both sites. The link carries
one piece at a time. Of the token-wise work, only launches and copies that bands add are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.facts.machine import Machine
from overlap_inductor.lowerings.ring.cost import again_seconds
from overlap_inductor.lowerings.ring.unrolled_bands import gather_groups
from overlap_inductor.lowerings.ring.unrolled_bands import scatter_groups
from overlap_inductor.passes.sequence.seams.find import Seam
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.nodes import nodes_of
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.sizes import hint
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import sizes_at
from overlap_inductor.torch_compat import operators

MARGIN = 1.05
"""With schedule ``auto``, two rings must be estimated to take more than ``MARGIN`` times as long as bands. Else
the seam gets no bands."""
LAUNCHES = 2
"""Launches of token-wise kernels that each band but the first adds, each at the fixed cost of a hop. A residual and a
norm become about two kernels."""


@dataclass(frozen=True)
class Work:
    """Seconds of one site: its matmuls, the transfer of the bytes that a rank sends, and what each piece of the matmuls
    adds (``again``)."""

    matmul: float
    wire: float
    again: float = 0.0


@dataclass(frozen=True)
class Saved:
    """The estimates for a seam in bands.

    Attributes:
        pays: whether two rings take more than ``MARGIN`` times as long.
        total: seconds of both sites in bands.
        scatter, gather: seconds saved at each site; negative if bands cost time.
    """

    pays: bool
    total: float
    scatter: float
    gather: float


class Clocks:
    """``compute``: when the matmuls so far end. ``link``: when the sends so far end. ``waited``: for each site, how
    long the matmuls waited."""

    def __init__(self) -> None:
        self.compute = self.link = 0.0
        self.waited = [0.0, 0.0]

    def multiply(self, work: Work, pieces: float) -> None:
        """Multiply one piece, which is 1 / ``pieces`` of the matmuls."""
        self.compute += work.matmul / pieces + work.again

    def send(self, seconds: float) -> float:
        """The time at which the piece arrives. All ranks send at once, so receiving takes as long as sending."""
        self.link = max(self.link, self.compute) + seconds
        return self.link

    def wait(self, site: int, arrival: float) -> None:
        self.waited[site] += max(arrival - self.compute, 0.0)
        self.compute = max(self.compute, arrival)


def in_turn(scatter: Work, gather: Work, world_size: int, parts: Sequence[int]) -> Clocks:
    """The clocks after both sites, if the gather starts after the whole scatter. ``parts``: for the scatter and the
    gather, into how many sub-chunks a shard is cut."""
    clocks, (sent, received) = Clocks(), [(world_size - 1) * n for n in parts]
    arrivals = []
    for _ in range(sent):
        clocks.multiply(scatter, world_size * parts[0])
        arrivals.append(clocks.send(scatter.wire / sent))
    clocks.multiply(scatter, world_size)
    clocks.wait(0, arrivals[-1])
    arrivals = [clocks.send(gather.wire / received) for _ in range(received)]
    clocks.multiply(gather, world_size)
    for arrival in arrivals:
        clocks.wait(1, arrival)
        clocks.multiply(gather, world_size * parts[1])
    return clocks


def in_bands(
    scatter: Work,
    gather: Work,
    world_size: int,
    bands: int,
    groups: Sequence[int] = (),
    received: Sequence[int] = (),
) -> Clocks:
    """The clocks after both sites, if each band is gathered when it has arrived (``lowerings.ring.unrolled_bands``).

    Args:
        groups: how many ranks' rows each matmul of a band computes before they are sent; empty: one rank's rows.
        received: the same for the rows that were gathered; empty: one matmul computes the rows of all other ranks.
    """
    clocks, scattered = Clocks(), []
    for _ in range(bands):
        for ranks in groups or [1] * (world_size - 1):
            clocks.multiply(scatter, world_size * bands / ranks)
            for _ in range(ranks):
                arrival = clocks.send(scatter.wire / (world_size - 1) / bands)
        scattered.append(arrival)
    clocks.multiply(scatter, world_size)
    gathered = []
    for arrival in scattered:
        clocks.wait(0, arrival)
        gathered.append(clocks.send(gather.wire / bands))
        clocks.multiply(gather, world_size * bands)
    for arrival in gathered:
        clocks.wait(1, arrival)
        for ranks in received or [world_size - 1]:
            clocks.multiply(gather, world_size * bands / ranks)
    return clocks


def saved(seam: Seam, bands: int, config: OverlapConfig) -> Saved:
    """What ``bands`` save, compared with the two sites one after the other."""
    sites = seam.scatter, seam.gather
    scatters, gathers = (_work(site, config) for site in sites)
    machine = machine_of(seam.gather, config)
    parts = [s.decision.moving.parameters["sub_chunks"] for s in sites]
    world_size = seam.scatter.facts.collective.world_size
    nodes = nodes_of(seam.scatter, ReduceNodes)
    rows = nodes.sharded.chunk // bands
    groups = [len(group) for group in scatter_groups(nodes, world_size, rows)]
    received = [len(group) for group in gather_groups(nodes_of(seam.gather, GatherNodes), world_size, rows)]
    turn = in_turn(scatters, gathers, world_size, parts)
    banded = in_bands(scatters, gathers, world_size, bands, groups, received)
    # ``hops``: the sends that bands add. The gather sends a band to all ranks in one step. Each band but the first also
    # adds a wait to the scatter, and a matmul of this rank's own rows to the gather.
    hops = (world_size - 1) * (bands - parts[0]), bands - (world_size - 1) * parts[1]
    steps = hops[0] + bands - 1, hops[1] + (1 + LAUNCHES) * (bands - 1)
    added = steps[0] * machine.step_seconds, steps[1] * machine.step_seconds + copy_seconds(seam, machine)
    scatter, gather = (b - a - more for b, a, more in zip(turn.waited, banded.waited, added, strict=True))
    total = banded.compute + sum(added)
    return Saved(turn.compute > MARGIN * total, total, scatter, gather)


def copy_seconds(seam: Seam, machine: Machine) -> float:
    """Seconds to join the bands of tensors that nodes outside the seam read (``Seam.joined``): one read and one write
    of each tensor."""
    tensors = operators.tensors_in([tools.value(n) for n in seam.joined])
    nbytes = sum(hint(tools.numel(list(t.shape))) * t.dtype.itemsize for t in tensors)
    return 2 * nbytes / machine.memory_bytes


def _work(site: DecidedSite, config: OverlapConfig) -> Work:
    sizes, machine = sizes_at(site), machine_of(site, config)
    matmul, again = cost_model.matmul_seconds(sizes, machine), again_seconds(sizes, machine)
    matmul, again = matmul / machine.overlapped_efficiency, again / machine.overlapped_efficiency
    return Work(matmul, sizes.bytes_sent / machine.link_bytes, again)
