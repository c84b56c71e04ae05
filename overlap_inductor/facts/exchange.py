# SPDX-License-Identifier: Apache-2.0
"""``ExchangePlan`` describes what a rank exchanges in one graph, as text that ranks can compare. The text states the
schedules, the transports, and the order, sizes and dtypes of what moves. What only a rank's own computation needs, such
as a bias, is left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's plan of one graph.

    Attributes:
        version: version of overlap_inductor.
        mode: the switch (``off``, ``report``, ``on``, ``strict``).
        steps: one line for each collective that all ranks of a group call, in the order of their calls. Then one line
            for each stretch whose tokens the sequence-parallel rewrite divides among the ranks. Then one line for each
            group with a site of schedule ``early_start``. All collectives of such a group run in the graph's order.
            Sends, receives, collectives of groups of one rank, and ops of namespaces ``c10d`` and ``c10d_functional``
            have no line.
        overlaps: whether at least one line is that of an overlapped transfer or of a stretch whose tokens are divided.
        config: the switches. Not in the digest.
        groups: this rank's names of the groups g0, g1, ... of the steps: one tuple, or one for each of ``parts``. Not
            in the digest.
        parts: the plans from which ``joined`` made this plan; else empty.
        inputs: ``{input: digest}`` of the parameters and buffers that must be the same on all ranks
            (``runtime.same_inputs``).
    """

    version: str
    mode: str
    steps: tuple[str, ...] = ()
    overlaps: bool = False
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    groups: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    parts: tuple[ExchangePlan, ...] = field(default=(), compare=False)
    inputs: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """The first 16 hex digits of a SHA-256 of version, steps, inputs, and whether ``mode`` is ``off``. Ranks may
        exchange data only if their digests are equal."""
        inputs = [sorted(self.inputs.items())] if self.inputs else []
        text = json.dumps([self.version, list(self.steps), "off" if self.mode == "off" else "on", *inputs])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def collectives(self) -> tuple[str, ...]:
        """Group and kind of each step, sorted: ``("g0: all_gather", ...)``. A step about divided tokens gives ``"g0:
        tokens"``."""
        return tuple(sorted(" ".join(step.split(" ")[:2]).split("(")[0] for step in self.steps))

    def count_in(self, group: str) -> int:
        """How many steps belong to ``group``."""
        if self.parts:
            return sum(part.count_in(group) for part in self.parts)
        names = self.groups[0] if self.groups else ()
        return sum(s.startswith(f"g{names.index(group)}:") for s in self.steps) if group in names else 0

    def alias(self, group: str) -> str:
        """The number of ``group`` in the steps, as text: ``"0"`` for g0. A joined plan gives one number for each part,
        separated by commas, or ``-`` if the part lacks the group."""
        return ",".join(str(names.index(group)) if group in names else "-" for names in self.groups)

    def to_json(self) -> str:
        value = {
            "config": {k: list(v) if isinstance(v, tuple) else v for k, v in self.config.items()},
            "groups": [list(names) for names in self.groups],
            **({"inputs": dict(self.inputs)} if self.inputs else {}),
            "mode": self.mode,
            "overlap_inductor": self.version,
            "overlaps": self.overlaps,
            "plan": self.digest,
            "steps": list(self.steps),
        }
        return json.dumps(value)

    @classmethod
    def from_json(cls, text: str) -> ExchangePlan:
        """The plan that ``to_json`` wrote, in any version. Unknown fields are ignored."""
        value = json.loads(text)
        version = str(value.get("overlap_inductor", "?"))
        steps, config = value.get("steps", ()), value.get("config", {})
        groups, inputs = value.get("groups", ()), value.get("inputs", {})
        return cls(
            version=version,
            mode=str(value.get("mode", "on")),
            steps=tuple(map(str, steps)) if isinstance(steps, list) else (),
            overlaps=bool(value.get("overlaps", True)),
            config=config if isinstance(config, dict) else {},
            groups=tuple(map(tuple, groups)) if isinstance(groups, list) else (),
            inputs={str(k): str(v) for k, v in inputs.items()} if isinstance(inputs, dict) else {},
        )

    @classmethod
    def joined(cls, plans: list[ExchangePlan]) -> ExchangePlan:
        """One plan for a graph and its subgraphs, with version, mode and config of the first plan. If there are
        several plans, their ``inputs`` are dropped."""
        if len(plans) == 1:
            return plans[0]
        first = plans[0]
        steps = tuple(step for plan in plans for step in plan.steps)
        groups = tuple(names for plan in plans for names in plan.groups)
        overlaps = any(p.overlaps for p in plans)
        return cls(first.version, first.mode, steps, overlaps, first.config, groups, tuple(plans))


def difference(mine: ExchangePlan, others: Mapping[int, ExchangePlan]) -> str:
    """How the plans of ``others`` (by global rank) differ from ``mine``, as text; ``""`` if none differs."""
    alike: dict[str, list[int]] = {}
    for rank, plan in sorted(others.items()):
        if plan.digest != mine.digest:
            alike.setdefault(plan.digest, []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {_one_difference(mine, others[ranks[0]])}" for ranks in alike.values())


def _one_difference(mine: ExchangePlan, other: ExchangePlan) -> str:
    if other.version != mine.version:
        return f"overlap_inductor is '{mine.version}' here and '{other.version}' there"
    if "off" in (mine.mode, other.mode):
        return f"OVERLAP_INDUCTOR is {mine.mode} here and {other.mode} there"
    parts = []
    if len(mine.steps) != len(other.steps):
        parts.append(f"{len(mine.steps)} transfers here and {len(other.steps)} there")
    if mine.steps == other.steps:
        if mine.inputs.keys() != other.inputs.keys():
            here, there = (", ".join(sorted(plan.inputs)) or "none" for plan in (mine, other))
            return f"the inputs that must be the same on all ranks are {here} here and {there} there"
        names = [k for k in sorted(mine.inputs) if mine.inputs[k] != other.inputs[k]]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (
            f"{', '.join(names[:3])}{more} must be the same on all ranks, because the ranks divide the tokens, but the"
            " values here differ from those there"
        )
    number = next(
        (i for i, (a, b) in enumerate(zip(mine.steps, other.steps)) if a != b), min(len(mine.steps), len(other.steps))
    )
    here, there = (plan.steps[number] if number < len(plan.steps) else "nothing" for plan in (mine, other))
    parts.append(f"transfer {number + 1} is {here} here and {there} there")
    switches = [
        k for k in sorted({*mine.config, *other.config}) if _plain(mine.config.get(k)) != _plain(other.config.get(k))
    ]
    parts += [f"{k} is {mine.config.get(k)!r} here and {other.config.get(k)!r} there" for k in switches if k != "mode"]
    return ", ".join(parts)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
