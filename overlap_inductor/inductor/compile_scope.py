# SPDX-License-Identifier: Apache-2.0
"""``CompileScope``: what is known about the graph that Inductor is compiling on this thread. Imports nothing of
torch."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport


@dataclass
class CompileScope:
    """One call of Inductor's compiler for one graph.

    Attributes:
        graph_id, is_backward, is_inference, cpp_wrapper: as Inductor was called.
        pinned: the graph must use ``config``, whatever is switched on now. A backward follows its forward so.
        config: the configuration of a pinned scope; ``None`` if overlap is off.
        without_us: the graph was compiled, or loaded from a cache, and the pass has not seen it.
        refusal: why nothing may be overlapped in the graph, or ``None``.
        reports: reports of the pass that no compiled graph carries yet. A subgraph's comes before its graph's.
        seen: FX graphs that the pass has visited, by ``id``. They are kept alive so that no ``id`` is used again.
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
        """``forward``, ``backward`` or ``inference``."""
        if self.is_backward:
            return "backward"
        return "inference" if self.is_inference else "forward"

    def take_reports(self) -> list[OverlapReport]:
        """Remove and return the pending reports, the graph's own before its subgraphs'."""
        reports, self.reports = self.reports[::-1], []
        return reports


class _Local(threading.local):
    scope: CompileScope | None = None
    plain: CompileScope | None = None


_local = _Local()


def current() -> CompileScope | None:
    """The scope of the compile in progress on this thread, the innermost if they nest; ``None`` outside."""
    return _local.scope


@contextmanager
def entered(scope: CompileScope) -> Iterator[CompileScope]:
    """Inside, ``scope`` is ``current`` on this thread."""
    outer, _local.scope = _local.scope, scope
    try:
        yield scope
    finally:
        _local.scope = outer


@contextmanager
def plain(scope: CompileScope) -> Iterator[None]:
    """Compiles inside use ``scope``, which switches overlap off: for the plain program of a graph whose ranks
    differ."""
    outer, _local.plain = _local.plain, scope
    try:
        yield
    finally:
        _local.plain = outer


def forced() -> CompileScope | None:
    """The scope of the enclosing ``plain``, or ``None``."""
    return _local.plain


def current_graph_name() -> str | None:
    """Dynamo's compile id as a name, such as ``0_0``, the same on all ranks; ``None`` outside Dynamo."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return re.sub(r"[^0-9A-Za-z]+", "_", str(compile_id)).strip("_") if compile_id is not None else None


def current_phase() -> str | None:
    """The phase of the graph that Inductor compiles on this thread; ``None`` if it compiles none."""
    scope = current()
    return scope.phase if scope is not None else None


def refusal_context() -> str | None:
    """Why no site may be overlapped in the graph that Inductor compiles now, or ``None``. The reason is that the
    generated code would run in a process without our Python ops (AOTInductor), would call them from C++
    (cpp_wrapper), or is the scope's ``refusal``."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    if V.aot_compilation:
        return "AOTInductor compiles for a program without Python, where overlap_inductor's ops do not exist"
    scope = current()
    if scope is not None and scope.refusal is not None:
        return scope.refusal
    if config.cpp_wrapper or (scope is not None and scope.cpp_wrapper):
        return "torch._inductor.config.cpp_wrapper is on, and overlap_inductor's ops are called from Python only"
    return None
