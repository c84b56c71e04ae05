# SPDX-License-Identifier: Apache-2.0
"""``ComparedCall``: the callable of a compiled graph, which first compares plans with the other ranks.

It takes the place of ``CompiledFxGraph.current_callable``::

    graph(inputs)   ->   are all ranks' plans equal?    yes: overlapped(inputs), after making the workspace once
                                                        no:  plain(inputs), compiled now if it is not there yet

``overlapped`` is the replaced callable, which may record CUDA graphs. Before the comparison ends, ``overlapped`` has
read, written and captured nothing. ``plain`` is the graph compiled without overlap (``plain_program``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.errors import OverlapError
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.inductor import plain_program
from overlap_inductor.report import publish as reporting
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.runtime import agreement
from overlap_inductor.runtime import same_inputs
from overlap_inductor.runtime.workspace import prepare
from overlap_inductor.torch_compat.distributed import is_fake
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.storages import ByStorage

log = logging.getLogger("overlap_inductor")


@dataclass
class PlainProgram:
    """What is needed to compile a graph without overlap.

    Attributes:
        data, large, keywords, settings: arguments of ``plain_program.compile_plain``.
        output_strides: strides of the overlapped graph's results, which the plain program keeps.
    """

    data: bytes
    large: Mapping[str, torch.Tensor]
    keywords: Mapping[str, Any]
    settings: Mapping[str, Any]
    output_strides: Sequence[Any] | None

    def compile(self) -> Callable[[list[Any]], Any]:
        """Compile the graph without overlap. Returns a boxed callable."""
        compiled, examples = plain_program.compile_plain(self.data, self.large, self.keywords, self.settings)
        return plain_program.guarded(plain_program.restrided(compiled, examples, self.output_strides), examples)


class ComparedCall:
    """Calls ``overlapped`` if the ranks agree and all of them can run it, else the plain program.

    Args:
        overlapped: the compiled graph's own callable. If the graph overlaps nothing, this is also the plain program.
        reports: the reports of the graph and its subgraphs. They also say what these graphs exchange.
        plain: compiles the plain program. ``None`` if there is none, or if it cannot be restored.
        on_accelerator: whether the graph runs on another device than the CPU. If so, ranks that share no memory page
            (``runtime.call_page``) compare a plan only at its first run.
        dump: the dump folder, or ``None``.
    """

    def __init__(
        self,
        overlapped: Callable[[list[Any]], Any],
        reports: Sequence[OverlapReport],
        plain: PlainProgram | None,
        on_accelerator: bool,
        dump: str | None,
    ) -> None:
        self.overlapped, self.reports, self.program, self.dump = overlapped, reports, plain, dump
        self.plans = [ExchangePlan.from_json(r.exchange) for r in reports if r.exchange]
        self.needs = [(name, need[0], need[1]) for r in reports for name, need in r.groups.items() if need]
        self.names = list(dict.fromkeys(name for r in reports for name in r.groups))
        self.on_accelerator = on_accelerator
        self.groups: list[dist.ProcessGroup] | None = None
        same = [entry for r in reports for entry in r.same_inputs]
        self.in_plan = [(i, name) for i, name, _, lasting in same if lasting and len(self.names) == 1]
        """``(index among the inputs, name)`` of parameters and buffers whose digests are part of the plan. Empty if the
        graph has several groups: all groups compare the plan, but a parameter may be the same in only one group."""
        self.apart_from_plan = [(i, name, group) for i, name, group, _ in same if (i, name) not in self.in_plan]
        """``(index, name, group)`` of the other inputs that must be the same on all ranks of the group."""
        self.lasting = {name for _, name, _, lasting in same if lasting}
        """Names of parameters and buffers."""
        self.parameters: dict[str, list[int]] = {}
        """Indices of the parameters and buffers among ``apart_from_plan``, by group."""
        for index, name, group, lasting in same:
            if lasting and (index, name) not in self.in_plan:
                self.parameters.setdefault(group, []).append(index)
        self.by_inputs: ByStorage[agreement.Comparison] = ByStorage()
        self.by_digest: dict[str, agreement.Comparison] = {}
        """The comparisons by their plan's digest. Equal values of the inputs ``in_plan`` give equal digests, so calls
        with equal values share a comparison."""
        self.overlaps = any(p.overlaps for p in self.plans)
        self.ready = not self.overlaps
        """Whether ``overlapped`` may run as soon as all ranks agree. True if the graph overlaps nothing, or if
        ``_prepare`` has run for ``groups``."""
        self.plain: Callable[[list[Any]], Any] | None = None
        self._boxed_call = True

    def __call__(self, inputs: list[Any]) -> Any:
        comparison = self._comparison(inputs)
        new = self._new_parameters(inputs)
        run = self.overlapped
        if not self.ready or new or not comparison.count():
            run = self._decide(comparison, new, inputs)
        result = run(inputs)
        comparison.returned()
        return result

    def _decide(self, comparison: agreement.Comparison, new: bool, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Compare plans with the other ranks, if needed. Returns the callable that this rank runs. ``new``: a parameter
        or buffer has not been compared yet."""
        outcome = comparison.call()
        if outcome.overlapped and self.needs and any(is_fake(resolve_group(name)) for name, *_ in self.needs):
            # A fake group has no peers, so its ranks cannot share a workspace. A graph that needs no workspace, such as
            # a graph with rings only, can overlap on a fake group.
            comparison.withdrawn = True
            outcome = agreement.Outcome(
                False,
                "a group's backend is fake, so there is no peer whose memory the kernels could reach; the graph runs"
                " without overlap",
            )
        if outcome.overlapped and (outcome.fresh or new or not self.ready):
            failure = "" if self.ready else self._prepare(inputs)
            failure = failure or (self._inputs_differ(inputs) if outcome.fresh or new else "")
            # ``also`` waits for the other ranks, and checks that all ranks can go on. If only this rank has compiled an
            # agreed plan again, no other rank calls ``also``. So this rank must not call it. ``_prepare`` then asks no
            # other rank, because the workspace was prepared for this plan before.
            outcome = comparison.also(failure) if outcome.fresh or new or failure else outcome
            self.ready = self.ready or outcome.overlapped
            for group, indices in self.parameters.items() if outcome.overlapped else ():
                same_inputs.note_compared(group, [inputs[index] for index in indices])
        if outcome.overlapped:
            return self.overlapped
        if outcome.difference:
            reporting.fell_back(self.reports, outcome.difference, self.dump)
        return self._plain()

    def _comparison(self, inputs: Sequence[Any]) -> agreement.Comparison:
        """The comparison for these inputs and for the groups that now have the graph's group names. If a name has a new
        group, drop all earlier comparisons."""
        groups = [resolve_group(name) for name in self.names]
        if self.groups is None or any(a is not b for a, b in zip(groups, self.groups, strict=True)):
            self.groups, self.ready = groups, not self.overlaps
            self.by_inputs, self.by_digest = ByStorage(), {}
        tensors = [inputs[index] for index, _ in self.in_plan]
        comparison = self.by_inputs.get(tensors)
        if comparison is None:
            digests = {name: same_inputs.lasting_digest(inputs[index]) for index, name in self.in_plan}
            plan = replace(ExchangePlan.joined(self.plans), inputs=digests)
            comparison = self.by_digest.get(plan.digest)
            if comparison is None:
                comparison = agreement.Comparison(plan, groups, every_call=not self.on_accelerator)
                self.by_digest[plan.digest] = comparison
            self.by_inputs.put(tensors, comparison)
        return comparison

    def _new_parameters(self, inputs: Sequence[Any]) -> bool:
        """Whether ``apart_from_plan`` has a parameter or buffer that this process has not compared yet."""
        return not all(
            same_inputs.were_compared(group, [inputs[index] for index in indices])
            for group, indices in self.parameters.items()
        )

    def _prepare(self, inputs: Sequence[Any]) -> str:
        """Make the symmetric memory of the graph's sites. All ranks of a group call this together, unless the workspace
        was prepared for this plan before. Returns ``""``, or why it failed (the same text on all ranks of the group).
        """
        for group in self.groups or ():
            for plan in self.plans:
                agreement.accept(group, plan)
        for name, requests, limit in self.needs:
            device = next(
                i.device
                for i in inputs
                if isinstance(i, torch.Tensor) and (i.device.type != "cpu" or not self.on_accelerator)
            )
            failure = prepare(resolve_group(name), device, requests, limit << 20)
            if failure is not None:
                return failure
        return ""

    def _inputs_differ(self, inputs: Sequence[Any]) -> str:
        """Names the inputs of ``apart_from_plan`` whose values are not equal on all ranks of the input's group. ``""``
        if there is none. All ranks of the group get the same text."""
        same: dict[str, dict[str, torch.Tensor]] = {}
        for index, name, group in self.apart_from_plan:
            same.setdefault(group, {})[name] = inputs[index]
        for group, tensors in same.items():
            if failure := same_inputs.difference(resolve_group(group), tensors, self.lasting):
                return failure
        return ""

    def _plain(self) -> Callable[[list[Any]], Any]:
        if not self.overlaps:
            return self.overlapped
        if self.plain is None:
            if self.program is None and any(s.status == "rewritten" for r in self.reports for s in r.stretches):
                raise OverlapError(
                    "the ranks differ, and this training graph was rewritten to divide tokens among the ranks. This"
                    " changes what its forward saves for its backward, so it has no plain program. Set"
                    " OVERLAP_INDUCTOR_SEQUENCE_PARALLEL=off on all ranks. How the ranks differ is in the log, and in"
                    " the report of this graph."
                )
            if self.program is None:
                raise OverlapError(
                    "the ranks differ, and this graph's plain program cannot be restored: it was loaded from a cache"
                    " and holds Triton kernels of another process. Clear Inductor's caches, or switch overlap off on"
                    " all ranks (OVERLAP_INDUCTOR=off)."
                )
            start = time.monotonic()
            self.plain = self.program.compile()
            log.info(
                "overlap_inductor: compiled a graph without overlap in %.1f s, because the ranks differ",
                time.monotonic() - start,
            )
        return self.plain
