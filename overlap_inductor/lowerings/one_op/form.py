# SPDX-License-Identifier: Apache-2.0
"""``RowsForm``: the interface through which a schedule with one op for each site reads and writes a site.

``GatherRows`` implements it for ``GatherNodes``, ``ReduceRows`` for ``ReduceNodes``, and ``SentRows`` and
``ReceivedRows`` for an all-to-all of equal slices. Sites with nodes of another kind have no such form.
"""

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
        """What the op does if N is the dim that is cut. True: it computes the transposed product, so that it cuts rows
        of its left operand. False: it cuts columns of the product."""
        ...

    def served(self, site: OverlapSite) -> OverlapSite:
        """The site with only those matmuls that one op can compute together. Returns ``site`` unchanged if the op can
        compute all matmuls, or none."""
        ...

    def loopable(self, site: OverlapSite) -> bool:
        """Whether the rows are in the ranks' order or can be permuted into it, so that one op can compute the site. The
        kinds of the matmuls are not checked here."""
        ...

    def chooses_at_run_time(self, site: OverlapSite) -> bool:
        """For a loopable site: whether the op can derive the token count from its rows. If so, the op can run the plain
        collective when there are few tokens."""
        ...

    def computed_between(self, site: OverlapSite) -> fx.Node | None:
        """A node that the op cannot compute, between the collective and the matmuls: an op that is not element-wise, or
        one beside it (``sites.row_wise``, ``passes.find_region``). ``None`` if all ops there are element-wise."""
        ...

    def slice_sizes(self, site: OverlapSite, left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
        """``(K, N)`` of the matmul of one rank's slice. ``left``, ``right``: its operands as the op takes them."""
        ...

    def why_no_sum(self, site: OverlapSite, noun: str, sums: bool) -> str | None:
        """Why the schedule cannot add the results of the site's matmuls; ``None`` if it can, or if there is nothing to
        add.

        Args:
            noun: ``SiteSchedule.noun``, for the text.
            sums: whether the schedule has an op for sums.
        """
        ...

    def why_no_contraction(self, site: OverlapSite, noun: str, contracts: int) -> str | None:
        """If all matmuls of ``site`` contract the dim that the ranks gather or exchange: why the schedule cannot
        compute them. ``None`` if it can, or if a matmul does not contract this dim. ``site`` need not be loopable.

        Args:
            noun: ``SiteSchedule.noun``, for the text.
            contracts: ``OneOpSchedule.contracts``.
        """
        ...

    def why_not_scaled(self, site: OverlapSite) -> str | None:
        """Why no op of scaled matmuls can move the data of ``site``; ``None`` if one can. All matmuls of ``site`` are
        scaled."""
        ...

    def write(
        self, emit: StepEmitter, site: OverlapSite, op: Op, scales: list[tuple[Any, ...]], own: tuple[Any, ...]
    ) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
        """Write the op into the graph.

        Args:
            op: ``op(prefix)`` is the overload of the op whose name has ``prefix`` before the pattern
                (``lowerings.rows.Op``).
            scales: the scale arguments of each matmul (``scaled.terms``); empty for plain matmuls.
            own: the schedule's own arguments, which follow the operands. The last one is the settings.

        Returns:
            ``(next token of the chain, {old node: its replacement})``. Each replacement has the shape and strides of
            the old node.
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

    In a gather, these are the plain matmuls that the op can compute. They must read the gathered tensor in the same
    shape and dtype as the first of them. The other matmuls stay in the graph and read the gathered tensor that the op
    returns. An example is a weight's gradient, which contracts the tokens. If the op can compute none of the matmuls of
    an all-to-all in this way, the site keeps only the matmuls that contract the exchanged dim.

    Returns ``site`` unchanged if the op can compute all matmuls, or none, or if some are scaled and some plain.
    """
    return form_of(site).served(site)


def loopable(site: OverlapSite, kinds: tuple[str, ...] = PLAIN) -> bool:
    """Whether one op computes this site and all its matmuls are of ``kinds``."""
    return all(m.kind in kinds for m in site.matmuls) and form_of(site).loopable(site)


def chooses_at_run_time(site: OverlapSite, kinds: tuple[str, ...] = PLAIN) -> bool:
    """Whether one op computes this site, all its matmuls are of ``kinds``, and the op can run the plain collective when
    there are few tokens."""
    return loopable(site, kinds) and form_of(site).chooses_at_run_time(site)
