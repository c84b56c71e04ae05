# SPDX-License-Identifier: Apache-2.0
"""Tags and settings by which the partitioner of a training graph decides what is saved for backward and what is
computed again."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_TAG = "recompute"
_REGION_KEY = "MEMORY_BUDGET_ANNOTATION_KEY"
_LEGACY = "memory_budget"
"""Metadata of a node: the memory budget of its graph, as older versions of torch store it."""


def compute_again(node: fx.Node) -> None:
    """Let the backward compute ``node`` again, so that the forward does not save its value. A tag of the user's
    checkpointing stays."""
    node.meta.setdefault(_TAG, CheckpointPolicy.MUST_RECOMPUTE)


def memory_comes_first(graph: fx.Graph) -> bool:
    """Whether the user wants ``graph`` to save fewer bytes for the backward than the fastest program saves."""
    from torch._functorch import config

    return memory_budget(graph) < 1 or config.aggressive_recomputation or not config.ban_recompute_materialized_backward


def memory_budget(graph: fx.Graph) -> float:
    """The memory budget with which the partitioner cuts ``graph``: a fraction of what the fastest program saves. A
    budget in the metadata of a node replaces the budget of torch's configuration."""
    from torch._functorch import config

    regions = [b for node in graph.nodes if (b := _of_a_region(node)) is not None]
    others = [b for node in graph.nodes if isinstance(b := node.meta.get(_LEGACY), float)]
    return [*regions, *others, config.activation_memory_budget][0]


def _of_a_region(node: fx.Node) -> float | None:
    """The budget that ``torch.autograd.graph.region_activation_memory_budget`` (torch 2.13) gave to ``node``."""
    from torch.fx import traceback

    key: Any = getattr(traceback, _REGION_KEY, None)
    custom = node.meta.get("custom")
    return custom.get(key) if isinstance(custom, dict) else None


def region_metadata(graph: fx.Graph) -> dict[str, Any]:
    """The metadata of a new node that replaces no other node: the budget of the graph's region. Torch raises an error
    if an op of the forward lacks this budget."""
    from torch.fx import traceback

    budget = next((b for node in graph.nodes if (b := _of_a_region(node)) is not None), None)
    return {} if budget is None else {"custom": {getattr(traceback, _REGION_KEY): budget}}
