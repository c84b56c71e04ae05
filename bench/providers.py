# SPDX-License-Identifier: Apache-2.0
"""The providers of a case: the ways to compute it.

- ``keep``: the matmul and the collective of the plain graph, one after the other;
- ``async_tp``: Inductor's async TP, called as Inductor's output code calls it;
- a schedule over one of its transports;
- ``auto``: the schedule that the planner chooses;
- a schedule with parameters other than those of its plan (``Variant``).

What a provider calls depends on the setting:

- ``hidden`` (only GPU time counts): if a schedule turns a site into one op, this op is called directly. The ring and
  ``auto`` are compiled graphs. ``keep`` runs eagerly.
- ``compiled``: ``keep``, ``auto`` and every schedule are compiled graphs. Variants are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import fields
from typing import Any

import torch

import overlap_inductor
from bench.shapes import Case
from bench.site import Site
from bench.site import plain
from overlap_inductor.lowerings.registry import SCHEDULES
from overlap_inductor.lowerings.registry import define_ops
from overlap_inductor.lowerings.registry import schedule_named
from overlap_inductor.lowerings.schedule import OpCall
from overlap_inductor.runtime.arena import Request
from overlap_inductor.runtime.arena import planned_bytes
from overlap_inductor.runtime.workspace import workspace_of
from overlap_inductor.switch.backend import overlap_inductor as overlap_backend
from overlap_inductor.torch_compat import symmetric

define_ops()

SETTINGS = ("hidden", "compiled")
ASYNC_TP = ("all_gather_matmul", "matmul_reduce_scatter")
"""The patterns for which Inductor's async TP has ops."""
LIMIT_MIB = 1 << 16
RING_PARTS = 1
"""The number of sub-chunks into which the ring cuts a shard. Over NCCL, one sub-chunk was the fastest in most cases
of an MLP (bench/results/ring_nccl.jsonl)."""


def provider_names() -> list[str]:
    return ["keep", "async_tp", *(f"{s.name}/{t}" for s in SCHEDULES for t in s.transports), "auto"]


def kinds_of(offered: Sequence[str]) -> list[str]:
    """The names in ``offered`` except ``keep``, each once and without its transport."""
    return list(dict.fromkeys(name.split("/")[0] for name in offered if name != "keep"))


@dataclass(frozen=True)
class Provider:
    """One way to compute a case.

    Attributes:
        call: computes the case.
        runs: ``keep``, ``async_tp`` or the name of the schedule that runs. For ``auto``, the planner's choice.
        parameters: the schedule's parameters. If ``call`` runs a compiled graph, they are those of the plan. Else they
            are those that the op gets. Empty for ``keep`` and ``async_tp``.
        held: bytes of symmetric memory that the call needs on each rank.
    """

    name: str
    call: Callable[[], torch.Tensor]
    runs: str
    parameters: Mapping[str, Any]
    held: int


@dataclass(frozen=True)
class Variant:
    """A schedule with parameters that differ from the plan's. ``text``: the parameters as on the command line."""

    schedule: str
    text: str
    parameters: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.schedule} {self.text}"

    @classmethod
    def parse(cls, argument: str) -> Variant:
        """Read a text such as ``fused.parts=2,pushers=8``. A value is JSON, or else a string. Values are not checked.

        Raises:
            ValueError: no schedule of this name turns a site into one op, or a part of the text sets none of the
                schedule's parameters.
        """
        schedule, _, text = argument.partition(".")
        settable = {s.name: s.single_op.parameters for s in SCHEDULES if s.single_op is not None}
        if schedule not in settable:
            raise ValueError(
                f"{argument!r}: no parameters of schedule {schedule!r} can be set; expected one of"
                f" {', '.join(settable)}, as in fused.parts=2"
            )
        known = [f.name for f in fields(settable[schedule])]
        parameters = {}
        # A comma inside a list does not separate parameters.
        for part in re.split(r",(?![^\[]*\])", text):
            key, equals, value = part.partition("=")
            if not equals or key not in known:
                raise ValueError(
                    f"{argument!r}: {part!r} sets no parameter of schedule {schedule}; expected one of"
                    f" {', '.join(known)}, as in {known[-1]}=1"
                )
            try:
                parameters[key] = json.loads(value)
            except json.JSONDecodeError:
                parameters[key] = value
        return cls(schedule, text, parameters)


def why_not(name: str, case: Case, device: torch.device) -> str | None:
    """Why a provider cannot compute a case here, or ``None``. All ranks get the same answer."""
    kind, ranks = re.split("[/ ]", name)[0], tuple(range(case.world_size))
    if kind == "async_tp":
        if case.scaled:
            return "this benchmark does not measure the fp8 ops of async TP"
        if case.pattern not in ASYNC_TP:
            return "async TP has no op for this pattern"
        return "async TP needs GPUs" if device.type != "cuda" else symmetric.why_no_symmetric_memory(ranks, device)
    if kind in ("keep", "auto"):
        return None
    schedule = schedule_named(kind)
    if case.pattern not in schedule.patterns:
        return f"no {schedule.noun} computes {case.pattern}"
    if schedule.single_op is None:
        return None
    return schedule.single_op.why_no_call(_call(case), name.partition("/")[2], device)


def _call(case: Case) -> OpCall:
    return OpCall(
        case.pattern,
        tuple(range(case.world_size)),
        case.tokens,
        case.inner,
        case.columns,
        case.dtype,
        case.sent,
        case.scaled,
    )


def request(case: Case, schedule: str, settings: str, site: str) -> Request | None:
    """The workspace that a schedule with ``settings`` (JSON text) needs for a case; ``None`` if it needs none."""
    op = schedule_named(schedule).single_op if schedule != "keep" else None
    return None if op is None else op.request_of(_call(case), settings, site)


def _held(case: Case, needs: Request | None) -> int:
    return 0 if needs is None else planned_bytes([needs], 1, case.world_size)


def keep(site: Site) -> Provider:
    return Provider("keep", site.keep, "keep", {}, 0)


def async_tp(site: Site) -> Provider:
    # The workspace of async TP holds one shard for a gather, two for a reduce-scatter
    # (torch.distributed._symmetric_memory).
    case = site.case
    shards, width = (1, case.inner) if site.example.first else (2, case.columns)
    return Provider("async_tp", site.async_tp, "async_tp", {}, shards * case.shard_rows * width * case.dtype.itemsize)


def one_op(site: Site, name: str, schedule: str, settings: Mapping[str, Any]) -> Provider:
    """A provider that calls the op of ``schedule`` with ``settings``, with the op's workspace prepared. All ranks call
    this together."""
    case, text, label = site.case, json.dumps(settings, sort_keys=True), f"{name} {site.case}"
    needs = request(case, schedule, text, label)
    place = workspace_of(site.group, site.device)
    if needs is not None:
        place.prepare([needs], LIMIT_MIB << 20)
        _check_room(site, label, name)
    op, group_name = (
        getattr(torch.ops.overlap_inductor, f"{schedule}_{'scaled_' * case.scaled}{case.pattern}").default,
        site.group.group_name,
    )
    # The arguments that ``lowerings.one_op.scaled`` passes to an op for its scales.
    scales = (*site.scales, "bfloat16", True) if case.scaled else ()
    chain = torch.zeros(1, dtype=torch.uint8, device=site.device)

    def send() -> torch.Tensor:
        return op(chain, site.a, site.b, None, False, text, group_name, label)[0]

    def gather_output() -> torch.Tensor:
        return op(chain, site.a, site.b, None, True, text, group_name, label)[0]

    def gather() -> torch.Tensor:
        return op(chain, site.a, [site.b], [None], *([s] for s in scales), False, text, group_name, label)[0][0]

    def reduce() -> torch.Tensor:
        return op(chain, site.a, site.b, None, *scales, text, "sum", group_name, label)[0]

    after = {"matmul_all_to_all": send, "matmul_all_gather": gather_output}.get(case.pattern, reduce)
    return Provider(name, gather if site.example.first else after, schedule, settings, _held(case, needs))


def compiled(site: Site, name: str, **switches: Any) -> Provider:
    """A provider that computes the case as a model does. The provider's function is compiled, and has been called once.
    With ``switches``, the package's backend compiles it, else plain Inductor. All ranks call this together.

    Raises:
        RuntimeError: the graph does not hold exactly one site, the site has another schedule than requested, or the
            site has no workspace.
    """
    # Dynamo caches compiled functions by code object, so each provider gets a code object of its own.
    namespace: dict[str, Any] = {"function": plain(site.example, site.group)}
    exec("def layer(*operands): return function(*operands)", namespace)
    if switches:
        options = {"workspace_limit": LIMIT_MIB, "sub_chunks": RING_PARTS, **switches}
        made = torch.compile(namespace["layer"], dynamic=False, backend=overlap_backend, options=options)
    else:
        made = torch.compile(namespace["layer"], dynamic=False)
    # Without ``switches``, overlap stays off even if the environment switches it on.
    with nullcontext() if switches else overlap_inductor.overlap(mode="off"):
        made(*site.operands)
    runs, parameters, needs = "keep", {}, None
    if switches:
        report = overlap_inductor.last_report()
        if report is None or len(report.sites) != 1:
            raise RuntimeError(
                f"{name} of {site.case}: expected one site in the compiled graph, found"
                f" {0 if report is None else len(report.sites)}"
            )
        (found,) = report.sites
        moving = found.decision.moving
        wanted = switches.get("schedule", "auto")
        if wanted not in ("auto", moving.schedule):
            raise RuntimeError(
                f"{name} of {site.case}: compiled as {moving.schedule}: {[r.text for r in found.decision.reasons]}"
            )
        runs, parameters = moving.schedule, moving.parameters
        needs = request(site.case, runs, parameters.get("settings", "{}"), found.facts.id)
        _check_room(site, found.facts.id, name)
    return Provider(name, lambda: made(*site.operands), runs, parameters, _held(site.case, needs))


def _check_room(site: Site, label: str, name: str) -> None:
    if label in workspace_of(site.group, site.device).without_room:
        raise RuntimeError(
            f"{name} of {site.case} has no workspace: more than {LIMIT_MIB} MiB would be held; time fewer or smaller"
            " cases in one run"
        )


def chosen(wanted: Sequence[str], variants: Sequence[Variant], case: Case, device: torch.device) -> list[str]:
    """The names of the providers that can compute the case here: ``keep`` and those in ``wanted``, then the variants.
    In ``wanted``, the name of a schedule stands for the schedule over each of its transports."""
    found = [n for n in provider_names() if n == "keep" or n in wanted or n.split("/")[0] in wanted]
    return [n for n in [*found, *(v.name for v in variants)] if why_not(n, case, device) is None]


def providers(
    site: Site, wanted: Sequence[str], variants: Sequence[Variant], setting: str, made: dict[str, Provider]
) -> list[Provider]:
    """The providers named in ``wanted`` for ``setting``. All ranks call this together.

    Args:
        made: the compiled providers by name. They are used again, and new ones are added.
    """
    found = []
    for name in wanted:
        variant = next((v for v in variants if v.name == name), None)
        kind, _, transport = name.partition("/")
        op = None if kind in ("keep", "async_tp", "auto") else schedule_named(kind.split()[0]).single_op
        graph = setting == "compiled" or kind == "auto" or (op is None and kind not in ("keep", "async_tp"))
        if variant is not None:
            if setting == "hidden":
                found.append(
                    one_op(
                        site, name, variant.schedule, _planned(variant.schedule, site.case, "auto") | variant.parameters
                    )
                )
        elif kind == "async_tp" or (kind == "keep" and not graph):
            found.append(async_tp(site) if kind == "async_tp" else keep(site))
        elif not graph:
            found.append(one_op(site, name, kind, _planned(kind, site.case, transport)))
        else:
            if name not in made:
                switches = {"keep": {}, "auto": {"mode": "on"}}.get(
                    kind, {"mode": "strict", "schedule": kind, "transport": transport}
                )
                made[name] = compiled(site, name, **switches)
            found.append(made[name])
    return found


def _planned(schedule: str, case: Case, transport: str) -> dict[str, Any]:
    """The settings that a plan would choose for the case. Empty if the schedule does not turn a site into one op."""
    op = schedule_named(schedule).single_op
    return {} if op is None else op.settings_of(_call(case), transport)
