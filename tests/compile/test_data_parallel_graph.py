# SPDX-License-Identifier: Apache-2.0
"""Data-parallel collectives in training graphs: which gathers of weights and which reductions of gradients are
overlapped, and why the others are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import compiled_autograd
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.compile.readings import codes
from tests.compile.readings import facts
from tests.compile.readings import misses
from tests.support.fake_group import fake_group
from tests.support.fake_group import reports_of
from tests.support.interpreted import interpreted
from tests.support.sequence_blocks import ReduceBackward
from tests.support.simple_fsdp import Block
from tests.support.simple_fsdp import Model
from tests.support.simple_fsdp import data_parallel
from tests.support.spellings import world

REORDER = "reorder_for_compute_comm_overlap"
SCHEDULING = {"aten_distributed_optimizations.enable_overlap_scheduling": True}


@pytest.fixture(autouse=True)
def _unscheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's overlap scheduling, which runs after our pass, estimates times on a GPU. So it does not run here."""
    scheduling = "torch._inductor.fx_passes.overlap_scheduling.schedule_overlap_bucketing_from_inductor_configs"
    monkeypatch.setattr(scheduling, lambda gm: None)


def reordered(*passes: Any) -> dict[str, Any]:
    return {REORDER: True, f"{REORDER}_passes": list(passes)}


def own_pass(nodes: list[Any]) -> list[Any]:
    return nodes


def trained(fn: Callable[..., Any], *tensors: torch.Tensor) -> list[OverlapReport]:
    with fake_group(2):
        return reports_of(fn, torch.randn(8, 16, requires_grad=True), *map(nn.Parameter, tensors))


def through(
    backward: Callable[[torch.Tensor], torch.Tensor], shards: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """An identity, or with ``shards`` a gather, of a weight. Its gradient is ``backward(gradient)``."""

    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return all_gather(weight, 0, world()) if shards else weight.view_as(weight)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return backward(gradient)

    return Read.apply


def reduced(gradient: torch.Tensor) -> torch.Tensor:
    return all_reduce(gradient, "sum", world())


def scattered(gradient: torch.Tensor) -> torch.Tensor:
    return reduce_scatter(gradient, "sum", 0, world())


# Ops between the matmul of a gradient and its reduction

REDUCED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "scattered": (scattered, True),
    "scattered in fp64": (lambda g: scattered(g.double()).float(), True),
    "scattered as one row": (lambda g: scattered(g.reshape(-1)).view(-1, g.shape[1]), True),
    "reduced": (reduced, False),
    "reduced, divided before": (lambda g: reduced(g / 2), False),
    "reduced, divided behind": (lambda g: reduced(g) / 2, False),
    "reduced as one row": (lambda g: reduced(g.reshape(-1)).view(g.shape), False),
    "reduced, transposed": (lambda g: reduced(g.t().contiguous()).t(), False),
}


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("name", REDUCED)
def test_a_gradient_is_reduced_under_its_matmul(name: str, batches: int) -> None:
    """The gradients of several batches are summed before they are reduced. So their matmuls belong to one site."""
    backward, shards = REDUCED[name]
    read = through(backward, shards)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        whole = read(w)
        return torch.stack([F.linear(part, whole).relu().square().sum() for part in x.chunk(batches)]).sum()

    *_, report = trained(fn, torch.randn(6 if shards else 12, 16))
    (site,) = facts(report)
    assert site[0] == ("matmul_reduce_scatter" if shards else "matmul_all_reduce") and site[2] == "overlapped"
    assert len(site[1]) == batches and report.phase == "backward" and report.near_misses == []


class Joined(torch.autograd.Function):
    """Reads two weights. Their gradients are joined into one tensor, which is reduced at once."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return w.view_as(w), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor) -> Any:  # type: ignore[override]
        parts = reduced(torch.cat([g.reshape(-1), h.reshape(-1)])).split([g.numel(), h.numel()])
        return parts[0].view(g.shape), parts[1].view(h.shape)


def test_gradients_in_one_tensor_are_kept() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first, second = Joined.apply(w, v)
        return F.linear(F.linear(x, first).relu(), second).square().sum()

    *_, report = trained(fn, torch.randn(12, 16), torch.randn(16, 12))
    (miss,) = report.near_misses
    assert report.sites == [] and miss.reason.code == "coalesced" and "joins 2 gradients" in miss.reason.text


# Settings of Inductor that hide a collective

HIDES: list[tuple[dict[str, Any], bool, bool]] = [
    ({}, False, False),
    ({REORDER: True}, False, False),
    (reordered("raise_comms"), True, False),
    (reordered("reorder_communication_preserving_peak_memory"), True, False),
    (reordered("sink_waits"), False, True),
    (reordered("sink_waits_iterative"), False, True),
    (reordered("reorder_compute_for_overlap"), True, True),
    (reordered(own_pass), True, True),
    ({**reordered("reorder_compute_for_overlap"), "deterministic": True}, False, False),
    ({f"{REORDER}_passes": ["reorder_compute_for_overlap"]}, False, False),
    (
        {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all", "bucket_all_reduces_fx": "all"},
        False,
        False,
    ),
    (SCHEDULING, True, True),
]
"""``(settings, whether they hide gathers of weights, whether they hide reductions of gradients)``."""


@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize(("settings", "gathers", "reductions"), HIDES, ids=lambda value: str(value)[:60])
def test_what_a_setting_hides_is_kept(settings: dict[str, Any], gathers: bool, reductions: bool, shards: bool) -> None:
    read = through(scattered if shards else reduced, shards)
    with inductor_config.patch(settings):
        forward, backward = trained(lambda x, w: F.linear(x, read(w)).square().sum(), torch.randn(12, 16))
    if shards:
        assert codes(forward) == ["fsdp_weight_gather"] * gathers and len(forward.sites) == (not gathers)
    assert codes(backward) == ["data_parallel_gradient"] * reductions and len(backward.sites) == (not reductions)
    assert all(site.decision.status == "overlapped" for site in [*forward.sites, *backward.sites])
    for miss in [*forward.near_misses, *backward.near_misses]:
        assert (REORDER if REORDER in settings else next(iter(SCHEDULING))) in miss.reason.text


@pytest.mark.parametrize("hides", [False, True])
def test_a_weight_that_is_read_twice(hides: bool) -> None:
    """Its two all-reduces are added, so they are one site. If a setting hides them, each has its own reason."""
    read = through(reduced)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (F.linear(x, read(w)) + F.linear(x.sin(), read(w))).square().sum()

    with inductor_config.patch(SCHEDULING if hides else {}):
        *_, backward = trained(fn, torch.randn(12, 16))
    assert len(backward.sites) == (not hides) and codes(backward) == ["data_parallel_gradient"] * (2 * hides)


@inductor_config.patch(SCHEDULING)
def test_the_gradient_of_an_activation_is_not_that_of_a_weight() -> None:
    """A column-wise layer reduces the gradient of its input. The backward returns this gradient, too."""
    read = through(reduced)
    forward, backward = trained(lambda x, w: F.linear(read(x), w).square().sum(), torch.randn(12, 16))
    assert facts(backward) == [("matmul_all_reduce", ["mm M"], "overlapped")] and backward.near_misses == []


# Whole models

GATHERS = ["op_between", *["no_matmul"] * 3]
"""Why gathers are kept: the embedding's, and those of the norms."""
REDUCTIONS = ["no_matmul"] * 4
"""Why reductions are kept: no matmul computes the gradient of a norm or the embedding."""


@pytest.mark.parametrize("again", [False, True])
def test_sharded_parameters(again: bool) -> None:
    """With ``again``, the backward gathers the weights again, also those of the norms."""
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        model = data_parallel(Model(), mesh, dtype=torch.bfloat16, reduced_in=torch.float32, again=again)
        ids = torch.randint(0, 32, (2, 6))
        forward, backward = reports_of(lambda ids: model(ids).float().square().sum(), ids)
    assert [site[::2] for site in facts(forward)] == [("all_gather_matmul", "overlapped")] * 5
    assert sorted(codes(forward), reverse=True) == GATHERS
    found = [site[::2] for site in facts(backward)]
    assert found.count(("matmul_reduce_scatter", "overlapped")) == 5
    assert found.count(("all_gather_matmul", "overlapped")) == len(found) - 5 == 5 * again
    kept = sorted(misses(backward))
    assert kept == sorted([("all_gather", "no_matmul")] * (3 * again) + [("reduce_scatter", c) for c in REDUCTIONS])
    texts = [m.reason.text for m in [*forward.near_misses, *backward.near_misses]]
    assert sum("is a weight that is broadcast to all tokens" in text for text in texts) == 3 + 3 * again
    assert sum("computes the gradient that the collective sums" in text for text in texts) == 4


@pytest.mark.parametrize("again", [False, True])
@inductor_config.patch(SCHEDULING)
def test_sharded_parameters_that_inductor_hides(again: bool) -> None:
    """Every collective is kept for one reason, also those of norms and the embedding."""
    with fake_group(2):
        model = data_parallel(Model(), init_device_mesh("cpu", (2,)), again=again)
        reports = reports_of(lambda ids: model(ids).square().sum(), torch.randint(0, 32, (2, 6)))
    assert [report.sites for report in reports] == [[], []]
    gathers, reductions = [("all_gather", "fsdp_weight_gather")], [("reduce_scatter", "data_parallel_gradient")]
    forward, backward = map(misses, reports)
    assert forward == gathers * 9 and sorted(backward) == gathers * (8 * again) + reductions * 9


@pytest.mark.parametrize("sequence_parallel", ["off", "on"])
def test_replicated_parameters(sequence_parallel: str) -> None:
    """The reduction of a gradient has no tokens, so it is no stretch of the sequence-parallel rewrite. The gradient of
    an embedding is written like that of an activation's rows (``index_put``). So its stretch is listed, and refused."""
    with fake_group(2):
        model = data_parallel(Model(), init_device_mesh("cpu", (2,)), placements=[Replicate()])
        ids = torch.randint(0, 32, (2, 6))
        forward, backward = reports_of(lambda ids: model(ids).square().sum(), ids, sequence_parallel=sequence_parallel)
    assert facts(forward) == [] and forward.near_misses == []
    assert [site[::2] for site in facts(backward)] == [("matmul_all_reduce", "overlapped")] * 5
    assert codes(backward) == REDUCTIONS
    listed = [(s.status, s.reasons[0].code) for s in backward.stretches]
    assert forward.stretches == [] and listed == [("refused", "no_token_wise_work")] * (sequence_parallel == "on")


def test_sharded_and_replicated_parameters() -> None:
    """A gradient is reduced in one group, then scattered in the other one. Only the first collective has a matmul."""
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model = data_parallel(Block(8, 16), mesh, placements=[Replicate(), Shard(0)])
        _, backward = reports_of(lambda x: model(x).square().sum(), torch.randn(2, 6, 8))
    assert facts(backward) == [("matmul_all_reduce", ["mm M"], "overlapped")] * 2
    assert sorted(misses(backward)) == [("all_reduce", "no_matmul"), *[("reduce_scatter", "no_matmul")] * 3]
    texts = [m.reason.text for m in backward.near_misses if m.collective.kind == "reduce_scatter"]
    assert all("another collective has already reduced" in text for text in texts)


def test_compiled_distributed_data_parallel() -> None:
    """A pass of Inductor joins the gradients and delays the wait of their all-reduce before our pass runs."""
    reports: list[OverlapReport] = []
    backend = interpreted(OverlapConfig(schedule="ring"), reports)
    kept = {name: getattr(inductor_config, name) for name in ("_fuse_ddp_communication", "_fuse_ddp_bucket_size")}
    with fake_group(2), torch._dynamo.config.patch(optimize_ddp="python_reducer"), inductor_config.patch(kept):
        model = nn.parallel.DistributedDataParallel(Model())
        step = torch.compile(lambda ids: model(ids).square().sum(), backend=backend)
        with compiled_autograd._enable(torch.compile(backend=backend)):
            step(torch.randint(0, 32, (2, 6))).backward()
    found = [miss for report in reports for miss in misses(report)]
    assert found == [("all_reduce", "data_parallel_gradient")] and not any(r.sites for r in reports)


def test_collectives_outside_of_the_graphs_are_not_reported() -> None:
    """The hooks of FSDP2 gather and reduce between the compiled blocks. So the graphs hold no collective."""
    reports: list[OverlapReport] = []
    backend = interpreted(OverlapConfig(schedule="ring"), reports)
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        model = Model()
        for block in model.blocks:
            block.compile(backend=backend)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.randint(0, 32, (2, 6))).square().sum().backward()
    assert {report.phase for report in reports} == {"forward", "backward"}
    assert not any(report.sites or report.near_misses or report.stretches for report in reports)


def _expanded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, all_gather(w, 0, world()).unsqueeze(0).expand(x.shape[0], -1, -1))


def _viewed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, all_gather(w, 0, world()).view(2, 8, 16).expand(2, -1, -1))


@pytest.mark.parametrize(("fn", "shape"), [(_expanded, (1, 12, 16)), (_viewed, (2, 12, 8))])
def test_a_weight_that_is_expanded_before_its_matmul_is_overlapped(fn: Callable[..., Any], shape: Any) -> None:
    """An ``expand`` to the same size is a view, and a matmul may read an expanded weight."""
    with fake_group(2), torch.no_grad():
        (report,) = reports_of(fn, torch.randn(shape), nn.Parameter(torch.randn(8, 16)))
    assert [s.decision.status for s in report.sites] == ["overlapped"] and report.near_misses == []


@inductor_config.patch(SCHEDULING)
def test_an_activation_with_a_static_address_is_not_a_weight() -> None:
    x = torch.randn(6, 16)
    torch._dynamo.mark_static_address(x)
    with fake_group(2), torch.no_grad():
        (report,) = reports_of(lambda x, w: F.linear(all_gather(x, 0, world()), w), x, nn.Parameter(torch.randn(8, 16)))
    assert [s.facts.pattern for s in report.sites] == ["all_gather_matmul"] and report.near_misses == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: ReduceBackward.apply(F.gelu(x)).roll(1, 0) @ w,
        lambda x, w: w.t() @ ReduceBackward.apply(F.gelu(x)).t(),
    ],
    ids=["roll", "transposed"],
)
def test_the_gradient_of_an_activation_stays_a_source_of_the_rewrite(fn: Callable[..., Any]) -> None:
    """Not a matmul, or a matmul with a transposed weight on the left, computes the gradient."""
    with fake_group(2):
        reports = reports_of(
            fn,
            torch.randn(8, 16, requires_grad=True),
            torch.randn(16, 16, requires_grad=True),
            sequence_parallel="on",
        )
    assert [s.status for r in reports for s in r.stretches][-1] == "rewritten"
