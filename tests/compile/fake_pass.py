"""A stand-in for the overlap pass: it reports one site for each matmul and leaves the graph alone.

The tests of installing, caching and reporting are about when the pass runs and what becomes of its report; what it
finds is other tests' business.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

import overlap_inductor
from overlap_inductor.config import OverlapConfig
from overlap_inductor.report import OverlapReport
from overlap_inductor.report import SiteReport
from overlap_inductor.schedule import Decision
from overlap_inductor.schedule import PlanPiece
from overlap_inductor.schedule import Reason
from overlap_inductor.site import Collective
from overlap_inductor.site import Matmul
from overlap_inductor.site import SiteFacts
from overlap_inductor.torch_compat import hooks

MODULE = "overlap_inductor.passes.overlap_pass"
STATUS = {"status": "overlapped"}
calls: list[tuple[OverlapConfig, bool, str | None]] = []
refusals: list[str | None] = []


def run_overlap_pass(
    graph: torch.fx.Graph, config: OverlapConfig, *, is_inference: bool, graph_id: str = "graph", refusal: str | None = None
) -> OverlapReport:
    calls.append((config, is_inference, hooks.current_phase()))
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
    """A module to stand in ``sys.modules`` for the real pass."""
    module = ModuleType(MODULE)
    module.run_overlap_pass = run_overlap_pass  # type: ignore[attr-defined]
    return module


def put_in_place() -> None:
    """For a subprocess: the fake is the pass from here on."""
    import overlap_inductor.passes

    module = substitute()
    sys.modules[MODULE] = module
    overlap_inductor.passes.overlap_pass = module  # type: ignore[attr-defined]
