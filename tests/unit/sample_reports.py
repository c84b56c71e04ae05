# SPDX-License-Identifier: Apache-2.0
"""Hand-written reports for tests of the code that shows reports."""

from __future__ import annotations

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import PlanPiece
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.site import Collective
from overlap_inductor.facts.site import Matmul
from overlap_inductor.facts.site import SiteFacts
from overlap_inductor.report.failure import Failure
from overlap_inductor.report.report import NearMiss
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.report.report import SiteReport

BEFORE = """\
arg0_1: bfloat16[s0, 3584] = input
arg1_1: bfloat16[3584, 8192] = input
mm: bfloat16[s0, 8192] = aten.mm.default(arg0_1, arg1_1)
all_reduce: bfloat16[s0, 8192] = _c10d_functional.all_reduce.default(mm, 'sum', '0')
wait_tensor: bfloat16[s0, 8192] = _c10d_functional.wait_tensor.default(all_reduce)
return (wait_tensor,)
"""
AFTER = """\
arg0_1: bfloat16[s0, 3584] = input
arg1_1: bfloat16[3584, 8192] = input
loop: bfloat16[s0, 8192] = overlap_inductor.loop.default(arg0_1, arg1_1, '0', 'mmar-lm_head')
return (loop,)
"""
ALL_REDUCE = Collective("all_reduce", tuple(range(8)), "0", "bfloat16", "tp", None, None, "sum", "16384*s0")
ALL_GATHER = Collective("all_gather_into_tensor", (0, 1), "1", "float32", None, 1, "M", None, 4 << 20)
ESTIMATE = {"keep": 1342.0, "ring": 901.5, "matmul": 644.0, "collective": 698.0}
RING = PlanPiece(
    "ring", "p2p", (512, None), {"sub_chunks": 4, "route": "owner", "unrolled": False, "min_rows": 512}, ESTIMATE
)
KEEP = PlanPiece("keep", None, (0, 511))
CHEAP = PlanPiece("keep", None, (0, None), {}, {"keep": 95.0, "ring": 140.25, "matmul": 60.0, "collective": 35.0})


def site(module: str, decision: Decision, k: int = 3584, identity: str = "") -> SiteReport:
    matmul = Matmul("mm", "s0", 8192, k, "bfloat16", role="M")
    facts = SiteFacts(identity or f"mmar-{module}", "matmul_all_reduce", module, ALL_REDUCE, (matmul,))
    return SiteReport(facts, decision)


def overlapped() -> Decision:
    return Decision("overlapped", "analytic", [KEEP, RING])


def refused(module: str) -> Decision:
    text = f"{module}: the matmul's result has 2 users, expected only the collective"
    return Decision("refused", "analytic", [], [Reason("other_users", text)])


def empty(**fields: object) -> OverlapReport:
    values: dict[str, object] = {"graph": "0_0", "phase": "inference", "mode": "on", "world_size": 8}
    config = {name: list(v) if isinstance(v, tuple) else v for name, v in OverlapConfig().cache_key()}
    return OverlapReport(overlap_inductor="0.1.0", torch="2.13.0", config=config, **{**values, **fields})


def llama(layers: int) -> OverlapReport:
    """``layers`` decoder layers, each with two sites and one near miss, and a head whose site is refused."""
    report = empty(before=BEFORE, after=AFTER, plan_hash="5ad3c0de")
    for layer in range(layers):
        report.sites.append(site(f"layers.{layer}.self_attn.o_proj", overlapped(), 1024))
        report.sites.append(site(f"layers.{layer}.mlp.down_proj", overlapped()))
        reason = Reason(
            "op_between", f"aten.relu stands between mm_{layer} and the collective and does not commute with it"
        )
        report.near_misses.append(NearMiss(ALL_GATHER, reason, f"layers.{layer}.norm"))
    report.sites.append(site("lm_head", refused("lm_head")))
    report.notices.append("micro_pipeline_tp is on and ran first: the sites that it took are not listed here")
    return report


def block() -> OverlapReport:
    """The report of one transformer block that was compiled by itself. Its only site, a gather before two matmuls, is
    kept. The module's name has no layer number, and all sizes of the site are ints."""
    matmul = Matmul("mm", 2048, 3584, 8192, "float32", role="M")
    gather = SiteFacts("agmm-1", "all_gather_matmul", "feed_forward.w1", ALL_GATHER, (matmul, matmul))
    cost = Reason("too_small", "estimated 140 us as a ring against 95 us as it is (matmul 60, collective 35)")
    report = empty(graph="1_0", phase="forward", world_size=2, before=BEFORE, after=BEFORE)
    report.sites.append(SiteReport(gather, Decision("kept", "analytic", [CHEAP], [cost])))
    return report


def planned(pattern: str, kind: str, piece: PlanPiece, module: str, status: str = "overlapped") -> SiteReport:
    """A site of 8 ranks. Its plan has one piece, for all token counts."""
    reduce_op = "sum" if kind in ("all_reduce", "reduce_scatter") else None
    collective = Collective(kind, tuple(range(8)), "0", "bfloat16", "tp", 0, "M", reduce_op, 64 << 20)
    facts = SiteFacts(f"{pattern}-{module}", pattern, module, collective, (Matmul("mm", 4096, 8192, 3584, "bfloat16"),))
    return SiteReport(facts, Decision(status, "analytic", [piece]))


def _piece(schedule: str, transport: str | None, us: float, overlaps: bool = True, **parameters: object) -> PlanPiece:
    estimate = {"keep": 1342.0, "matmul": 644.0, "collective": 698.0, schedule: us}
    return PlanPiece(schedule, transport, (0, None), parameters, estimate, overlaps)


PIECES = {
    "ring gather": ("all_gather_matmul", "all_gather", _piece("ring", "p2p", 905.5, route="ring", sub_chunks=4)),
    "ring both ways": (
        "all_gather_matmul",
        "all_gather",
        _piece("ring", "p2p", 850.0, route="bidirectional", sub_chunks=2),
    ),
    "ring scatter": (
        "matmul_reduce_scatter",
        "reduce_scatter",
        _piece("ring", "p2p", 902.0, route="owner", sub_chunks=4),
    ),
    "ring travelling": (
        "matmul_reduce_scatter",
        "reduce_scatter",
        _piece("ring", "p2p", 940.0, route="travel", sub_chunks=1),
    ),
    "ring reduce": ("matmul_all_reduce", "all_reduce", _piece("ring", "p2p", 1010.0, route="owner", sub_chunks=4)),
    "ring head": ("matmul_all_gather", "all_gather", _piece("ring", "p2p", 880.0, route="broadcast", sub_chunks=4)),
    "ring slower": ("matmul_all_reduce", "all_reduce", _piece("ring", "p2p", 1610.0, route="owner", sub_chunks=4)),
    "fused gather": ("all_gather_matmul", "all_gather", _piece("fused", "sm_push", 780.0, settings="{}")),
    "fused scatter": ("matmul_reduce_scatter", "reduce_scatter", _piece("fused", "sm_push", 760.0, settings="{}")),
    "chunked reduce": ("matmul_all_reduce", "all_reduce", _piece("chunked", "copy_engine", 990.0, settings="{}")),
    "wave groups": ("matmul_all_reduce", "all_reduce", _piece("wave_groups", "nccl", 1100.0, settings="{}")),
    "small message": (
        "matmul_all_reduce",
        "all_reduce",
        _piece("small_message", "sm_push", 655.0, False, settings="{}"),
    ),
    "early start": ("attention_all_to_all", "all_to_all", _piece("early_start", None, 720.0)),
}
"""``{name: (pattern, kind of the pattern's collective, piece)}``, with every schedule except ``keep``, and every route
of the ring except ``direct``. One piece is slower than the plain graph."""


def every_schedule() -> OverlapReport:
    """One site for each of ``PIECES``."""
    report = empty(before=BEFORE, after=AFTER, plan_hash="5ad3c0de")
    report.sites = [
        planned(pattern, kind, piece, name.replace(" ", "_")) for name, (pattern, kind, piece) in PIECES.items()
    ]
    return report


def hostile() -> OverlapReport:
    """Names, reasons, notice and the graph before the pass hold markup. A page must show the markup as text, and
    never run it."""
    markup = "</script><script>alert('x')</script><img src=https://example.invalid/a.png>"
    report = empty(graph="2_0", before=BEFORE + f"# {markup}\n", after=AFTER, notices=[markup])
    report.sites.append(site(f"layers.0.{markup}", refused(markup), identity=markup))
    report.near_misses.append(NearMiss(ALL_GATHER, Reason(markup, markup), markup))
    return report


def broken() -> OverlapReport:
    """The report of a graph on which the pass failed."""
    try:
        raise KeyError("made up")
    except KeyError as error:
        failure = Failure.of(error, "pass")
    return empty(graph="3_0", before=BEFORE, after=BEFORE, failures=[failure])
