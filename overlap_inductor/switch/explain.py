# SPDX-License-Identifier: Apache-2.0
"""``explain``: report what would be overlapped in a function or a model, without generating code."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report import totals
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.switch import install

_NO_GRAPH = "No graph was compiled: the call ran no tensor operation that torch.compile could trace."


@dataclass(frozen=True)
class Explanation:
    """The reports of the graphs that a call compiles, in order. ``str()`` gives a short text, ``to_text()`` the whole
    reports. Both end with the estimated time of all sites, if there are any."""

    reports: list[OverlapReport]

    @property
    def total(self) -> str:
        """The estimated time of all sites together, as written and as planned; empty without sites."""
        return totals.line_of_all(self.reports)

    def __str__(self) -> str:
        return "\n".join(filter(None, [*map(str, self.reports), self.total])) or _NO_GRAPH

    def _repr_html_(self) -> str:
        from overlap_inductor.report.html.notebook import render_compact

        total = f"<p>{html.escape(self.total)}</p>" if self.total else ""
        return "".join(map(render_compact, self.reports)) + total or _NO_GRAPH

    def to_text(self) -> str:
        """The text of every report, as in ``report.txt``."""
        texts = [report.to_text() for report in self.reports] + ([f"{self.total}\n"] if self.total else [])
        return "\n".join(texts) or f"{_NO_GRAPH}\n"


def explain(fn: Callable[..., Any], *args: Any, config: OverlapConfig | None = None, **kwargs: Any) -> Explanation:
    """Trace ``fn(*args, **kwargs)``, and its backward if something requires a gradient, and report on every graph.

    Compiled regions compute nothing and return zeros. Code between them (after a graph break) runs on these zeros. No
    report is counted, logged or written. All code that Dynamo has compiled in this process is dropped
    (``torch.compiler.reset()``).

    Args:
        config: the switches. By default, the switches in force, or the environment's. Mode ``off`` counts as
            ``report``.

    Raises:
        ConfigError: the environment holds a value that is not allowed.
        UnsupportedError: this torch is too old or too new.
    """
    import torch

    from overlap_inductor.inductor import graph_breaks
    from overlap_inductor.inductor import post_grad
    from overlap_inductor.inductor.compile_scope import CompileScope
    from overlap_inductor.inductor.compile_scope import current_graph_name
    from overlap_inductor.switch.backend import compile_with

    install.require_supported_torch()
    config = config or install.effective() or OverlapConfig.from_environment()
    if config.mode == "off":
        config = dataclasses.replace(config, mode="report")
    reports: list[OverlapReport] = []

    def compile_one(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Any:
        scope = CompileScope.of(keywords)
        post_grad.run_post_grad_passes(gm, example_inputs, scope)
        for report in scope.take_reports():
            report.graph = current_graph_name() or report.graph
            report.notices += graph_breaks.new_notices()
            reports.append(report)
        return post_grad.zeros_like_outputs(gm)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_with(config, gm, example_inputs, None, {}, inner_compile=compile_one)

    fn = post_grad.without_compile_wrappers(fn)
    torch.compiler.reset()
    try:
        with post_grad.every_graph_compiled_now(), post_grad.in_place_compile_undone(fn):
            torch.compile(fn, backend=backend)(*args, **kwargs)
    finally:
        torch.compiler.reset()
    return Explanation(reports)
