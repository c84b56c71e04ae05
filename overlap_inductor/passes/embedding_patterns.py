# SPDX-License-Identifier: Apache-2.0
"""Pattern ``embedding_all_to_all``: each rank looks up the batch in tables of its own, and an all-to-all exchanges the
results. In the backward, an all-to-all returns the results' gradients to the ranks that hold the tables (DLRM;
arXiv:2305.06942, section 3)."""

from __future__ import annotations

from overlap_inductor.facts.decision import Reason
from overlap_inductor.passes.find_lookups import find_gradients
from overlap_inductor.passes.find_lookups import find_pooled
from overlap_inductor.passes.find_lookups import gradients_after
from overlap_inductor.passes.find_lookups import lookups_before
from overlap_inductor.passes.pattern import Match
from overlap_inductor.passes.pattern import Miss
from overlap_inductor.passes.pattern import Search
from overlap_inductor.sites.all_to_all import unequal
from overlap_inductor.sites.nodes import CollectiveNode


class EmbeddingAllToAll:
    """See ``Pattern``. The finder tries this pattern before the all-to-all patterns with matmuls, because no
    matmul has to be cut into pieces if lookups hide the exchange."""

    name = "embedding_all_to_all"
    kind = "all_to_all"
    early = False
    example = None

    def find(self, collective: CollectiveNode, search: Search) -> Match | Miss:
        finders = (lookups_before, find_pooled), (gradients_after, find_gradients)
        reasons = []
        for near, find in finders:
            if not near(collective):
                continue
            nodes = unequal(collective) or find(collective)
            if not isinstance(nodes, Reason):
                return Match(nodes, 0, nodes.roles[0])
            reasons.append(nodes)
        return Miss(reasons)
