# SPDX-License-Identifier: Apache-2.0
"""``CompileScope``: facts about the graph that Inductor is compiling on this thread.

Importing this module does not import torch.
"""

from __future__ import annotations

import re
import threading
import weakref
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
        graph_id, is_backward, is_inference, cpp_wrapper: arguments of ``compile_fx_inner``.
        pinned: whether the graph must use ``config``, not what is switched on now. A backward is pinned to its
            forward's configuration.
        config: the configuration of a pinned scope. If overlap is off: ``None``, or mode ``off``.
        without_us: whether the compiled graph was made without the pass. It may have been compiled so now, or come from
            a cache.
        refusal: why nothing may be overlapped in the graph, or ``None``.
        reports: reports that are not yet stored with a compiled graph. A graph's report follows those of its subgraphs.
        seen: FX graphs that the pass has visited, by ``id``. The dictionary keeps them alive, so no ``id`` is reused.
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
        """Remove and return the pending reports, the graph's own before its subgraphs'."""
        reports, self.reports = self.reports[::-1], []
        return reports


_as_written: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def keep_as_written(gm: Any, written: Any) -> None:
    """Remember ``written`` for the inference graph ``gm``: a copy of ``gm`` that was made before our passes rewrote
    ``gm``. Inductor also runs the passes of the joint graph, ours included, on inference graphs."""
    _as_written[gm] = written


def as_written(gm: Any) -> Any:
    """What ``keep_as_written`` remembered for ``gm``, or ``None``."""
    return _as_written.get(gm)


class _Local(threading.local):
    scope: CompileScope | None = None
    plain: CompileScope | None = None


_local = _Local()


def current() -> CompileScope | None:
    """The scope of the innermost compile in progress on this thread, or ``None``."""
    return _local.scope


@contextmanager
def entered(scope: CompileScope) -> Iterator[CompileScope]:
    """Inside the ``with`` block, ``current`` returns ``scope`` on this thread."""
    outer, _local.scope = _local.scope, scope
    try:
        yield scope
    finally:
        _local.scope = outer


@contextmanager
def plain(scope: CompileScope) -> Iterator[None]:
    """Inside the ``with`` block, this thread compiles plain programs. ``scope`` must be pinned, with overlap off."""
    outer, _local.plain = _local.plain, scope
    try:
        yield
    finally:
        _local.plain = outer


def forced() -> CompileScope | None:
    """The scope of the ``plain`` block around the caller, or ``None``."""
    return _local.plain


def current_graph_name() -> str | None:
    """Dynamo's compile id as a name, such as ``0_0``; ``None`` outside Dynamo. Ranks that compile the same graphs in
    the same order get equal names."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return re.sub(r"[^0-9A-Za-z]+", "_", str(compile_id)).strip("_") if compile_id is not None else None


def current_phase() -> str | None:
    """The phase of the graph that this thread compiles, or ``None``."""
    scope = current()
    return scope.phase if scope is not None else None


def refusal_context() -> str | None:
    """Why no site may be overlapped in the graph being compiled, or ``None``. Code of AOTInductor and of
    ``cpp_wrapper`` cannot call our Python ops. The scope's ``refusal`` may be another reason."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    if V.aot_compilation:
        return "AOTInductor's code runs without Python, but overlap_inductor's ops can only be called from Python"
    scope = current()
    if scope is not None and scope.refusal is not None:
        return scope.refusal
    if config.cpp_wrapper or (scope is not None and scope.cpp_wrapper):
        return "torch._inductor.config.cpp_wrapper is on, but overlap_inductor's ops can only be called from Python"
    return None
