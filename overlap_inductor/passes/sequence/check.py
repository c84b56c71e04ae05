# SPDX-License-Identifier: Apache-2.0
"""Check whether a stretch may be rewritten, with an ordered list of small checks.

Each check has a reason code. It returns a sentence that names the values it refuses, or ``None``. A check reads only
facts that are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Reason
from overlap_inductor.passes.sequence.find import Stretch
from overlap_inductor.sites import graph_tools as tools

NEEDED = ("all_gather_matmul", "matmul_reduce_scatter")
"""The patterns of the sites that the rewrite makes."""


@dataclass(frozen=True)
class Context:
    """What the checks read in addition to the stretch. ``refusal``: why this compile cannot hold overlap ops, or
    ``None``."""

    config: OverlapConfig
    refusal: str | None


Check = Callable[[Stretch, Context], str | None]
CHECKS: list[tuple[str, Check]] = []


def check(code: str) -> Callable[[Check], Check]:
    """Register a check under its reason code."""

    def register(function: Check) -> Check:
        CHECKS.append((code, function))
        return function

    return register


def refuse(stretch: Stretch, context: Context) -> Reason | None:
    """Why ``stretch`` must stay as written, or ``None``."""
    for code, function in CHECKS:
        if (text := function(stretch, context)) is not None:
            return Reason(code, text)
    return None


@check("backend_not_supported")
def _backend(stretch: Stretch, context: Context) -> str | None:
    return context.refusal


@check("switched_off")
def _switched_off(stretch: Stretch, context: Context) -> str | None:
    missing = [p for p in NEEDED if p not in context.config.patterns]
    if missing:
        return f"OVERLAP_INDUCTOR_PATTERNS={','.join(context.config.patterns)} leaves out {' and '.join(missing)}"
    if context.config.schedule == "keep":
        text = "OVERLAP_INDUCTOR_SCHEDULE=keep leaves every site as written"
        return f"{text}, and the sequence-parallel rewrite pays only with overlap"
    return None


@check("dynamic_shape")
def _unbacked(stretch: Stretch, context: Context) -> str | None:
    if tools.has_unbacked([stretch.tokens.count]):
        return f"the number of tokens, {stretch.tokens.count}, is known only when the graph runs"
    return None


@check("dynamic_shape")
def _features(stretch: Stretch, context: Context) -> str | None:
    for source in stretch.sources:
        size = tools.shape(source.result)[-1]
        if isinstance(size, torch.SymInt):
            return f"the last dim of {source.result.name} has the symbolic size {size}; expected a fixed size"
    return None


@check("few_tokens")
def _few_tokens(stretch: Stretch, context: Context) -> str | None:
    tokens = stretch.tokens
    if isinstance(tokens.count, int) and tokens.count < tokens.world_size:
        return f"{tokens.count} tokens cannot be divided among {tokens.world_size} ranks; expected one for each rank"
    return None


@check("no_token_wise_work")
def _no_gain(stretch: Stretch, context: Context) -> str | None:
    if not stretch.rows and not stretch.sums and not stretch.whole_too:
        first = next(iter(stretch.needs_whole.values()), [(None, "no node reads it")])[0][1]
        return f"no work behind the all-reduce can run on rows: {first}"
    return None
