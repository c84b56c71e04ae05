# SPDX-License-Identifier: Apache-2.0
"""With a dynamic number of tokens, two graphs serve all counts: one as written, where the host is the limit, and one
with overlap."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks

MACHINE = '{"link_bytes": 1e8, "matmul_flops": {"4": 1e11}, "launch_seconds": 1e-3, "call_seconds": 1e-3}'
"""Two all-reduces and four matmuls need 6 ms of the host. The device needs 2 ms for 64 tokens and 127 ms for 4096. It
must need 2.2 times as long as the host."""
COUNTS = (64, 900, 100, 800, 700, 5000, 64)


def _run(rank: int, world_size: int) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    from overlap_inductor.report import publish
    from overlap_inductor.switch.backend import overlap_inductor

    def layers(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = funcol.all_reduce((x @ up) @ down, "sum", dist.group.WORLD)
        return x

    def off(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float((found - expected).abs().max() / expected.abs().max())

    compile_anew(kernels=False)
    switches = {"schedule": "auto", "machine": MACHINE, "sequence_parallel": "off", "mode": "on"}
    compiled = torch.compile(layers, backend=overlap_inductor, options=switches)
    bounded = torch.compile(layers, backend=overlap_inductor, options=switches)
    generator = torch.Generator().manual_seed(rank)
    up, down = torch.randn(256, 512, generator=generator), torch.randn(512, 256, generator=generator)
    errors, graphs, statuses = [], [], []
    for tokens in COUNTS:
        x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens))
        torch._dynamo.mark_dynamic(x, 0)
        publish.forget_reports()
        errors.append(off(compiled(x, up, down), layers(x.double(), up.double(), down.double())))
        reports = publish.all_reports()
        graphs.append(len(reports))
        statuses += [sorted({s.decision.status for s in r.sites}) for r in reports]
        statuses += [[r.code for s in report.sites for r in s.decision.reasons] for report in reports]
    # Torch allows no guard that these bounds do not imply.
    x = torch.randn(800, 256)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=8192)
    dist.all_reduce(x)
    errors.append(off(bounded(x, up, down), layers(x, up, down)))
    return {"errors": errors, "graphs": graphs, "statuses": statuses}


def test_two_graphs_serve_all_counts() -> None:
    for row in run_ranks(2, _run):
        assert row["graphs"] == [1, 1, 0, 0, 0, 0, 0], row
        assert row["statuses"] == [["kept"], ["host_bound"] * 2, ["overlapped"], []], row
        assert max(row["errors"]) < 1e-5, row
