# SPDX-License-Identifier: Apache-2.0
"""Estimate how long a seam takes as two rings, one after the other, and how long it takes in bands. Estimate how long a
chain of two seams takes.

Two clocks, of the matmuls and of the link, step through the sends, matmuls and waits of all sites. The link carries
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
from overlap_inductor.passes.sequence.seams.chains import Chain
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
CHAIN_MARGIN = 1.01
"""With schedule ``auto``, the two seams of a chain must be estimated to take more than ``CHAIN_MARGIN`` times as long
alone. It is smaller than ``MARGIN``, because a chain was 3 % faster although its estimate was equal (4 gloo ranks on
two cores)."""
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
    """The estimates for a seam in bands, or for a chain.

    Attributes:
        turn: seconds of the sites as rings, one after the other.
        total: seconds of the sites in bands.
        sites: seconds saved at each site; negative if bands cost time.
    """

    turn: float
    total: float
    sites: tuple[float, ...]

    @property
    def pays(self) -> bool:
        return self.turn > MARGIN * self.total


class Clocks:
    """``compute``: when the matmuls so far end. ``link``: when the sends so far end. ``waited``: for each site, how
    long the matmuls waited."""

    def __init__(self, sites: int = 2) -> None:
        self.compute = self.link = 0.0
        self.waited = [0.0] * sites

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
    clocks = Clocks()
    for arrival in _first_steps(clocks, scatter, gather, world_size, bands, groups):
        clocks.wait(1, arrival)
        for ranks in received or [world_size - 1]:
            clocks.multiply(gather, world_size * bands / ranks)
    return clocks


def in_chain(
    first: tuple[Work, Work],
    second: tuple[Work, Work],
    world_size: int,
    bands: int,
    groups: Sequence[int] = (),
    chained: Sequence[int] = (),
    received: Sequence[int] = (),
) -> Clocks:
    """The clocks after the four sites of a chain (``write_chain``). ``first``, ``second``: the scatter and the gather
    of each seam. ``groups``, ``received``: as for ``in_bands``. ``chained``: the same for the rows that the first seam
    gathers and the second seam scatters."""
    clocks = Clocks(4)
    arrivals = _first_steps(clocks, *first, world_size, bands, groups)
    clocks.multiply(second[0], world_size)
    scattered: list[float] = []
    gathered: list[float] = []

    def pass_on(band: int) -> None:
        clocks.wait(2, scattered[band])
        gathered.append(clocks.send(second[1].wire / bands))
        clocks.multiply(second[1], world_size * bands)

    for band, arrival in enumerate(arrivals):
        clocks.wait(1, arrival)
        for ranks in chained or [world_size - 1]:
            clocks.multiply(first[1], world_size * bands / ranks)
        scattered.append(_sent(clocks, second[0], world_size, bands, chained or [world_size - 1]))
        if band:
            pass_on(band - 1)
    for band in range(bands):
        if band == max(bands - 2, 0):
            pass_on(bands - 1)
        clocks.wait(3, gathered[band])
        for ranks in received or [world_size - 1]:
            clocks.multiply(second[1], world_size * bands / ranks)
    return clocks


def _sent(clocks: Clocks, scatter: Work, world_size: int, bands: int, groups: Sequence[int]) -> float:
    """Multiply and send one band of a scatter. Returns when the band has arrived."""
    arrival = 0.0
    for ranks in groups:
        clocks.multiply(scatter, world_size * bands / ranks)
        for _ in range(ranks):
            arrival = clocks.send(scatter.wire / (world_size - 1) / bands)
    return arrival


def _first_steps(
    clocks: Clocks, scatter: Work, gather: Work, world_size: int, bands: int, groups: Sequence[int]
) -> list[float]:
    """The scatter, the sends of the gather, and the matmuls of this rank's own rows. Returns when the gather's bands
    have arrived."""
    scattered = [_sent(clocks, scatter, world_size, bands, groups or [1] * (world_size - 1)) for _ in range(bands)]
    clocks.multiply(scatter, world_size)
    gathered = []
    for arrival in scattered:
        clocks.wait(0, arrival)
        gathered.append(clocks.send(gather.wire / bands))
        clocks.multiply(gather, world_size * bands)
    return gathered


def saved(seam: Seam, bands: int, config: OverlapConfig) -> Saved:
    """What ``bands`` save, compared with the two sites one after the other."""
    sites = seam.scatter, seam.gather
    scatters, gathers = _works(seam, config)
    machine = machine_of(seam.gather, config)
    parts = [s.decision.moving.parameters["sub_chunks"] for s in sites]
    world_size = seam.scatter.facts.collective.world_size
    groups, received = _groups(seam, bands)
    turn = in_turn(scatters, gathers, world_size, parts)
    banded = in_bands(scatters, gathers, world_size, bands, groups, received)
    # ``hops``: the sends that bands add. The gather sends a band to all ranks in one step. Each band but the first also
    # adds a wait to the scatter, and a matmul of this rank's own rows to the gather.
    hops = (world_size - 1) * (bands - parts[0]), bands - (world_size - 1) * parts[1]
    steps = hops[0] + bands - 1, hops[1] + (1 + LAUNCHES) * (bands - 1)
    added = steps[0] * machine.step_seconds, steps[1] * machine.step_seconds + copy_seconds(seam, machine)
    scatter, gather = (b - a - more for b, a, more in zip(turn.waited, banded.waited, added, strict=True))
    return Saved(turn.compute, banded.compute + sum(added), (scatter, gather))


def saved_by_chain(chain: Chain, seams: tuple[Saved, Saved], bands: int, config: OverlapConfig) -> Saved:
    """What a chain saves. ``seams``: what its two seams save alone, in as many bands. The chain adds the same steps."""
    world_size = chain.first.scatter.facts.collective.world_size
    first, second = (_works(seam, config) for seam in (chain.first, chain.second))
    (groups, chained), (later, received) = _groups(chain.first, bands), _groups(chain.second, bands)
    alone = in_bands(*first, world_size, bands, groups, chained), in_bands(*second, world_size, bands, later, received)
    clocks = in_chain(first, second, world_size, bands, groups, chained, received)
    less = sum(c.compute for c in alone) - clocks.compute
    before = zip((t for s in seams for t in s.sites), (w for c in alone for w in c.waited), strict=True)
    sites = tuple(saved + waited - now for (saved, waited), now in zip(before, clocks.waited, strict=True))
    return Saved(sum(s.turn for s in seams), sum(s.total for s in seams) - less, sites)


def _works(seam: Seam, config: OverlapConfig) -> tuple[Work, Work]:
    return _work(seam.scatter, config), _work(seam.gather, config)


def _groups(seam: Seam, bands: int) -> tuple[list[int], list[int]]:
    """For one band of the scatter and of the gather: how many ranks' rows each matmul multiplies."""
    nodes, world_size = nodes_of(seam.scatter, ReduceNodes), seam.scatter.facts.collective.world_size
    rows = nodes.sharded.chunk // bands
    received = gather_groups(nodes_of(seam.gather, GatherNodes), world_size, rows)
    return [len(g) for g in scatter_groups(nodes, world_size, rows)], [len(g) for g in received]


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
