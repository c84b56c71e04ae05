# SPDX-License-Identifier: Apache-2.0
"""A graph for every reason why a site is refused, kept or failed. First come the graphs with a
reason of a check, in the order of the checks. Then come the graphs with a reason of the plan or of the rewrite."""

from __future__ import annotations

import pytest
import torch

from overlap_inductor.passes.rewrite import Rewriter
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat import symmetric
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten
from tests.support.hand_graph import c10d
from tests.unit.reasons import case
from tests.unit.reasons import gather_site
from tests.unit.reasons import reduce_site
from tests.unit.reasons import weight

# Checks of passes/check.py


@case("backend_not_supported", "refused")
def _() -> OverlapReport:
    return gather_site().run(refusal="this is compiled ahead of time")


@case("switched_off", "kept", "pattern")
def _() -> OverlapReport:
    return gather_site().run(patterns=("matmul_all_reduce",))


@case("switched_off", "kept", "schedule")
def _() -> OverlapReport:
    return gather_site().run(schedule="keep")


@case("world_size_one", "kept")
def _() -> OverlapReport:
    return gather_site().run()


@case("reduce_op", "refused")
def _() -> OverlapReport:
    return reduce_site("max").run()


@case("dtype", "refused", "matmul")
def _() -> OverlapReport:
    made = HandGraph()
    x, w = made.input(4, 16, dtype=torch.int32), made.input(16, 8, dtype=torch.int32, name="w")
    return made.output(made.mm(made.gather(x), w)).run()


@case("dtype", "refused", "collective")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(4, 16, dtype=torch.int8))
    return made.output(
        made.mm(made.call(torch.ops.prims.convert_element_type.default, gathered, torch.float32), weight(made))
    ).run()


@case("other_users", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(4, 16), weight(made))
    return made.output(made.reduce(y), y).run()


@case("strides", "refused")
def _() -> OverlapReport:
    made = gather_site()
    x = next(iter(made.graph.nodes))
    with made.mode:
        x.meta["val"] = torch.empty(4, 16).to_sparse()
    return made.run()


@case("dynamic_shape", "refused", "unbacked")
def _() -> OverlapReport:
    made = HandGraph()
    return made.output(made.mm(made.gather(made.unbacked_input(16)), weight(made))).run()


@case("not_divisible", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(5, 16), weight(made))
    started = made.graph.call_function(c10d.reduce_scatter_tensor.default, (y, "sum", 2, made.group))
    with made.mode:
        started.meta["val"] = torch.empty(2, 8)
    return made.output(made.wait(started)).run()


@case("shares_nodes", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.gather(made.input(4, 16)), weight(made))
    return made.output(made.scatter(y)).run()


@case("stream_boundary", "refused")
def _() -> OverlapReport:
    made = gather_site()
    next(n for n in made.graph.nodes if n.target is aten.mm.default).meta["custom"] = {"stream": 1}
    return made.run()


@case("mutation", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    x, w, other = made.input(4, 16), weight(made), weight(made, name="other")
    gathered = made.gather(x)
    made.call(aten.copy_.default, w, other)
    return made.output(made.mm(gathered, w)).run()


@case("hoist", "refused", "over a collective")
def _() -> OverlapReport:
    """One matmul's result is read before the all-reduce, so the site's steps must come before the all-reduce. But the
    other matmul's weight is the result of the all-reduce."""
    made = HandGraph()
    gathered = made.gather(made.input(4, 16))
    early = made.call(aten.relu.default, made.mm(gathered, weight(made, name="v")))
    w = made.reduce(weight(made))
    return made.output(early, made.mm(gathered, w)).run()


@case("hoist", "refused", "over an accepted site")
def _() -> OverlapReport:
    """The first site's weight is the result of an all-reduce, which must not move up to the first gather. So the first
    site's steps are written just before the first reader of its result, the second site's matmul. ``beside`` reads the
    second gathered tensor, and stands before that matmul. So the second site's steps must come before ``beside``. But
    these steps compute that matmul, so they read the first site's result, which is computed only after ``beside``."""
    made = HandGraph()
    first = made.gather(made.input(4, 16))
    w = made.reduce(weight(made))
    second = made.gather(made.input(4, 8, name="y"))
    beside = made.call(aten.cumsum.default, second, 0)
    return made.output(beside, made.mm(second, made.mm(first, w))).run()


@case("hoist", "refused", "of an accepted site")
def _() -> OverlapReport:
    """The first site's steps must come before ``early``, which reads one of the site's results. But the first site's
    other matmul reads ``late``, the second site's result, which is computed after ``early``."""
    made = HandGraph()
    first = made.gather(made.input(4, 8))
    second = made.gather(made.input(4, 16, name="y"))
    w = made.reduce(weight(made))
    early = made.call(aten.relu.default, made.mm(first, weight(made, 8, 4, name="v")))
    late = made.mm(second, w)
    return made.output(early, made.mm(first, late)).run()


# The plan and the rewrite


@case("too_small", "kept")
def _() -> OverlapReport:
    return gather_site().run(schedule="auto")


@case("host_bound", "kept")
def _() -> OverlapReport:
    made = HandGraph()
    results = [
        made.mm(made.gather(made.input(2048, 4096, name=f"x{i}")), weight(made, 4096, 64, name=f"w{i}"))
        for i in range(2)
    ]
    return made.output(*results).run(schedule="auto", machine='{"launch_seconds": 10, "call_seconds": 10}')


@case("dynamic_shape", "kept", "no op can choose at run time")
def _() -> OverlapReport:
    made = HandGraph()
    x = made.input(8, 2**13, 1024, dynamic=[1])
    gathered = made.gather(x)
    tokens = gathered.meta["val"].shape[1]
    flat = made.view(made.call(aten.permute.default, gathered, [1, 0, 2]), tokens * 16, 1024)
    return made.output(made.mm(flat, weight(made, 1024, 64))).run(schedule="auto")


@case("dynamic_shape", "kept", "nothing to estimate with")
def _() -> OverlapReport:
    made = HandGraph()
    x = made.unbacked_input(16)
    sizes = [made.call(aten.sym_size.int, x, 0) for _ in range(2)]
    exchanged = made.wait(made.call(c10d.all_to_all_single.default, x, sizes, sizes, made.group))
    return made.output(made.mm(exchanged, weight(made))).run(schedule="auto")


@case("uneven_splits", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    y = made.mm(made.input(4, 16), weight(made))
    scaled = made.call(aten.add.Tensor, y, made.input(name="scalar"))
    return made.output(made.wait(made.call(c10d.all_to_all_single.default, scaled, [2, 2], [1, 3], made.group))).run()


@case("too_many_steps", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    joined = made.gather_on(made.input(3, 4, 8), 1)
    return made.output(made.call(aten.bmm.default, joined, made.input(3, 8, 5, name="w"))).run(step_node_budget=1)


@case("moving_pass", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    joined = made.gather_on(made.input(3, 4, 8), 1)
    with torch._inductor.config.patch(bucket_all_gathers_fx="all"):
        return made.output(made.call(aten.bmm.default, joined, made.input(3, 8, 5, name="w"))).run()


def bf16_site(made: HandGraph) -> HandGraph:
    gathered = made.gather(made.input(8, 16, dtype=torch.bfloat16))
    return made.output(made.mm(gathered, made.input(16, 8, name="w", dtype=torch.bfloat16)))


@case("schedule_not_available", "refused", "no GPUs")
def _() -> OverlapReport:
    return bf16_site(HandGraph()).run(schedule="fused")


@case("schedule_not_available", "refused", "the ring over a transport that is not its own")
def _() -> OverlapReport:
    return gather_site().run(transport="sm_push")


@case("workspace", "refused")
def _() -> OverlapReport:
    made = HandGraph()
    gathered = made.gather(made.input(2**12, 128, dtype=torch.bfloat16))
    made.output(made.mm(gathered, made.input(128, 8, name="w", dtype=torch.bfloat16)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "why_no_symmetric_memory", lambda ranks, device: None)
        return made.run(schedule="fused", workspace_limit=1)


@case("report_mode", "kept")
def _() -> OverlapReport:
    return gather_site().run(mode="report")


@case("rewrite_failed", "failed")
def _() -> OverlapReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rewriter, "_chain_kept_collectives", lambda self: 1 / 0)
        return gather_site().run()
