# SPDX-License-Identifier: Apache-2.0
"""The list of all patterns. To add a pattern, write its class (``Pattern``) and, if no existing class fits, the class
of its nodes (``SiteNodes``). Then register the pattern in one line here."""

from __future__ import annotations

from overlap_inductor.facts import names
from overlap_inductor.passes.embedding_patterns import EmbeddingAllToAll
from overlap_inductor.passes.exchange_patterns import AllToAllExperts
from overlap_inductor.passes.exchange_patterns import AllToAllMatmul
from overlap_inductor.passes.exchange_patterns import MatmulAllToAll
from overlap_inductor.passes.find_attention import AllGatherAttention
from overlap_inductor.passes.find_gather import AllGatherMatmul
from overlap_inductor.passes.find_held import AttentionExchange
from overlap_inductor.passes.pattern import Pattern
from overlap_inductor.passes.reduce_patterns import MatmulAllGather
from overlap_inductor.passes.reduce_patterns import MatmulAllReduce
from overlap_inductor.passes.reduce_patterns import MatmulReduceScatter

PATTERNS: list[Pattern] = []
"""``passes.find.SiteFinder`` tries the patterns in this order, and takes the first that matches. It skips a collective
that another site has taken (``SiteFinder.merged``), and asks no further pattern after a final ``Miss``."""


def register(pattern: Pattern) -> None:
    """Add ``pattern`` after all others. Raises ``ValueError`` if its name is taken, reserved or not an identifier."""
    names.PATTERNS.add(pattern.name)
    PATTERNS.append(pattern)


def pattern_named(name: str) -> Pattern:
    """The pattern of this name. Raises ``StopIteration`` if there is none."""
    return next(p for p in PATTERNS if p.name == name)


def unregister(pattern: Pattern) -> None:
    """Undo ``register``. Raises ``ValueError`` if the pattern is not registered."""
    names.PATTERNS.remove(pattern.name)
    PATTERNS.remove(pattern)


register(AllGatherMatmul())
register(AllGatherAttention())
register(AttentionExchange("attention_all_gather", "all_gather"))
register(AttentionExchange("attention_all_to_all", "all_to_all"))
register(MatmulReduceScatter())
register(MatmulAllReduce())
register(MatmulAllGather())
register(EmbeddingAllToAll())
register(AllToAllExperts())
register(MatmulAllToAll())
register(AllToAllMatmul())
