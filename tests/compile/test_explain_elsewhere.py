# SPDX-License-Identifier: Apache-2.0
"""Plans for another machine: one process acts as one of the ranks, and the other ranks do not exist."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts import cost_model
from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.machine import BOXES
from overlap_inductor.inductor.fingerprint import fingerprint
from overlap_inductor.inductor.post_grad import stopped_before_code
from overlap_inductor.report import publish
from overlap_inductor.switch import install
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.fake_ranks import RanksError
from overlap_inductor.torch_compat.fake_ranks import one_process_as
from overlap_inductor.torch_compat.target import planning_for
from overlap_inductor.torch_compat.target import target
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of

H200 = BOXES["h200"]


def mlp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD) @ w


def large(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(1024, 4096, dtype=dtype), torch.empty(4096, 1792, dtype=dtype)


@pytest.mark.parametrize(("itemsize", "measured"), [(2, (617.0, 382.0))])
def test_the_estimates_are_near_the_measured_times(itemsize: int, measured: tuple[float, float]) -> None:
    """``measured``: microseconds of a matmul of 8192 x 3584 x 8192 and of its all-gather, in bf16 on 8 H200s."""
    sizes = SiteSizes(2.0 * 8192 * 3584 * 8192, 7 * 1024 * 8192 * itemsize, itemsize, 8, gathers=True)
    matmul, collective = (
        f(sizes, H200.machine) * 1e6 for f in (cost_model.matmul_seconds, cost_model.collective_seconds)
    )
    assert matmul == pytest.approx(measured[0], rel=0.05)
    assert collective == pytest.approx(measured[1], rel=0.15)


def test_a_plan_for_another_machine_may_use_its_gpus() -> None:
    with fake_group(8):
        here = report_of(mlp, *large(), schedule="auto")
        with planning_for(H200):
            there = report_of(mlp, *large(), schedule="auto")
    (site,) = there.sites
    assert site.decision.moving.schedule in ("fused", "chunked"), site.decision
    estimate = site.decision.moving.estimate_us
    assert {"ring", "fused", "chunked"} <= estimate.keys()
    assert not {"fused", "chunked"} & here.sites[0].decision.plan[0].estimate_us.keys()
    assert estimate["keep"] == pytest.approx(380, rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "reason"), [(8, None), (16, "it needs 16 GPUs, one for each rank; this process sees 8")]
)
def test_peers_of_another_machine_are_within_reach(ranks: int, reason: str | None) -> None:
    device = torch.device("cpu")
    assert "needs NVIDIA GPUs" in str(symmetric.why_no_symmetric_memory(tuple(range(ranks)), device))
    with planning_for(H200):
        assert symmetric.why_no_kernels(device) is None
        assert symmetric.why_no_symmetric_memory(tuple(range(ranks)), device) == reason
        assert not symmetric.without_peers((0, 1), device)
        with planning_for(None):
            assert symmetric.why_no_kernels(device) is not None
    assert target() is None


def test_integer_matmuls_keep_to_the_gpus_limits() -> None:
    """``_int_mm`` needs more than 16 rows on a GPU. The limit holds for a plan for GPUs, although this process runs on
    a CPU."""

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
        return torch._int_mm(gathered, w)

    operands = torch.ones(32, 64, dtype=torch.int8), torch.ones(64, 32, dtype=torch.int8)
    with fake_group(8):
        here = report_of(product, *operands, schedule="ring")
        with planning_for(H200):
            there = report_of(product, *operands, schedule="ring")
            auto = report_of(product, *operands, schedule="auto")
    assert here.sites[0].decision.status == "overlapped"
    assert "on a GPU, each of 32 pieces" in there.sites[0].decision.reasons[0].text
    (reason,) = auto.sites[0].decision.reasons
    assert auto.sites[0].decision.source == "analytic" and reason.code == "schedule_not_available"
    assert reason.text.startswith("no schedule can compute the site. ring: ") and "; small_message: no " in reason.text


def test_a_plan_for_another_machine_has_a_cache_key_of_its_own() -> None:
    config = OverlapConfig()
    here = fingerprint(config)
    with planning_for(H200):
        assert fingerprint(config) != here
    assert fingerprint(config) == here


@pytest.mark.parametrize("trains", [False, True])
def test_a_program_is_planned_and_not_run(trains: bool) -> None:
    """The program's eager code runs. Its compiled regions do not run, and return zeros."""
    install.enable(mode="report")
    publish.forget_reports()
    torch.compiler.reset()
    try:
        with fake_group(8), planning_for(H200), stopped_before_code():
            x, w = torch.ones(64, 256, dtype=torch.bfloat16), torch.ones(256, 64, dtype=torch.bfloat16)
            out = torch.compile(mlp)(x.requires_grad_(trains), w)
            assert out.shape == (512, 64) and not out.any()
            if trains:
                out.sum().backward()
                assert x.grad is not None and x.grad.shape == x.shape
        reports = publish.all_reports()
    finally:
        install.disable()
        publish.forget_reports()
        torch.compiler.reset()
    assert [r.phase for r in reports] == (["forward", "backward"] if trains else ["inference"])
    assert reports[0].sites and all("planned for h200" in r.notices[-1] for r in reports)


def test_no_code_is_generated_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.graph import GraphLowering

    def fail(*arguments: object) -> None:
        raise AssertionError("code was generated")

    monkeypatch.setattr(GraphLowering, "run", fail)
    install.enable(mode="report")
    try:
        with fake_group(2), stopped_before_code():
            torch.compile(mlp)(torch.ones(4, 4), torch.ones(4, 4))
    finally:
        install.disable()
        torch.compiler.reset()


def test_one_process_gets_the_groups_that_a_script_makes() -> None:
    before = dict(os.environ)
    make_group = dist.init_process_group
    with one_process_as(8, fixed=True):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("0", "8", "0")
        dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 8, "fake")
        assert dist.get_backend(dist.new_group([0, 1], backend="gloo")) == "fake"
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")
        assert init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))["tp"].size() == 4
    assert not dist.is_initialized() and dict(os.environ) == before and dist.init_process_group is make_group


def test_a_mesh_makes_the_group_by_itself() -> None:
    with one_process_as(4, fixed=False):
        assert init_device_mesh("cpu", (4,)).size() == 4
        assert dist.get_backend() == "fake"


def test_a_script_may_ask_for_its_own_size() -> None:
    with one_process_as(8, fixed=False, most=8):
        dist.init_process_group("gloo", world_size=4, rank=3)
        assert (dist.get_rank(), dist.get_world_size(), os.environ["WORLD_SIZE"]) == (3, 4, "4")
    with one_process_as(8, fixed=True), pytest.raises(RanksError, match="world_size=4, and --ranks is 8"):
        dist.init_process_group("gloo", world_size=4, rank=0)
    with one_process_as(8, fixed=False, most=8), pytest.raises(RanksError, match="world_size=16, .* has 8 GPUs"):
        dist.init_process_group("gloo", world_size=16, rank=0)
