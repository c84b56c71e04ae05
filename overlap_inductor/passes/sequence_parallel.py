# SPDX-License-Identifier: Apache-2.0
"""The sequence-parallel rewrite: all-reduces become reduce-scatters, and each rank does the token-wise work after them
for its own rows only (Megatron's sequence parallelism: Korthikanti et al., arXiv:2205.05198, section 4.2.2).

Contract: ``graph`` is a joint graph (forward and backward) or an inference graph, before the partitioner. The pass
changes it in place, and restores it if the rewrite fails. The pass does not communicate. Ranks with equal graphs and
settings decide alike. Pseudo-code::

    stretches = find(graph)                                     # what can be held as rows, op by op
    legal     = [s for s in stretches if refuse(s) is None]
    chosen    = [s for s in legal if the overlap pass's plan is faster for the rewritten graph than for graph]
    graph     = write(graph, chosen)
    describe(stretches)                                         # as metadata of collectives, for the overlap pass

The graph before and after, for one decoder layer::

    x = x + all_reduce(o_proj(...)); y = down(act(up(norm(x))))
    ->  x = x + reduce_scatter(o_proj(...)); y = down(act(up(all_gather(norm(x)))))     # x: rows of this rank
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.stretch import DIVIDED
from overlap_inductor.facts.stretch import META
from overlap_inductor.facts.stretch import StretchFacts
from overlap_inductor.passes import snapshot
from overlap_inductor.passes.sequence import estimate
from overlap_inductor.passes.sequence.check import Context
from overlap_inductor.passes.sequence.check import refuse
from overlap_inductor.passes.sequence.find import RowFinder
from overlap_inductor.passes.sequence.find import Stretch
from overlap_inductor.passes.sequence.find import gather_less
from overlap_inductor.passes.sequence.late_sums import of_the_backward
from overlap_inductor.passes.sequence.same_values import inputs_to_compare
from overlap_inductor.passes.sequence.write import RowWriter
from overlap_inductor.report.failure import BUG_REPORT
from overlap_inductor.report.failure import Failure
from overlap_inductor.sites import graph_tools as tools
from overlap_inductor.sites import naming
from overlap_inductor.sites import sizes
from overlap_inductor.sites.collectives import find_collectives
from overlap_inductor.sites.collectives import group_name
from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.graph_inputs import freezing
from overlap_inductor.torch_compat.graph_inputs import is_parameter
from overlap_inductor.torch_compat.guards import decide
from overlap_inductor.torch_compat.guards import may_decide
from overlap_inductor.torch_compat.step_values import StepValues

log = logging.getLogger("overlap_inductor")
FAILURE = "overlap_inductor_sequence_parallel_failure"
"""Metadata of the first collective in a graph whose rewrite failed: ``Failure.to_dict()``."""
SAME = "overlap_inductor_same_on_all_ranks"
"""Metadata of an input that must be the same on all ranks of a group: the group's name."""
CLEARLY = 4
"""A graph for few tokens keeps its all-reduces up to a limit of tokens. The limit is at least this many times the
number at which the rewrite may begin to pay. Calls that reach the limit need another compile, for which a small gain
is not enough."""
Numbered = list[tuple[int, Stretch]]


def run_sequence_parallel(graph: fx.Graph, config: OverlapConfig, refusal: str | None) -> list[StretchFacts]:
    """Rewrite the stretches of one graph that are legal and chosen, and describe all stretches.

    Args:
        graph: changed in place.
        refusal: why this compile cannot hold overlap ops, or ``None``.

    Raises no error. If the pass fails, the graph stays unchanged, and the overlap pass reports the failure.
    """
    try:
        return _find_and_rewrite(graph, config, refusal)
    except Exception as error:  # noqa: BLE001  (a model that compiles without the pass must compile with it)
        failure = Failure.of(error, "sequence_parallel")
        log.warning(
            "overlap_inductor: the sequence-parallel rewrite failed (%s); it left the graph as written. %s",
            failure.error,
            BUG_REPORT,
            exc_info=True,
        )
        # ``find_collectives`` may be what failed, so the collective that holds the failure is found without it.
        for node in graph.nodes:
            if operators.is_functional_collective(node):
                node.meta[FAILURE] = failure.to_dict()
                break
        return []


def _find_and_rewrite(graph: fx.Graph, config: OverlapConfig, refusal: str | None) -> list[StretchFacts]:
    if config.sequence_parallel == "off" or not any(kind == "all_reduce" for _, kind, _ in find_collectives(graph)):
        return []
    finder = _found(graph)
    facts = [_describe(graph, s) for s in finder.stretches]
    context = Context(config, refusal or freezing())
    for number, stretch in enumerate(finder.stretches):
        if (reason := refuse(stretch, context)) is not None:
            facts[number] = replace(facts[number], status="refused", reasons=(reason,))
    legal = [(n, s) for n, s in enumerate(finder.stretches) if facts[n].status != "refused"]
    legal = [(n, s) for n, s in legal if _divides(n, s, facts, config)]
    if any(isinstance(s.tokens.count, torch.SymInt) for _, s in legal):
        # ``_divides`` may have added guards, which tell more about the sizes. So the stretches are found again.
        finder = _found(graph)
        legal = [(n, finder.stretches[n]) for n, _ in legal]
    values = StepValues()
    chosen = _choose(graph, legal, facts, config, refusal, values) if legal else []
    if config.mode == "report":
        for number, _ in chosen:
            text = "OVERLAP_INDUCTOR=report does not change the graph; set OVERLAP_INDUCTOR=on to rewrite this stretch"
            facts[number] = replace(facts[number], status="kept", reasons=(Reason("report_mode", text),))
        chosen = []
    kept = snapshot.Snapshot(graph)
    try:
        if chosen:
            _write(graph, finder, chosen, facts, config, values)
        _annotate(finder, facts, [n for n, _ in chosen])
    except Exception:
        kept.restore()
        raise
    return facts


def _found(graph: fx.Graph) -> RowFinder:
    finder = RowFinder(graph).run()
    for stretch in finder.stretches:
        gather_less(stretch)
    return finder


def _divides(number: int, stretch: Stretch, facts: list[StretchFacts], config: OverlapConfig) -> bool:
    """Whether the stretch may be rewritten for the numbers of tokens that this graph serves. If it is not known whether
    a symbolic number is a multiple of the number of ranks, a guard is added, and the number at compile time decides.
    If the rewrite cannot pay at that number, ``auto`` keeps the stretch, and guards only an upper limit of the
    number. Numbers that fail a guard get other graphs."""
    tokens = stretch.tokens
    if isinstance(tokens.count, int) or tokens.even:
        return True
    if config.sequence_parallel == "auto" and not estimate.may_pay(stretch, 1.0, config):
        count = sizes.hint(tokens.count)
        text = (
            f"at the example's {count} tokens, the fixed costs of the reduce-scatters and all-gathers exceed the time"
            " of the all-reduces"
        )
        limit = estimate.limit_of_keeping(count, lambda factor: estimate.may_pay(stretch, factor / CLEARLY, config))
        if limit is not None and not decide(tokens.count >= limit):
            text += f"; {limit} tokens and more {_other_graph(tokens.count >= limit)}"
        facts[number] = replace(facts[number], status="kept", reasons=(Reason("few_tokens", text),))
        return False
    # Multiples and other numbers get graphs of their own if guards are allowed, because multiples need no padding.
    decide(tokens.count % tokens.world_size == 0)
    return True


def _choose(
    graph: fx.Graph,
    legal: Numbered,
    facts: list[StretchFacts],
    config: OverlapConfig,
    refusal: str | None,
    values: StepValues,
) -> Numbered:
    """Choose the stretches to rewrite. Fills in all estimates, and the reasons for stretches that are kept."""
    written, rewritten = _copy(graph), _copy(graph)
    finder = _found(rewritten)
    writer = RowWriter(rewritten, finder.held, config, values)
    writer.apply([(n, finder.stretches[n]) for n, _ in legal])
    names = {c.node.name: n for n, s in legal for source in s.sources for c in source.collectives}
    before = {node: names[node.name] for node in written.nodes if node.name in names}
    after = {node: number for node, (number, _) in writer.made.items()}
    # The copy's sites must get the margin of a stretch (``cost_model.margin_of``), as those of the rewritten graph do.
    for node, number in after.items():
        node.meta[META] = replace(facts[number], status="rewritten").to_dict()
    plans = ((estimate.plan(written, config, refusal), before), (estimate.plan(rewritten, config, refusal), after))
    numbers = [n for n, _ in legal]

    def costs(factor: float) -> tuple[dict[int, estimate.Cost], dict[int, estimate.Cost]]:
        with sizes.at_scale(factor):
            if factor != 1.0:
                choices = [estimate.plan(g, config, refusal) for g in (written, rewritten)]
                found = [estimate.costs(c, of, numbers, config) for c, (_, of) in zip(choices, plans, strict=True)]
            else:
                found = [estimate.costs(choice, of, numbers, config) for choice, of in plans]
            for number, stretch in legal:
                found[0][number].row_work = estimate.row_work(stretch, 1, config)
                found[1][number].row_work = estimate.row_work(stretch, stretch.tokens.world_size, config)
        return found[0], found[1]

    chosen, trains = [], bool(of_the_backward(graph))
    first = costs(1.0)
    for number, stretch in legal:
        cost = first[0][number], first[1][number]
        matmuls = max(c.matmuls for c in cost)
        times = {k: round((matmuls + c.behind) * 1e6, 1) for k, c in zip(("keep", "rewritten"), cost, strict=True)}
        facts[number] = replace(facts[number], estimate_us=times)
        if config.sequence_parallel == "on":
            facts[number] = replace(facts[number], status="rewritten", source="forced")
            chosen.append((number, stretch))
            continue

        margin = estimate.margin_of(stretch, trains)

        def pays_at(factor: float, number: int = number, margin: float = margin) -> bool:
            as_written, as_rewritten = first if factor == 1.0 else costs(factor)
            return estimate.pays(as_written[number], as_rewritten[number], margin)

        if _pays(number, stretch, facts, pays_at):
            facts[number] = replace(facts[number], status="rewritten")
            chosen.append((number, stretch))
    return chosen


def _pays(number: int, stretch: Stretch, facts: list[StretchFacts], pays_at: Any) -> bool:
    """Whether the rewrite pays for the numbers of tokens that this graph serves. A guard asks whether a symbolic number
    reaches the number from which on the rewrite pays."""
    count = stretch.tokens.count
    if isinstance(count, int):
        result, limit = pays_at(1.0), None
    elif (limit := estimate.crossover(sizes.hint(count), stretch.tokens.world_size, pays_at)) is not None:
        result = decide(count >= limit)
    else:
        limit = estimate.limit_of_keeping(sizes.hint(count), pays_at)
        result = limit is not None and decide(count >= limit)
    if not result:
        times = facts[number].estimate_us
        text = f"estimated {times['rewritten']:.0f} us rewritten, against {times['keep']:.0f} us as written"
        text += " (the rewrite pays only if a gather can be hidden)"
        if limit is not None:
            text += f"; calls with {limit} tokens or more {_other_graph(count >= limit)}"
        facts[number] = replace(facts[number], status="kept", reasons=(Reason("too_small", text),))
    return result


def _other_graph(condition: Any) -> str:
    if may_decide(condition):
        return "get a graph of their own, for which the rewrite is considered again"
    return "use this graph, too, because the program states the bounds of their number"


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph(graph.owning_module)
    snapshot.copy_into(graph, copied)
    return copied


def _write(
    graph: fx.Graph,
    finder: RowFinder,
    chosen: Numbered,
    facts: list[StretchFacts],
    config: OverlapConfig,
    values: StepValues,
) -> None:
    """Rewrite the ``chosen`` stretches, and store their facts in the metadata of the new collectives."""
    writer = RowWriter(graph, finder.held, config, values)
    writer.apply(chosen)
    reduced = {node for _, stretch in chosen for node in stretch.sums}
    made = Counter(
        (number, "all_reduce" if old in reduced else _kind(node)) for node, (number, old) in writer.made.items()
    )
    for number, _ in chosen:
        scatters, gathers, sums = (made[number, kind] for kind in ("reduce_scatter", "all_gather", "all_reduce"))
        again = sum(writer.made[g][0] == number for g in writer.gathered_again)
        facts[number] = replace(facts[number], scatters=scatters, gathers=gathers, sums=sums, gathered_again=again)
        for node, (owner, _) in writer.made.items():
            if owner == number:
                node.meta[META] = facts[number].to_dict()
    for _, stretch in chosen:
        for source in inputs_to_compare(stretch.reads):
            source.meta[SAME] = stretch.tokens.group_name


def _kind(node: fx.Node) -> str:
    kinds = {"all_to_all": "reduce_scatter", **{k: k for k in ("reduce_scatter", "all_gather", "all_reduce")}}
    return next(kind for name, kind in kinds.items() if name in str(node.target))


def _annotate(finder: RowFinder, facts: list[StretchFacts], rewritten: list[int]) -> None:
    """Store the facts of the kept and refused stretches in the metadata of their all-reduces."""
    for number, stretch in enumerate(finder.stretches):
        if number not in rewritten:
            for collective in (c for source in stretch.sources for c in source.collectives):
                collective.node.meta[META] = facts[number].to_dict()


def _describe(graph: fx.Graph, stretch: Stretch) -> StretchFacts:
    """The facts of a stretch before any decision."""
    first = stretch.sources[0].collectives[0]
    ordinals = {node: i for i, (node, _, _) in enumerate(find_collectives(graph))}
    shape, dtype = tools.shape(first.input), str(tools.dtype(first.input)).removeprefix("torch.")
    module = naming.module_of(first.node)
    needed = Counter(str(user.target) for user in stretch.readers)
    return StretchFacts(
        id=naming.site_id("sequence_parallel", module, "joint", ordinals[first.node], f"sum:{dtype}:{shape[-1]}"),
        module=module or first.node.name,
        ranks=first.ranks or (),
        tokens=tools.size_text(stretch.tokens.count),
        features=tools.size_text(shape[-1]),
        dtype=dtype,
        all_reduces=sum(len(s.collectives) for s in stretch.sources),
        scatters=0,
        gathers=0,
        sums=0,
        gathered_again=0,
        nodes=len(stretch.rows),
        status="kept",
        source="analytic",
        gathered_for=dict(needed),
        program=_program(stretch),
    )


def _program(stretch: Stretch) -> str:
    """``StretchFacts.program``: the hash of the stretch's ops and numbers, without names. A device counts by its type,
    because ranks use GPUs of different indices."""
    pending, computed = list(stretch.reads), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node.op == "call_function" and node not in computed and not operators.is_functional_collective(node):
            computed.add(node)
            pending += node.all_input_nodes
    lines = []
    for node in (*stretch.rows, *stretch.sums, *sorted(computed)):
        shown = fx.map_arg((node.args, node.kwargs), lambda n: "_")
        numbers = [_constant(v) for v in operators.leaves(shown)]
        lines.append(f"{node.target}({', '.join(numbers)})")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _constant(value: object) -> str:
    if isinstance(value, torch.device):
        return value.type
    return "s" if isinstance(value, torch.SymInt) else str(value)


def note_divided(graph: fx.Graph) -> None:
    """Store the rewritten stretches in the metadata of the graph's output, because the overlap pass may replace their
    collectives."""
    found = {}
    for node in graph.nodes:
        if META in node.meta and node.meta[META]["status"] == "rewritten":
            found[node.meta[META]["id"]] = (group_name(node), node.meta[META]["program"])
    if found:
        graph.output_node().meta[DIVIDED] = list(found.values())


def erase_unread(graph: fx.Graph) -> None:
    """Erase each collective of a rewritten stretch whose result nothing in ``graph`` reads, and the nodes that only
    such collectives need. The partitioner treats collectives as side effects, so it copies collectives of the backward
    into the forward, and collectives of the forward into the backward."""
    unread: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node.users or node.op != "call_function":
            continue
        source = node.args[0] if operators.is_wait(node) else node
        ours = isinstance(source, fx.Node) and source.meta.get(META, {}).get("status") == "rewritten"
        random = operators.has_tag(node, torch.Tag.nondeterministic_seeded)
        if ours or (node in unread and not operators.is_mutable(node) and not random):
            unread.update(node.all_input_nodes)
            graph.erase_node(node)


def stretches_of(graph: fx.Graph) -> list[StretchFacts]:
    """The stretches to which the collectives of ``graph`` belong, each once."""
    found = {n.meta[META]["id"]: n.meta[META] for n in graph.nodes if META in n.meta}
    return [StretchFacts.from_dict(value) for value in found.values()]


def rewritten(graph: fx.Graph) -> bool:
    """Whether a stretch that has a collective in ``graph`` was rewritten."""
    return any(n.meta[META]["status"] == "rewritten" for n in graph.nodes if META in n.meta)


def same_inputs_of(graph: fx.Graph) -> list[list[Any]]:
    """The inputs of ``graph`` that must be the same on all ranks of a group, in the form of
    ``OverlapReport.same_inputs``: ``[index, name, group, whether it is a parameter or buffer]``."""
    inputs = enumerate(graph.find_nodes(op="placeholder"))
    return [[i, node.name, node.meta[SAME], is_parameter(node) is True] for i, node in inputs if SAME in node.meta]


def failures_of(graph: fx.Graph) -> list[Failure]:
    """The failures of the rewrite of the joint graph from which ``graph`` was cut."""
    return [Failure(**n.meta[FAILURE]) for n in graph.nodes if FAILURE in n.meta]
