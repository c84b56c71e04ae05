# SPDX-License-Identifier: Apache-2.0
"""Rewrite each decided site into overlap ops.

Before and after, with an unrolled ring::

    y = mm(wait_tensor(all_gather(x)), w); ...; z = all_reduce(v)     # the all_reduce is kept
    ->  token = agree(group, plan, ...)
        steps, chained by token: each starts a transfer and multiplies the shard that has arrived
        y = the steps' result                           # all_gather and its wait are erased
        z = all_reduce(v)                               # ordered after the steps before it
        follow(token, z)                                # orders later steps, if any, after z
"""

from __future__ import annotations

import json
import warnings
from operator import getitem

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.lowerings.registry import define_ops
from overlap_inductor.lowerings.registry import schedule_named
from overlap_inductor.passes import agreed_plan as exchange_steps
from overlap_inductor.passes import delayed_matmuls
from overlap_inductor.passes import plan as planner
from overlap_inductor.passes.sequence.seams.chains import Chain
from overlap_inductor.passes.sequence.seams.find import Seam
from overlap_inductor.passes.sequence.seams.join import Joined
from overlap_inductor.passes.sequence.seams.write import write as write_seam
from overlap_inductor.passes.sequence.seams.write_chain import write as write_chain
from overlap_inductor.sites import all_to_all
from overlap_inductor.sites import collectives
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites.layouts import same_size
from overlap_inductor.sites.nodes import CollectiveNode
from overlap_inductor.sites.nodes import DecidedSite
from overlap_inductor.sites.sizes import machine_at
from overlap_inductor.sites.sizes import machine_of
from overlap_inductor.sites.sizes import moved_by
from overlap_inductor.sites.step_emitter import StepEmitter
from overlap_inductor.torch_compat.guards import same_expression
from overlap_inductor.torch_compat.ordering import note_order
from overlap_inductor.torch_compat.ordering import preserve_order
from overlap_inductor.torch_compat.step_values import StepValues
from overlap_inductor.torch_compat.step_values import mark

overlap = torch.ops.overlap_inductor
_STACK = ("nn_module_stack", "stack_trace", "fwd_nn_module_stack")


class Rewriter:
    """Rewrites the sites of one graph in graph order. ``joined``: the seams to write in bands, and the chains."""

    def __init__(self, graph: fx.Graph, config: OverlapConfig, joined: Joined) -> None:
        self.graph, self.config, self.joined = graph, config, joined
        self.plan: ExchangePlan | None = None
        self.groups: list[str] = []
        self.chains: dict[str, fx.Node] = {}
        self.order: dict[fx.Node, set[fx.Node]] = {}
        self.emitted: dict[str, list[fx.Node]] = {}
        self.values = StepValues()
        self.first: dict[fx.Node, str] = {}
        self.agreements: list[fx.Node] = []
        self.in_order: set[str] = set()
        """Groups with a site of schedule ``early_start``, which keeps the program's own collectives. Another rank may
        lack this site. So all collectives of these groups run in the graph's order."""
        self.current: DecidedSite | None = None
        """The site that is being written, to which a failure is attributed, or ``None``."""
        self.joining: Seam | Chain | None = None
        """The seam or chain that is being written, to which a failure is attributed, or ``None``."""

    def apply(self, sites: list[DecidedSite]) -> tuple[ExchangePlan, list[str]]:
        """Place and rewrite ``sites``, then erase dead nodes and order all communication. Returns ``(what the ranks
        compare before data moves, names of the plan's groups)``.

        Raises:
            Exception: any step failed. The graph is then half rewritten; ``snapshot.rewrite_or_restore`` restores it.
        """
        define_ops()
        moved = exchange_steps.footprints(sites, self.config)
        exposed, rates = _exposed(sites), machine_of(sites[0], self.config).matmul_flops
        with warnings.catch_warnings():
            # Arguments hold symbolic sizes, which Inductor prints into its code.
            warnings.filterwarnings("ignore", message="Raw SymInt value")
            placed = self._placed(sites)
            self._agree(placed)
            for index, (site, anchor) in enumerate(placed):
                self.current = site
                replaced = self._site(site, anchor)
                for later, _ in placed[index + 1 :]:
                    later.nodes.rename(replaced)
            self.current = None
            self._write_seams()
        self.graph.eliminate_dead_code()
        of_two = {site.facts.id for site in sites if site.facts.collective.world_size == 2}
        for wait, under in delayed_matmuls.delay(self.graph, exposed, of_two, self._kept(), rates).items():
            self.order.setdefault(wait, set()).update(under)
        self._chain_kept_collectives()
        live = set(self.graph.nodes)
        for site in sites:
            if left := [c.node.name for c in site.collectives if c.node in live]:
                self.current = site
                raise RuntimeError(f"still in the graph although the site's steps replaced them: {', '.join(left)}")
        plan, groups = exchange_steps.plan_of(
            self.graph, self.config, moved, {n: s for n, s in self.first.items() if n in live}, self.in_order
        )
        text = plan.to_json()
        for agree in [node for node in self.agreements if node in live]:
            agree.args = (agree.args[0], text, *agree.args[2:])
            # Without the mark, Inductor would evaluate ``agree`` again and give new tensors to all steps in its chain.
            mark(agree)
        preserve_order(self.graph, {n: {d for d in ds if d in live} for n, ds in self.order.items() if n in live})
        note_order(self.graph)
        self.graph.lint()
        return plan, groups

    def _write_seams(self) -> None:
        emitted = [n for nodes in self.emitted.values() for n in nodes]
        parts: dict[fx.Node, list[fx.Node]] = {}
        for seam in self.joined.seams:
            self.joining = seam
            write_seam(self.graph, seam, emitted, parts, self.values)
        for chain in self.joined.chains:
            self.joining = chain
            write_chain(chain, emitted, self.values)
        self.joining = None

    def _agree(self, placed: list[tuple[DecidedSite, fx.Node]]) -> None:
        """Write one ``agree`` for each group, all before the first step of any group: the ranks compare their plans
        before data moves.

        An ``agree`` requests only its own group's workspace, because other groups' needs may differ between ranks. A
        tensor argument gives the device, because a device's number would differ between ranks.
        """
        needs = planner.workspace([site for site, _ in placed])
        first = placed[0][1]
        with self.graph.inserting_before(first):
            for site, _ in placed:
                name = site.facts.collective.group_name
                if name not in self.chains:
                    source = tools.value(site.collectives[0].input)
                    terms = (json.dumps(needs[name]), self.config.workspace_limit) if name in needs else ()
                    # ``apply`` fills in the plan's text when all sites are written.
                    node = self.graph.call_function(
                        overlap.agree.default, (name, "", _first_on(source.device, first), *terms)
                    )
                    self.agreements.append(node)
                    with source.fake_mode:
                        node.meta["val"] = torch.empty(1, dtype=torch.uint8, device=source.device)
                    self.chains[name] = node
            for chain in self.chains.values():
                for other in self.chains.values():
                    if other is not chain:
                        follow = self.graph.call_function(overlap.follow.default, (chain, other))
                        follow.meta["val"] = self.values.evaluate(follow, "")

    def _placed(self, sites: list[DecidedSite]) -> list[tuple[DecidedSite, fx.Node]]:
        """Make room for the sites' steps. Returns ``(site, node before which its steps are written)`` for each
        site, in the graph's order. Raises ``RuntimeError`` if an earlier move left no place for a site."""
        anchors: list[tuple[fx.Node, DecidedSite]] = []
        behind: set[fx.Node] = set()
        for site in sites:
            self.current = site
            placement = site.nodes.place()
            chosen = schedule_named(site.decision.moving.schedule).anchor(site)
            if placement is None or (chosen is not None and not placement.hoisted and not placement.sunk):
                anchors.append((chosen or max(c.node for c in site.collectives), site))
                continue
            if placement.obstacle is not None:
                raise RuntimeError(
                    f"site {site.facts.id} has no place in the graph any more: its steps need"
                    f" {placement.obstacle.name}, which is computed too late and cannot be moved up"
                )
            placement.apply()
            if placement.sunk and site.nodes.read_in_place():
                # The nodes that were moved down may read the steps' results. So the steps come before these nodes.
                anchors.append((placement.sunk[0], site))
                continue
            # If nodes were moved down, the steps come right after the last of them. Another site may later move nodes
            # to the same place. These nodes may read the steps' results, so they come after the steps.
            anchors.append((placement.sunk[-1] if placement.sunk else placement.anchor, site))
            behind.update(placement.sunk[-1:])
        self.current = None
        return [
            (site, anchor.next if anchor in behind else anchor)
            for anchor, site in sorted(anchors, key=lambda pair: pair[0])
        ]

    def _site(self, site: DecidedSite, anchor: fx.Node) -> dict[fx.Node, fx.Node]:
        """Write one site's steps; return ``{old node: its replacement}``."""
        module = {k: site.matmuls[0].node.meta[k] for k in _STACK if k in site.matmuls[0].node.meta}
        piece = site.decision.moving
        ends = {n for c in site.collectives for n in c.chain()}
        for collective in site.collectives:
            if collective.kind == "all_to_all":
                all_to_all.write_row_counts(collective)
        with self.graph.inserting_before(anchor):
            group = site.facts.collective
            emit = StepEmitter(
                self.graph,
                group.group_name,
                group.world_size,
                site.facts.id,
                self.chains[group.group_name],
                module,
                self.values,
            )
            self.chains[group.group_name], replaced = schedule_named(piece.schedule).rewrite(
                emit, site, piece.parameters
            )
        for old, new in replaced.items():
            if not _alike(old, new):
                raise RuntimeError(
                    f"{old.name} {tools.shape(old)} {tools.dtype(old)} would become {tools.shape(new)}"
                    f" {tools.dtype(new)}"
                )
            for reader in old.replace_all_uses_with(new):
                self.values.keep(reader)
        ends |= site.nodes.unused_after(replaced)
        self._erase_unused([*replaced, *ends], ends)
        self.emitted.setdefault(group.group_name, []).extend(emit.emitted)
        self.first.update(dict.fromkeys(emit.emitted[:1], site.facts.id))
        self.order |= emit.order
        if not emit.emitted:
            self.in_order.add(group.group_name)
        return replaced

    def _erase_unused(self, pending: list[fx.Node], ends: set[fx.Node]) -> None:
        """Erase the unused nodes among ``pending``, and their inputs that become unused. Impure nodes, such as waits,
        are erased only if they are in ``ends``. Dead code elimination would keep every impure node."""
        erased: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if (
                node not in erased
                and not node.users
                and node.op == "call_function"
                and (node in ends or not node.is_impure())
            ):
                sources = node.all_input_nodes
                self.graph.erase_node(node)
                erased.add(node)
                pending += sources

    def _kept(self) -> list[delayed_matmuls.Transfer]:
        """The collectives that are left in the graph, with their estimated seconds. Collectives of one rank, and
        collectives with unbacked sizes, are left out."""
        found = [c for _, _, c in collectives.find_collectives(self.graph) if isinstance(c, CollectiveNode)]
        return [
            delayed_matmuls.Transfer(
                c.node, c.wait, cost_model.collective_seconds(moved_by(c), machine_at(c, self.config))
            )
            for c in found
            # No node can run under an op that waits for its own transfer.
            if c.world_size > 1 and c.wait is not c.node and not tools.has_unbacked(tools.shape(c.input))
        ]

    def _chain_kept_collectives(self) -> None:
        """For each group that has a rewritten site, give its steps and kept collectives one order on all ranks."""
        ours = {n: g for g, nodes in self.emitted.items() for n in nodes}
        newest: dict[str, fx.Node] = {}
        pending: dict[str, list[fx.Node]] = {}
        for node in list(self.graph.nodes):
            if node in ours:
                group = ours[node]
                if pending.get(group):
                    with self.graph.inserting_before(node):
                        for other in pending.pop(group):
                            follow = self.graph.call_function(
                                overlap.follow.default, (node.args[0], _tensor_of(self.graph, other))
                            )
                            follow.meta["val"] = self.values.evaluate(follow, "")
                newest[group] = node
            elif (
                node.op == "call_function"
                and (group := collectives.group_of(node) or "") in self.emitted
                and node.users
            ):
                if group in newest:
                    self.order.setdefault(node, set()).add(_tensor_of(self.graph, newest[group]))
                if group in self.in_order:
                    newest[group] = node
                pending.setdefault(group, []).append(node)


def _exposed(sites: list[DecidedSite]) -> dict[str, float]:
    """``{site's id: estimated seconds of its transfers that its matmuls do not hide}``."""
    found = {}
    for site in sites:
        estimate, schedule = site.decision.moving.estimate_us, site.decision.moving.schedule
        if {"matmul", schedule} <= estimate.keys():
            found[site.facts.id] = (estimate[schedule] - estimate["matmul"]) * 1e-6
    return found


def _alike(old: fx.Node, new: fx.Node) -> bool:
    """Whether both have the same shape and dtype. Equal sizes may be different expressions, for example a sum of
    pieces."""
    shapes = tools.shape(old), tools.shape(new)
    same = len(shapes[0]) == len(shapes[1]) and all(
        same_size(a, b) or same_expression(a, b) for a, b in zip(*shapes, strict=True)
    )
    return same and tools.dtype(old) == tools.dtype(new)


def _first_on(device: torch.device, before: fx.Node) -> fx.Node:
    """The graph's first tensor on ``device``. Raises ``RuntimeError`` if there is none before ``before``."""
    for node in before.graph.nodes:
        if node is before:
            break
        if tools.is_tensor(node) and tools.value(node).device == device:
            return node
    raise RuntimeError(f"no tensor on {device} is computed before {before.name}; expected a collective's input")


def _tensor_of(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """``node`` if it is a tensor, else the last of its results: an ordering edge must start at a tensor."""
    if tools.is_tensor(node):
        return node
    index = len(tools.value(node)) - 1
    existing = next((u for u in node.users if u.target is getitem and u.args[1] == index and tools.is_tensor(u)), None)
    if existing is not None:
        return existing
    with graph.inserting_after(node):
        element = graph.call_function(getitem, (node, index))
    element.meta["val"] = tools.value(node)[index]
    return element
