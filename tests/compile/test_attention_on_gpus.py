# SPDX-License-Identifier: Apache-2.0
"""Hand-made graphs of CUDA's attention ops behind gathers of keys and values, on fake tensors."""

from __future__ import annotations

import json
from operator import getitem
from typing import Any

import pytest
import torch

from overlap_inductor.report.report import OverlapReport
from tests.compile.readings import summary
from tests.support.fake_group import fake_group
from tests.support.golden import check_golden
from tests.support.graph_text import waste
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten

SITE = ("all_gather_attention", 2, ["attention K"], "overlapped")


class _OnGpu:
    """A graph of CUDA's attention ``op`` behind gathers of keys and values."""

    def __init__(
        self,
        op: str,
        own: int = 48,
        queries: int | None = None,
        masked: bool = False,
        last_result: int = 0,
        is_read: bool = True,
        **given: Any,
    ) -> None:
        self.built = HandGraph()
        bf16 = {"dtype": torch.bfloat16}
        k, v = (self.built.on("cuda", 2, 4, own, 64, name=name, **bf16) for name in "kv")
        q = self.built.on("cuda", 2, 4, own if queries is None else queries, 64, name="q", **bf16)
        keys, values = (self.built.gather_on(x, 2) for x in (k, v))
        target = getattr(
            aten, f"_scaled_dot_product_{op}" if "fused" in op else f"_scaled_dot_product_{op}_attention"
        ).default
        if op in ("efficient", "cudnn"):
            mask = (
                self.built.on("cuda", 2, 4, own, own * self.built.world_size, name="mask", **bf16) if masked else None
            )
            given = {"attn_bias": mask, "compute_log_sumexp": last_result == 1, **given}
        results = self.built.call(target, q, keys, values, **given)
        read = [self.built.call(getitem, results, i) for i in range(last_result + 1)]
        self.built.output(*(read if is_read else [self.built.call(aten.sin.default, q)]))

    def report(self, **fields: Any) -> OverlapReport:
        return self.built.run(**fields)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="golden files are for torch 2.13")
def test_golden_on_gpus() -> None:
    """The golden file shows the attention ops, each on one rank's keys, and the ops that merge their results."""
    texts = []
    for op, given in (
        ("flash", {"scale": 0.5}),
        ("cudnn", {}),
        ("efficient", {"masked": True}),
        ("efficient", {"is_causal": True}),
    ):
        found = set()
        for rank in (0, 1):
            with fake_group(2, rank):
                report = _OnGpu(op, **given).report()
                assert summary(report) == [SITE] and not waste(report)
                assert report.after.count("aten._scaled_dot_product") == 2 and "aten.cat" not in report.after
                found.add(report.after)
        (after,) = found
        texts.append(f"{op} {given}\n{after}\n")
    check_golden("\n".join(texts), "attention/gpu.txt")


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("op", "given", "code", "said"),
    [
        ("flash", {"is_causal": True}, "matmul_form", "has is_causal, but its pieces cannot hide keys"),
        ("cudnn", {"is_causal": True}, "matmul_form", "has is_causal, but its pieces cannot hide keys"),
        ("cudnn", {"masked": True}, "matmul_form", "has attn_bias, but its pieces cannot hide keys"),
        ("flash", {"return_debug_mask": True}, "matmul_form", "debug mask"),
        ("efficient", {"dropout_p": 0.5}, "matmul_form", "dropout_p=0.5"),
        ("efficient", {"masked": True, "own": 12}, "layout", "12 keys"),
        ("efficient", {"is_causal": True, "own": 12}, "layout", "reads only multiples of 8 keys"),
        ("fused_attention_overrideable", {}, "matmul_form", "this version cannot cut"),
    ],
)
def test_forms_that_have_a_reason_on_gpus(op: str, given: dict[str, Any], code: str, said: str) -> None:
    report = _OnGpu(op, **given).report()
    assert report.sites == []
    assert {m.reason.code for m in report.near_misses} == {code} and said in report.near_misses[0].reason.text


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("op", ["flash", "cudnn", "efficient"])
def test_training_graphs_of_gpus_are_kept_with_a_reason(op: str) -> None:
    """The forward graph saves the attention's log-sum-exp for the backward, so the site is refused."""
    (site,) = _OnGpu(op, last_result=1).report().sites
    (reason,) = site.decision.reasons
    assert (site.decision.status, reason.code) == ("refused", "other_users") and "saved for the backward" in reason.text


@pytest.mark.usefixtures("two")
def test_attention_whose_result_is_not_read() -> None:
    """Dead code elimination keeps the attention, because CUDA's attention ops count as impure. The gathers of keys and
    values are near misses."""
    report = _OnGpu("flash", is_read=False).report()
    assert report.failures == [] and report.sites == []
    assert {m.reason.code for m in report.near_misses} == {"no_matmul"}


@pytest.mark.usefixtures("two")
def test_the_planner_with_no_queries() -> None:
    """Without queries, the estimate must not divide by zero."""
    report = _OnGpu("efficient", queries=0, is_causal=True).report(schedule="auto")
    assert report.failures == [] and [site.decision.status for site in report.sites] == ["kept"]


@pytest.mark.parametrize(
    ("link_bytes", "least", "most", "status"), [(1e10, 1.05, 1.25, "kept"), (4e10, 1.25, 2, "overlapped")]
)
def test_the_planner_asks_for_a_larger_gain_on_gpus(link_bytes: float, least: float, most: float, status: str) -> None:
    """Rings of attention were not measured on GPUs, so a gain of 5 % is not enough."""
    machine = json.dumps({"link_bytes": link_bytes, "step_seconds": 1e-7})
    with fake_group(8):
        (site,) = _OnGpu("flash", own=16384).report(schedule="auto", machine=machine).sites
    estimate = site.decision.plan[0].estimate_us
    assert least < estimate["keep"] / estimate["ring"] < most
    assert site.decision.status == status
