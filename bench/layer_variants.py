# SPDX-License-Identifier: Apache-2.0
"""The ways in which ``bench.layers`` compiles a program: plain, with overlap, and without its collectives."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites import collectives
from overlap_inductor.switch.backend import overlap_inductor as overlap_backend

PLAIN, AGAIN, LOCAL = "plain", "plain again", "no collectives"


@dataclass(frozen=True)
class Variant:
    """A way to compile.

    Attributes:
        switches: values for fields of ``OverlapConfig``; ``None``: compiled without overlap.
        right: whether the results must be right. If so, their error is checked. Without collectives, they are wrong.
    """

    name: str
    switches: Mapping[str, Any] | None = None
    right: bool = True


def variants(schedule: str, machine: str, switches: Mapping[str, str]) -> list[Variant]:
    """All variants, ``plain`` first. ``plain again`` is a second compile of the plain graph: its speed-up shows what
    chance alone does to a speed-up.

    Args:
        schedule: the schedule of the variants with overlap whose names do not begin with ``auto``.
        machine: the value of switch ``machine`` of the variants with overlap, or empty.
        switches: further switches of every variant with overlap.
    """
    found = [Variant(PLAIN)]
    for name in dict.fromkeys((schedule, "auto")):
        told = {**switches, "schedule": name, **({"machine": machine} if machine else {})}
        if "sequence_parallel" in {f.name for f in dataclasses.fields(OverlapConfig)}:
            found += [
                Variant(f"{name}, sequence_parallel {value}", {**told, "sequence_parallel": value})
                for value in (("off", "on") if name != "auto" else ("off", "auto"))
            ]
        else:
            found.append(Variant(name, told))
    return [*found, Variant(AGAIN), Variant(LOCAL, right=False)]


def compiled(variant: Variant, model: Any, cuda_graphs: bool, dynamic: bool) -> Any:
    """``model`` compiled as ``variant`` says. ``cuda_graphs``: whether the options of ``mode="reduce-overhead"``
    apply."""
    options: dict[str, Any] = dict(torch._inductor.list_mode_options("reduce-overhead")) if cuda_graphs else {}
    if variant.switches is not None:
        options |= {"mode": "on", "notice": "off", **variant.switches}
        return torch.compile(model, dynamic=dynamic, backend=overlap_backend, options=options)
    if variant.name == AGAIN:
        # Without another option, Dynamo would take the code that it has compiled for ``plain``.
        options["debug"] = torch._inductor.config.debug
    if variant.name == LOCAL:
        options["post_grad_custom_pre_pass"] = _without_collectives
    return torch.compile(model, dynamic=dynamic, options=options or None)


def _without_collectives(graph: fx.Graph) -> None:
    """Replace every collective by a local op whose result has the shape of the collective's result.

    Raises:
        NotImplementedError: the graph has another collective than an all-gather, a reduce-scatter or an all-reduce.
    """
    ops, aten = torch.ops._c10d_functional, torch.ops.aten
    for node in list(graph.nodes):
        if (kind := collectives.kept_kind(node)) is None:
            continue
        source, rows = node.args[0], node.meta["val"].shape[0]
        with graph.inserting_before(node):
            if node.target is ops.all_gather_into_tensor.default:
                local = graph.call_function(aten.cat.default, ([source] * node.args[1],))
            elif node.target is ops.reduce_scatter_tensor.default:
                local = graph.call_function(aten.slice.Tensor, (source, 0, 0, rows))
            elif node.target is ops.all_reduce.default:
                local = graph.call_function(aten.clone.default, (source,))
            else:
                raise NotImplementedError(f"{node.target} ({kind}) has no local form here")
        local.meta["val"] = node.meta["val"]
        for user in list(node.users):
            if user.target is ops.wait_tensor.default:
                user.replace_all_uses_with(local)
                graph.erase_node(user)
        node.replace_all_uses_with(local)
        graph.erase_node(node)


_COLLECTIVE = re.compile(
    r"_c10d_functional\.(all_reduce|reduce_scatter_tensor|all_gather_into_tensor|all_to_all_single)\b"
)


def counted(texts: Sequence[str]) -> dict[str, int]:
    """``{kind: number of collectives of that kind}`` in the texts of graphs."""
    return dict(Counter(name for text in texts for name in _COLLECTIVE.findall(text)))


def sites(reports: Sequence[OverlapReport]) -> dict[str, int]:
    """``{"phase pattern: schedule": number of such sites}``."""
    return dict(Counter(f"{r.phase} {s.facts.pattern}: {s.decision.moving.schedule}" for r in reports for s in r.sites))


def stretches(reports: Sequence[OverlapReport]) -> list[dict[str, Any]]:
    """For each stretch, the outcome of the sequence-parallel rewrite and its estimates. A stretch that is in several
    reports, for example of forward and backward, is listed once."""
    found = {s.id: s for r in reports for s in r.stretches}
    return [
        {
            "all_reduces": s.all_reduces,
            "status": s.status,
            "estimate_us": s.estimate_us,
            "reasons": [r.text for r in s.reasons],
        }
        for s in found.values()
    ]
