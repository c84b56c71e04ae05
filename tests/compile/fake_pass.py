# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the overlap pass: it reports one site for each ``aten.mm`` and leaves the graph alone.

Tests use it to check when the pass runs and where its report goes.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.site import Collective
from overlap_inductor.facts.site import Matmul
from overlap_inductor.facts.site import SiteFacts
from overlap_inductor.inductor import compile_scope
from overlap_inductor.report import publish as reporting
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.report import SiteReport

MODULE = "overlap_inductor.passes.overlap_pass"
STATUS = {"status": "overlapped"}
calls: list[tuple[OverlapConfig, bool, str | None]] = []
refusals: list[str | None] = []


def run_overlap_pass(
    graph: torch.fx.Graph,
    config: OverlapConfig,
    *,
    is_inference: bool,
    graph_id: str = "graph",
    refusal: str | None = None,
) -> OverlapReport:
    calls.append((config, is_inference, compile_scope.current_phase()))
    refusals.append(refusal)
    text = str(graph)
    report = OverlapReport(
        overlap_inductor=overlap_inductor.__version__,
        torch=torch.__version__,
        mode=config.mode,
        phase="inference" if is_inference else "unknown",
        graph=graph_id,
        world_size=2,
        config=dict(config.cache_key()),
        before=text,
        after=text,
    )
    for number, node in enumerate(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)):
        report.sites.append(SiteReport(_facts(f"s{number}_{node.name}"), _decision()))
    return report


def _facts(name: str) -> SiteFacts:
    collective = Collective("all_reduce", (0, 1), "0", "float32", reduce_op="sum", bytes=64)
    return SiteFacts(name, "matmul_all_reduce", f"layers.{name}", collective, (Matmul("mm", 4, 4, 4, "float32"),))


def _decision() -> Decision:
    if STATUS["status"] == "overlapped":
        return Decision("overlapped", "forced", [PlanPiece("ring", "p2p")])
    return Decision(STATUS["status"], "analytic", [PlanPiece("keep")], [Reason("made_up", "the test asked for it")])


def substitute() -> ModuleType:
    """A module for ``sys.modules`` in place of the real pass."""
    module = ModuleType(MODULE)
    module.run_overlap_pass = run_overlap_pass  # type: ignore[attr-defined]
    return module


def put_in_place() -> None:
    """Put the fake in place of the pass for the rest of a subprocess."""
    import overlap_inductor.passes

    module = substitute()
    sys.modules[MODULE] = module
    overlap_inductor.passes.overlap_pass = module  # type: ignore[attr-defined]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Put the fake in place of the pass. The test starts with overlap off, caches off and no stored report."""
    import overlap_inductor.passes

    monkeypatch.setitem(sys.modules, MODULE, substitute())
    monkeypatch.setattr(overlap_inductor.passes, "overlap_pass", sys.modules[MODULE], raising=False)
    monkeypatch.setitem(STATUS, "status", "overlapped")
    for name in [n for n in os.environ if n.startswith("OVERLAP_INDUCTOR")]:
        monkeypatch.delenv(name)
    # The patches below hold in this thread only. Other threads still use the caches, so the cache folder starts empty.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    overlap_inductor.disable()
    start_again()
    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(fx_graph_cache=False):
        yield
    overlap_inductor.disable()
    start_again()


def start_again() -> None:
    """Forget compiled code, counters and reports. The overlap switch stays as it is."""
    torch.compiler.reset()
    counters.clear()
    calls.clear()
    refusals.clear()
    reporting.forget_reports()


def count() -> dict[str, int]:
    return dict(counters["overlap_inductor"])


def chain(error: BaseException | None) -> str:
    """The messages of an exception and of its causes. Dynamo wraps a backend's exception."""
    text = ""
    while error is not None:
        text += f"{type(error).__name__}: {error}\n"
        error = getattr(error, "inner_exception", None) or error.__cause__
    return text


def inference(**options: Any) -> None:
    """Reset the compiler, then compile and run one graph with one site."""
    torch.compiler.reset()
    torch.compile(lambda x: x @ x, **options)(torch.ones(2, 2))


def ours_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The lines of the logger ``overlap_inductor``, without those of its child loggers."""
    return [r for r in caplog.records if r.name == "overlap_inductor"]
