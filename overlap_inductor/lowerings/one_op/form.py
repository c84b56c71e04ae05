# SPDX-License-Identifier: Apache-2.0
"""``RowsForm``: how a schedule with one op for each site reads and writes a site. ``FORMS`` has the form of each kind
of nodes."""

from __future__ import annotations

from typing import Any
from typing import Protocol

import torch
from torch import fx

from overlap_inductor.lowerings.one_op.exchange_rows import ReceivedRows
from overlap_inductor.lowerings.one_op.exchange_rows import SentRows
from overlap_inductor.lowerings.one_op.gather_rows import GatherRows
from overlap_inductor.lowerings.one_op.reduce_rows import ReduceRows
from overlap_inductor.lowerings.rows import PLAIN
from overlap_inductor.lowerings.rows import Op
from overlap_inductor.sites.exchange_nodes import ReceivedNodes
from overlap_inductor.sites.exchange_nodes import SentNodes
from overlap_inductor.sites.gather_nodes import GatherNodes
from overlap_inductor.sites.nodes import OverlapSite
from overlap_inductor.sites.nodes import SiteNodes
from overlap_inductor.sites.nodes import by_nodes
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.step_emitter import StepEmitter


class RowsForm(Protocol):
    @property
    def turns(self) -> bool:
        """How the op computes a site whose dim N is cut. True: the op computes the transposed product, and cuts its
        rows. False: the op cuts the product's columns."""
        ...

    def served(self, site: OverlapSite) -> OverlapSite:
        """See the function ``served``."""
        ...

    def loopable(self, site: OverlapSite) -> bool:
        """Whether one op can compute the site: the rows that the op sends or receives are in the ranks' order, or can
        be permuted into it. This method need not check the kinds of the matmuls."""
        ...

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        """For a loopable site: whether the number of rows of the op's operand determines the token count. If so, the
        op can run the plain collective for few tokens."""
        ...

    def computed_between(self, site: OverlapSite) -> fx.Node | None:
        """A node that the op cannot compute, between the collective and the matmuls; ``None`` if there is none."""
        ...

    def slice_sizes(self, site: OverlapSite, left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
        """``(K, N)`` of the matmul of one rank's slice. ``left``, ``right``: the operands of the op, for all slices."""
        ...

    def why_no_sum(self, site: OverlapSite, noun: str, sums: bool) -> str | None:
        """Why the schedule cannot add the results of the site's matmuls; ``None`` if it can, or if there is nothing to
        add. ``noun``: ``SiteSchedule.noun``, for the text. ``sums``: whether the schedule has an op for sums."""
        ...

    def why_no_contraction(self, site: OverlapSite, noun: str, contracts: int) -> str | None:
        """Why the schedule cannot compute matmuls that all contract the gathered or exchanged dim. ``None`` if it can,
        or if at least one matmul does not contract this dim. ``site`` need not be loopable. ``noun``:
        ``SiteSchedule.noun``. ``contracts``: the size of a rank's slice of the dim must be a multiple of this number;
        0 if the schedule has no op for such matmuls."""
        ...

    def why_not_scaled(self, site: OverlapSite) -> str | None:
        """Why no op can move the data of a site of scaled matmuls; ``None`` if one can."""
        ...

    def write(
        self, emit: StepEmitter, site: OverlapSite, op: Op, scales: list[tuple[Any, ...]], own: tuple[Any, ...]
    ) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
        """Write the op into the graph.

        Args:
            op: ``op(prefix)`` is the overload of the op with ``prefix`` before the pattern in its name.
            scales: the scale arguments of each matmul (``scaled.terms``); empty for plain matmuls.
            own: the schedule's own arguments, which follow the operands. The last one is the settings.

        Returns:
            ``(next token of the chain, {old node: its replacement})``. A replacement has the old node's shape and
                strides.
        """
        ...


FORMS: dict[type[SiteNodes], RowsForm] = {
    GatherNodes: GatherRows(),
    ReduceNodes: ReduceRows(),
    SentNodes: SentRows(),
    ReceivedNodes: ReceivedRows(),
}


def form_of(site: OverlapSite) -> RowsForm:
    """The form for the class of ``site.nodes``. Raises ``TypeError`` if there is none."""
    return by_nodes(FORMS, site)


def served(site: OverlapSite) -> OverlapSite:
    """The site with only those matmuls that one op can compute together.

    * Gather: the plain matmuls with the gathered dim as M or N. All read the gathered tensor in one shape and dtype,
      that of the first of them. The others, for example a weight's gradient, read the gathered tensor that the op
      returns.
    * All-to-all before the matmuls: likewise, with the exchanged tensor in place of the gathered one. If no matmul has
      the exchanged dim as M or N, those that contract it.

    Returns ``site`` unchanged if the op can compute all matmuls or none. A gather with scaled and plain matmuls is
    returned unchanged, too.
    """
    return form_of(site).served(site)


def loopable(site: OverlapSite, kinds: tuple[str, ...] = PLAIN) -> bool:
    """Whether all matmuls are of ``kinds`` and one op can compute this site."""
    return all(m.kind in kinds for m in site.matmuls) and form_of(site).loopable(site)


def chooses_at_run_time(site: OverlapSite, kinds: tuple[str, ...] = PLAIN) -> bool:
    """Whether the site is ``loopable`` and its op can run the plain collective for few tokens."""
    return loopable(site, kinds) and form_of(site).chooses_at_run_time(site)
