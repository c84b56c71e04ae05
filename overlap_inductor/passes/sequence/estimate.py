# SPDX-License-Identifier: Apache-2.0
"""Estimate the time of a stretch as written and as rewritten, each with the plan that the overlap pass would choose.

The rewrite replaces one collective by two, so it pays only if the overlap pass hides them. For each stretch, as written
and as rewritten (W ranks)::

    exposed = sum(time of an overlapped site - time of its matmuls) + sum(time of any other collective)
    time    = matmuls + exposed + token-wise work           # rewritten: 1/W of this work
    pays    = time as written  >  margin * time as rewritten
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.passes.choose import Choice
from overlap_inductor.passes.choose import find_and_choose
from overlap_inductor.passes.sequence.find import Stretch
from overlap_inductor.passes.sequence.seams.join import join
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import sizes
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.torch_compat.target import on_gpu

MARGIN = 1.02
"""With ``sequence_parallel=auto``, the estimated time as written must be more than this many times the time as
rewritten."""
MARGIN_OF_TRAINING = 1.0
"""Takes the place of ``MARGIN`` in training on CPUs. There, rewritten steps of DTensor blocks were 1.08 and 1.15 times
as fast as steps with all-reduces (2 and 4 gloo ranks, bench/results/layers_slow_link.jsonl). The estimates were 1.006
and 1.009."""
PASSES = 4
"""How many times token-wise work reads or writes a tensor of the all-reduce's size: the residual twice, the
all-reduce's result and the norm's result once each. Inductor fuses the rest."""


@dataclass
class Cost:
    """Seconds of one stretch. ``hidden_gathers``: number of its all-gathers that are overlapped."""

    matmuls: float = 0.0
    exposed: float = 0.0
    row_work: float = 0.0
    hidden_gathers: int = 0

    @property
    def behind(self) -> float:
        return self.exposed + self.row_work


def plan(graph: fx.Graph, config: OverlapConfig, refusal: str | None) -> Choice:
    """The sites of ``graph``, with the plans that the overlap pass would choose. ``graph`` must be a copy, because
    the search may change it."""
    choice = find_and_choose(graph, config, "forward", refusal, {}, by_example=True)
    join(choice.chosen, config)
    return choice


def costs(
    choice: Choice, stretch_of: Mapping[fx.Node, int], numbers: Iterable[int], config: OverlapConfig
) -> dict[int, Cost]:
    """The time of each stretch with the plans in ``choice``, without the token-wise work (``row_work``).

    Args:
        stretch_of: for the node of each collective, the number of its stretch.
        numbers: the numbers of all stretches.
    """
    found = {number: Cost() for number in numbers}
    taken: set[fx.Node] = set()
    for site in choice.sites:
        nodes = [c.node for c in site.collectives]
        owner = stretch_of.get(nodes[0])
        matmuls = cost_model.written_seconds(sizes.sizes_at(site), sizes.machine_of(site, config))
        taken.update(nodes)
        if owner is not None:
            found[owner].matmuls += matmuls
            found[owner].exposed += max(_seconds(site, matmuls, config) - matmuls, 0.0)
            overlaps = site.decision.moving.schedule != "keep"
            found[owner].hidden_gathers += site.collectives[0].kind == "all_gather" and overlaps
    for node, _, collective in choice.found.collectives.values():
        owner = stretch_of.get(node)
        if node not in taken and owner is not None and isinstance(collective, CollectiveNode):
            found[owner].exposed += collective_seconds(collective, config)
    return found


def collective_seconds(collective: CollectiveNode, config: OverlapConfig) -> float:
    """Estimated seconds of a collective that is wholly exposed."""
    return cost_model.collective_seconds(sizes.moved_by(collective), sizes.machine_at(collective, config))


def row_work(stretch: Stretch, ranks: int, config: OverlapConfig) -> float:
    """Estimated seconds of the token-wise work if ``ranks`` ranks divide it."""
    seconds = 0.0
    for source in stretch.sources:
        nbytes = sizes.hint(tools.numel(tools.shape(source.result))) * tools.dtype(source.result).itemsize
        seconds += PASSES * nbytes / ranks / sizes.machine_at(source.collectives[0], config).memory_bytes
    return seconds


def least_seconds(stretch: Stretch, config: OverlapConfig) -> float:
    """The fixed costs of the collectives that the rewrite writes. No overlap hides them."""
    fixed = sizes.machine_at(stretch.sources[0].collectives[0], config).collective_seconds
    return fixed * (len(stretch.sources) + len(stretch.needs_whole))


def may_pay(stretch: Stretch, factor: float, config: OverlapConfig) -> bool:
    """Whether the all-reduces take longer than ``least_seconds``, at ``factor`` times the example's tokens."""
    with sizes.at_scale(factor):
        written = sum(collective_seconds(c, config) for s in stretch.sources for c in s.collectives)
        return written > least_seconds(stretch, config)


def margin_of(stretch: Stretch, trains: bool) -> float:
    """How many times as fast the rewritten stretch must be. ``trains``: the graph has a backward."""
    device = tools.value(stretch.sources[0].result).device
    return MARGIN_OF_TRAINING if trains and not on_gpu(device) else MARGIN


def pays(written: Cost, rewritten: Cost, margin: float = MARGIN) -> bool:
    """Whether the rewritten stretch is estimated to be more than ``margin`` times as fast. If no gather is overlapped,
    the rewrite does not pay: it moves as many bytes as the all-reduces do, with more collectives."""
    if not rewritten.hidden_gathers:
        return False
    matmuls = max(written.matmuls, rewritten.matmuls)
    return matmuls + written.behind > margin * (matmuls + rewritten.behind)


def crossover(count: int, world_size: int, pays_at: Callable[[float], bool]) -> int | None:
    """A number of tokens from which on the rewrite is taken to pay, or ``None`` if it does not pay for ``count``
    tokens. ``count`` is halved while the half is at least ``world_size`` and the rewrite pays for it.
    ``pays_at(factor)``: whether the rewrite pays for ``count * factor`` tokens."""
    if not pays_at(1.0):
        return None
    factor = 1.0
    while count * factor / 2 >= world_size and pays_at(factor / 2):
        factor /= 2
    return max(int(count * factor), world_size)


def limit_of_keeping(count: int, pays_at: Callable[[float], bool], most: int = 1 << 20) -> int | None:
    """The first of ``2 * count``, ``4 * count``, ... up to ``most`` at which the rewrite pays, or ``None``."""
    factor = 2.0
    while count * factor <= most:
        if pays_at(factor):
            return int(count * factor)
        factor *= 2
    return None


def _seconds(site: DecidedSite, matmuls: float, config: OverlapConfig) -> float:
    """Estimated seconds of a site with its plan."""
    moving = site.decision.moving
    if site.decision.plan and moving.schedule in moving.estimate_us and moving.schedule != "keep":
        return moving.estimate_us[moving.schedule] * 1e-6
    return matmuls + cost_model.collective_seconds(sizes.sizes_at(site), sizes.machine_of(site, config))
