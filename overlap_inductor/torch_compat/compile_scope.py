"""What is known about the graph that Inductor is compiling on this thread. Imports nothing of torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report import OverlapReport


@dataclass
class CompileScope:
    """One call of Inductor's compiler for one graph.

    Attributes:
        pinned: the graph must use ``config``, whatever is switched on now (a backward follows its forward).
        without_us: the graph was compiled, or loaded from a cache, without the pass having seen it.
        refusal: why nothing may be overlapped in the graph, if anything speaks against it.
        reports: reports of the pass that no compiled graph carries yet; subgraphs come before their graph.
        seen: FX graphs that the pass has visited, kept alive so that an ``id`` is not used again.
    """

    graph_id: int | None = None
    is_backward: bool = False
    is_inference: bool = False
    cpp_wrapper: bool = False
    pinned: bool = False
    config: OverlapConfig | None = None
    without_us: bool = False
    refusal: str | None = None
    reports: list[OverlapReport] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> CompileScope:
        """The scope of a compile with these keyword arguments of Inductor's ``compile_fx_inner``."""
        return cls(
            graph_id=keywords.get("graph_id"),
            is_backward=bool(keywords.get("is_backward")),
            is_inference=bool(keywords.get("is_inference")),
            cpp_wrapper=bool(keywords.get("cpp_wrapper")),
        )

    @property
    def phase(self) -> str:
        if self.is_backward:
            return "backward"
        return "inference" if self.is_inference else "forward"

    def take_reports(self) -> list[OverlapReport]:
        """The pending reports, the graph's own before its subgraphs', each handed out once."""
        reports, self.reports = self.reports[::-1], []
        return reports


class _Local(threading.local):
    scope: CompileScope | None = None
    plain: CompileScope | None = None


_local = _Local()


def current() -> CompileScope | None:
    """The compile in progress on this thread, the innermost if they nest."""
    return _local.scope


@contextmanager
def entered(scope: CompileScope) -> Iterator[CompileScope]:
    outer, _local.scope = _local.scope, scope
    try:
        yield scope
    finally:
        _local.scope = outer


@contextmanager
def plain(scope: CompileScope) -> Iterator[None]:
    """What is compiled inside runs in ``scope``, which switches overlap off: the plain program of a graph whose ranks differ."""
    outer, _local.plain = _local.plain, scope
    try:
        yield
    finally:
        _local.plain = outer


def forced() -> CompileScope | None:
    """The scope of ``plain`` around this call, if any."""
    return _local.plain
