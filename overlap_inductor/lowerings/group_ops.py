# SPDX-License-Identifier: Apache-2.0
"""The ops that serve a group in a rewritten graph, whatever schedules the group's sites have.

All communicating ops of a group form a *chain*, so they run in graph order. Each reads or mutates the chain's current
token, a one-byte tensor::

    chain = agree(group, plan)   # compares the ranks' plans if they were not compared yet; returns the first token;
                                 # prepares the workspace of sites that hold one
    follow(chain!, other)        # orders the next op of the chain after ``other``, e.g. a collective left in place
    rank  = group_rank(group)    # the rank, read at run time so that the code is the same on every rank
"""

from __future__ import annotations

import torch

from overlap_inductor.errors import OverlapError
from overlap_inductor.lowerings.library import FLEXIBLE
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.library import library
from overlap_inductor.runtime import agreement
from overlap_inductor.runtime.workspace import prepare
from overlap_inductor.torch_compat.distributed import resolve_group


def _group_rank(group_name: str) -> int:
    return resolve_group(group_name).rank()


library.define("group_rank(str group_name) -> int")
library.impl("group_rank", _group_rank, "CompositeExplicitAutograd")


def _agree(
    group_name: str, plan: str, like: torch.Tensor, workspace: str | None = None, limit: int = 0
) -> torch.Tensor:
    group = resolve_group(group_name)
    agreement.require(group, plan)
    if workspace is not None:
        reason = prepare(group, like.device, workspace, limit << 20)
        if reason is not None:
            raise OverlapError(
                f"sites of group {group_name!r} have no workspace: {reason} Free memory on that rank, lower "
                "OVERLAP_INDUCTOR_WORKSPACE_LIMIT, or set OVERLAP_INDUCTOR=off."
            )
    # Nothing reads the token's value.
    return torch.empty(1, dtype=torch.uint8, device=like.device)


def _agree_fake(
    group_name: str, plan: str, like: torch.Tensor, workspace: str | None = None, limit: int = 0
) -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8, device=like.device)


# ``like``: any tensor on the device of the group's sites. ``workspace``: JSON text ``[[site, bytes, signals], ...]``
# (``runtime.workspace.prepare``). ``limit``: MiB of workspace for the group on this rank.
define(
    "agree(str group_name, str plan, Tensor like, str? workspace=None, int limit=0) -> Tensor",
    _agree,
    _agree_fake,
    FLEXIBLE,
)


def _follow(chain: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return chain.new_empty(1)


# ``other``: a collective of the same group that was left in place, or another group's token.
define("follow(Tensor(a!) chain, Tensor other) -> Tensor", _follow, _follow)
