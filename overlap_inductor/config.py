# SPDX-License-Identifier: Apache-2.0
"""``OverlapConfig``: every switch. Values are checked when a config is made, not at import: a bad variable is an error
of the call that uses it, not of ``import torch``."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from overlap_inductor.errors import ConfigError
from overlap_inductor.facts import machine_file
from overlap_inductor.facts import names

ENVIRONMENT_PREFIX = "OVERLAP_INDUCTOR"
MODES = ("off", "report", "on", "strict")
MODE_ALIASES = {"0": "off", "1": "on", "": "off"}
NUMERICS = ("preserve", "allow_hop_rounding")
SWITCH = ("off", "on")


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX if name == "mode" else f"{ENVIRONMENT_PREFIX}_{name.upper()}"


def _wrong(name: str, value: Any, problem: str) -> ConfigError:
    error = ConfigError(f"{_variable(name)}={value!r} {problem}")
    error.field, error.problem = name, problem
    return error


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise _wrong(name, value, f"is not a known value; expected one of: {', '.join(allowed)}")
    return value


def _named(name: str, value: Any, always: tuple[str, ...], known: names.Names) -> str:
    """``value`` if it is one of ``always`` or ``known``. Imports the registry of ``known`` only if needed."""
    return value if value in always else _choice(name, value, (*always, *known.known()))


def _positive(name: str, value: Any, or_else: str = "") -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise _wrong(name, value, f"is not allowed; expected a whole number of at least 1{or_else}")
    return number


def _machine_facts(value: Any) -> str | None:
    """The facts as JSON text. ``value``: the path of a JSON file, or JSON text; if it is empty, returns ``None``."""
    if not isinstance(value, (str, os.PathLike)):
        raise _wrong("machine", value, "is not allowed; expected the path of a JSON file, or a JSON object as text")
    try:
        return machine_file.read(os.fspath(value)) if os.fspath(value) else None
    except ValueError as error:
        raise _wrong("machine", value, str(error)) from None


def _key(default: Any) -> Any:
    return field(default=default, metadata={"cache_key": True})


def _no_key(default: Any) -> Any:
    """A field that changes no generated code."""
    return field(default=default, metadata={"cache_key": False})


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """All switches. Field ``x`` is also the environment variable ``OVERLAP_INDUCTOR_X`` (``mode``:
    ``OVERLAP_INDUCTOR``).

    Raises:
        ConfigError: a field has a value that is not allowed.
    """

    mode: str = _key("on")
    """``off`` | ``report`` | ``on`` | ``strict``. ``report``: find and explain sites, and leave the graph alone.
    ``strict``: as ``on``, but raise an error if a site is refused or something fails."""

    schedule: str = _key("auto")
    """``auto``, ``keep`` (leave every site as written) or a schedule's name. A named schedule applies wherever it is
    legal, whatever the cost."""

    transport: str = _key("auto")
    """``auto`` or a transport's name."""

    patterns: tuple[str, ...] = field(default_factory=names.PATTERNS.known, metadata={"cache_key": True})
    """The patterns that may be overlapped (in the environment: names separated by commas)."""

    numerics: str = _key("preserve")
    """``preserve``: partial sums are sent once and summed once in fp32. ``allow_hop_rounding``: an accumulator may
    travel from rank to rank, rounded at each hop."""

    sequence_parallel: str = _key("auto")
    """``auto`` | ``on`` | ``off``: whether all-reduces become reduce-scatters and all-gathers. Each rank then does the
    token-wise work between them on its own rows. ``auto``: where this is estimated to pay. ``on``: wherever it is
    legal."""

    tune: str = _key("off")
    """``off`` | ``on``: whether schedules are measured instead of estimated. ``on`` is not available yet and raises
    ``ConfigError``."""

    ring_direction: str = _key("unidirectional")
    """``unidirectional`` | ``bidirectional``: whether gathered shards travel around the ring in one direction or in
    both."""

    sub_chunks: int | str = _key("auto")
    """S: the largest number of sub-chunks into which schedule ``ring`` cuts each shard, or ``auto``. ``auto`` is 4. If
    the ring is forced on a CPU, then for the patterns ``all_gather_matmul`` and ``matmul_reduce_scatter`` ``auto`` is 4
    divided by the number of ranks, rounded up. For embedding tables, the ring sends at most ``4 * S`` groups of tables
    instead. On CPUs, schedule ``auto`` takes the fewest sub-chunks, at most S, whose estimated time is at most 5 %
    above the shortest. So does a forced ring, with S = 4, if ``machine`` is set and ``sub_chunks`` is not. A seam in
    [bands](sequence-parallel.md) has as many sub-chunks as it has bands. The cost model assumes that
    ``1 / (world_size * S)`` of the shorter of matmul and transfer stays exposed."""

    step_node_budget: int = _key(3000)
    """The number of FX nodes that the unrolled steps of schedule ``ring`` may add to one graph. A site that does not
    fit becomes one looping op, or is refused if no looping op computes it. Sites without a looping op are unrolled
    first, in graph order. Then come the other sites, in graph order."""

    workspace_limit: int = _key(4096)
    """The most symmetric memory that one group's sites may hold on each rank, in MiB. Sites that do not fit
    run as written."""

    max_tokens: int = _key(16384)
    """The largest token count for which a site of dynamic size holds workspace. Calls with more tokens run as
    written."""

    replay: str = _key("on")
    """``on``: a site's launches are replayed as one CUDA graph if its tensors have the addresses of an earlier call.
    ``off``: each call makes its launches one by one."""

    agreement_timeout: int = _key(300)
    """Seconds that a rank waits for the other ranks' plans of a graph, at most half of the group's timeout."""

    machine: str | None = _key(None)
    """The path of a JSON file, or a JSON object, with figures of this job's ranks and links, such as ``{"link_bytes":
    6.25e7}``. ``auto`` estimates with them, and so does a
    forced ring on a CPU. Other figures keep their shipped values. The field holds the file's
    content, so cache keys depend on the content."""

    dump: str | None = _no_key(None)
    """Folder for reports; not part of any cache key."""

    notice: str = _no_key("on")
    """``on``: rank 0 writes one line to standard error, or to the program's own log handlers, for each compiled graph
    that has a collective. ``off``: the line goes only to the log, at level INFO. Not part of any cache key."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        mode = MODE_ALIASES.get(str(self.mode), self.mode)
        if mode not in MODES:
            raise _wrong("mode", self.mode, f"is not a known value; expected one of: {', '.join(MODES)}, 0, 1")
        set_(self, "mode", mode)
        _named("schedule", self.schedule, ("auto", "keep"), names.SCHEDULES)
        _named("transport", self.transport, ("auto",), names.TRANSPORTS)
        _choice("numerics", self.numerics, NUMERICS)
        _choice("sequence_parallel", self.sequence_parallel, ("auto", *reversed(SWITCH)))
        _choice("tune", self.tune, SWITCH)
        _choice("replay", self.replay, SWITCH)
        _choice("notice", self.notice, SWITCH)
        if self.tune == "on":
            raise _wrong("tune", "on", "is not available in this version; expected 'off'")
        _choice("ring_direction", self.ring_direction, ("unidirectional", "bidirectional"))
        patterns = self.patterns.split(",") if isinstance(self.patterns, str) else self.patterns
        if not isinstance(patterns, (list, tuple)) or not all(isinstance(p, str) for p in patterns):
            known = ", ".join(names.PATTERNS.known())
            problem = f"is not a list of pattern names; expected names separated by commas, from: {known}"
            raise _wrong("patterns", self.patterns, problem)
        patterns = tuple(p.strip() for p in patterns if p.strip())
        for pattern in patterns:
            _choice("patterns", pattern, names.PATTERNS.known())
        set_(self, "patterns", patterns)
        for name in ("step_node_budget", "workspace_limit", "max_tokens", "agreement_timeout"):
            set_(self, name, _positive(name, getattr(self, name)))
        if self.sub_chunks != "auto":
            set_(self, "sub_chunks", _positive("sub_chunks", self.sub_chunks, " or 'auto'"))
        if self.machine is not None:
            set_(self, "machine", _machine_facts(self.machine))
        if self.dump is not None:
            if not isinstance(self.dump, (str, os.PathLike)):
                raise _wrong("dump", self.dump, "is not allowed; expected the path of a folder")
            set_(self, "dump", os.fspath(self.dump) or None)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **overrides: Any) -> OverlapConfig:
        """The environment's switches, with keyword ``overrides`` on top.

        Args:
            environment: the variables; by default ``os.environ``.

        Raises:
            ConfigError: a value is not allowed, or an override is not a field. In modes other than ``off``, also if a
                variable ``OVERLAP_INDUCTOR_...`` is not a switch.
        """
        environment = os.environ if environment is None else environment
        names = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(overrides) - names)
        if unknown:
            raise ConfigError(f"{', '.join(unknown)}: no such switch; expected one of: {', '.join(sorted(names))}")
        values: dict[str, Any] = {n: environment[_variable(n)] for n in names if _variable(n) in environment}
        values.update(overrides)
        config = cls(**values)
        if config.mode != "off":
            _refuse_unknown(environment)
        return config

    def cache_key(self) -> tuple[tuple[str, Any], ...]:
        """All fields except ``dump`` and ``notice``, as ``(name, value)``, for a pass's ``uuid`` and a rank's plan."""
        return tuple((f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.metadata["cache_key"])


def variables() -> tuple[str, ...]:
    """Every environment variable that the package knows, in the order of the fields."""
    return tuple(_variable(f.name) for f in dataclasses.fields(OverlapConfig))


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    """Raises ``ConfigError`` if a variable has the package's prefix but is not a switch: it may be a misspelt one."""
    for variable in sorted(environment):
        if reason := why_unknown(variable):
            raise ConfigError(f"{variable}={environment[variable]!r} is {reason}")


def why_unknown(variable: str) -> str:
    """What is wrong with a variable that has the package's prefix but is not a switch. The text names the nearest
    switch, or all switches if none is near. For any other variable, the text is empty."""
    if not variable.startswith(f"{ENVIRONMENT_PREFIX}_") or variable in variables():
        return ""
    fields = [f.name for f in dataclasses.fields(OverlapConfig)]
    near = difflib.get_close_matches(variable.removeprefix(f"{ENVIRONMENT_PREFIX}_").lower(), fields, n=1)
    meant = f"Did you mean {_variable(near[0])}?" if near else f"The switches are {', '.join(variables())}."
    return f"not a switch of overlap_inductor. {meant} Rename or unset it."
