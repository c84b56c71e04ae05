# SPDX-License-Identifier: Apache-2.0
"""If a norm's weight differs between ranks, a graph that divides the tokens would give other results than the plain
program. So all ranks run the plain program. If there is no plain program, all ranks raise an error. The weight is an
argument or a module's parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap_inductor
from overlap_inductor.errors import OverlapError
from overlap_inductor.report import publish as reporting
from overlap_inductor.runtime import same_inputs
from overlap_inductor.runtime.same_inputs import difference
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.support.differing_ranks import ring
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.heard import Heard
from tests.support.sequence_blocks import ReduceForward
from tests.support.sequence_blocks import rms_norm

H = 16
HERE = "run a graph that was rewritten to divide tokens among the ranks"


def _layer(x: torch.Tensor, a: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, b: torch.Tensor) -> Any:
    """A row-wise layer, a residual, a norm and a column-wise layer."""
    x = residual + all_reduce(x @ a, "sum", dist.group.WORLD)
    return rms_norm(x, norm) @ b, x


def _inputs(rank: int, differ: bool) -> list[torch.Tensor]:
    own, same = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(100)
    norm = torch.rand(H, generator=own if differ else same)
    x, a, b = (torch.randn(s, generator=own) for s in ((9, 8), (8, H), (H, 12)))
    return [x, a, torch.randn(9, H, generator=same), norm, b]


def _calls(rank: int, world_size: int, schedule: str, differ: bool, rounded: bool = False) -> dict[str, Any]:
    compile_anew(kernels=False)
    heard, inputs = Heard(), _inputs(rank, differ)
    if rounded:
        inputs[2] = inputs[2] * (1 + rank * torch.finfo(torch.float32).eps)
    expected = _layer(*inputs)
    with ring(schedule=schedule, sequence_parallel="on"):
        compiled = torch.compile(_layer, dynamic=False)
        results = [compiled(*inputs) for _ in range(2)]
    report = overlap_inductor.last_report()
    assert report is not None
    return {
        "worst": torch.tensor([_off(one, expected) for one in results]).max().item(),
        "status": [s.status for s in report.stretches],
        "overlapped": sum(s.decision.status == "overlapped" for s in report.sites),
        "texts": report.notices + heard.texts,
    }


@pytest.mark.parametrize("schedule", ["ring", "auto"])
def test_all_ranks_run_the_plain_program(schedule: str) -> None:
    """With ``auto``, no site of this small graph is overlapped. But the sequence-parallel rewrite has changed the
    graph, so the graph must not run with different weights."""
    for result in run_ranks(2, _calls, schedule, True):
        assert result["worst"] < 1e-4 and result["status"] == ["rewritten"], result
        assert bool(result["overlapped"]) == (schedule == "ring")
        assert any("are not those of the first rank" in text for text in result["texts"]), result


def test_the_rewritten_graph_runs_if_the_inputs_are_the_same() -> None:
    for result in run_ranks(2, _calls, "ring", False):
        assert result["worst"] < 1e-4 and result["status"] == ["rewritten"] and result["texts"] == [], result


def test_the_rewritten_graph_runs_if_the_inputs_differ_by_rounding() -> None:
    """The ranks' residuals differ in their last bits, as if each rank had added the same terms in another order."""
    for row in run_ranks(3, _calls, "ring", False, True):
        assert row["worst"] < 1e-5 and row["status"] == ["rewritten"] and row["overlapped"] == 2, row
        assert not row["texts"], row


def _by_a_size(rank: int, world_size: int) -> float:
    """The largest error on this rank."""
    compile_anew(kernels=False)
    local = torch.ones(4 + rank, 3)
    torch._dynamo.mark_dynamic(local, 0)

    def layer(local: torch.Tensor, *inputs: torch.Tensor) -> Any:
        x, a, residual, norm, b = inputs
        return _layer(x, a, residual, norm * (torch.arange(H) * local.shape[0]), b)

    inputs = _inputs(rank, False)
    expected = layer(local, *inputs)
    with ring(sequence_parallel="on"):
        return _off(torch.compile(layer)(local, *inputs), expected)


def test_a_tensor_made_of_a_size_that_ranks_do_not_exchange_may_differ() -> None:
    """Each rank scales the norm's weight by the size of its own tensor ``local``. The compared plans do not hold this
    size. So the rewrite must not assume that the scaled weight is equal on all ranks."""
    errors = run_ranks(2, _by_a_size)
    assert max(errors) < 1e-3, errors


def _train(rank: int, world_size: int) -> str:
    compile_anew(kernels=False)
    inputs = [t.requires_grad_() for t in _inputs(rank, True)]

    def layer(*args: torch.Tensor) -> torch.Tensor:
        x, a, residual, norm, b = args
        return rms_norm(residual + ReduceForward.apply(x @ a), norm) @ b

    with ring(sequence_parallel="on"):
        try:
            torch.compile(layer, dynamic=False)(*inputs)
        except OverlapError as error:
            return str(error)
    return ""


def test_a_training_graph_has_no_plain_program() -> None:
    """The rewrite changes what the forward saves for the backward, so there is no plain program. All ranks raise, and
    the error names the switch."""
    texts = run_ranks(2, _train)
    assert all("OVERLAP_INDUCTOR_SEQUENCE_PARALLEL=off" in text for text in texts), texts


class Layer(torch.nn.Module):
    """``_layer`` as a module, with its weights as parameters."""

    def __init__(self, rank: int, number: int, differs: bool, grad: bool = False) -> None:
        super().__init__()
        own, same = (torch.Generator().manual_seed(seed) for seed in (100 * number + rank, 7000 + number))
        for name, shape in (("a", (8, H)), ("b", (H, 8))):
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=own), requires_grad=grad))
        norm = torch.rand(H, generator=own if differs else same)
        self.norm = torch.nn.Parameter(norm, requires_grad=grad)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
        residual = residual + ReduceForward.apply(x @ self.a)
        return rms_norm(residual, self.norm) @ self.b, residual


def _tensors(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's features, and a residual that is equal on all ranks."""
    own, same = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(100)
    return torch.randn(8, 8, generator=own), torch.randn(8, H, generator=same)


def _off(found: Any, expected: Any) -> float:
    # Python's ``max`` may lose a NaN.
    return torch.stack([(a - b).abs().max() for a, b in zip(found, expected, strict=True)]).max().item()


def _one_graph_serves_layers(rank: int, world_size: int) -> dict[str, Any]:
    compile_anew(kernels=False)
    heard = Heard()
    layers = [Layer(rank, number, differs) for number, differs in ((1, False), (2, True), (3, False))]
    x, residual = _tensors(rank)
    reporting.forget_reports()
    with torch.no_grad(), ring(sequence_parallel="on"):
        compiled = torch.compile(Layer.forward, dynamic=False)
        off = [_off(compiled(m, x, residual), m(x, residual)) for _ in range(2) for m in layers]
    return {
        "off": max(off),
        "graphs": [[s.status for s in r.stretches] for r in reporting.all_reports()],
        "texts": heard.texts,
    }


def test_each_layer_that_a_graph_serves_is_compared() -> None:
    """The ranks must compare the weights of every layer, not of the first layer only."""
    results = run_ranks(2, _one_graph_serves_layers)
    for result in results:
        assert result["off"] < 1e-4 and result["graphs"] == [["rewritten"]], result
    first, second = (result["texts"] for result in results)
    assert len(first) == 1 and "values here differ" in first[0] and not second, results


def _two_groups(rank: int, world_size: int) -> dict[str, Any]:
    compile_anew(kernels=False)
    heard, other = Heard(), dist.new_group([0, 1])

    def call(layer: Layer, x: torch.Tensor, residual: torch.Tensor) -> Any:
        return *layer(x, residual), all_reduce(x.square(), "sum", other)

    layers = [Layer(rank, number, differs) for number, differs in ((1, False), (2, False), (3, True))]
    x, residual = _tensors(rank)
    with torch.no_grad(), ring(sequence_parallel="on"):
        compiled = torch.compile(call, dynamic=False)
        off = [_off(compiled(m, x, residual), call(m, x, residual)) for _ in range(2) for m in layers]
    report = overlap_inductor.last_report()
    assert report is not None and len(report.groups) == 2
    assert "rewritten" in [s.status for s in report.stretches]
    return {"off": max(off), "texts": heard.texts}


def test_each_layer_is_compared_if_its_graph_has_several_groups() -> None:
    """A parameter may be equal on all ranks of one group only. So if a graph has two groups, its plan, which is
    compared in both, does not hold digests of parameters. The ranks must compare these digests separately, once for
    each layer."""
    results = run_ranks(2, _two_groups)
    assert all(result["off"] < 1e-4 for result in results), results
    assert "are not those of the first rank" in results[0]["texts"][0], results


def _second_graph(rank: int, world_size: int) -> list[float]:
    compile_anew(kernels=False)
    x, residual = _tensors(rank)
    off = []
    with torch.no_grad(), ring(sequence_parallel="on"):
        for number, differs in ((1, False), (2, True)):
            torch.compiler.reset()
            layer = Layer(rank, number, differs)
            off.append(_off(torch.compile(layer, dynamic=False)(x, residual), layer(x, residual)))
    return off


def test_a_later_graph_with_the_same_plan_is_compared() -> None:
    for off in run_ranks(2, _second_graph):
        assert max(off) < 1e-4, off


def _train_and_recompile(rank: int, world_size: int, lone: int) -> dict[str, Any]:
    """Train a layer. Compile it again on the ranks below ``lone``, after its weights have changed."""
    compile_anew(kernels=False)
    heard, layer, hashed = Heard(), Layer(rank, 1, False, grad=True), []
    plain = Layer(rank, 1, False, grad=True)
    digest = same_inputs.digest
    same_inputs.digest = lambda tensor: hashed.append(tuple(tensor.shape)) or digest(tensor)  # type: ignore[assignment]
    x, residual = _tensors(rank)
    off = []
    reporting.forget_reports()
    with ring(sequence_parallel="on"):
        for step in range(4):
            if step == 2 and rank < lone:
                torch.compiler.reset()
            compiled = torch.compile(layer, dynamic=False)
            for one, call in ((layer, compiled), (plain, plain)):
                out, kept = call(x, residual)
                (out.square().mean() + kept.square().mean()).backward()
                dist.all_reduce(one.norm.grad)
                with torch.no_grad():
                    for p in one.parameters():
                        p -= 0.01 * p.grad
                        p.grad = None
            off.append(_off(layer.parameters(), plain.parameters()))
    return {"off": max(off), "hashed": hashed, "graphs": len(reporting.all_reports()), "texts": heard.texts}


@pytest.mark.parametrize(
    "lone",
    [1, pytest.param(2, marks=pytest.mark.thorough)],
    ids=["one rank compiles again", "all ranks compile again"],
)
def test_weights_are_hashed_once(lone: int) -> None:
    """A weight is hashed for the first graph only. The plan of a later graph holds the same digest. So if a rank
    compiles again alone, its plan still equals the others' plans."""
    for rank, result in enumerate(run_ranks(2, _train_and_recompile, lone)):
        assert result["off"] < 1e-5 and result["texts"] == [], result
        assert result["hashed"].count((H,)) == 1 and result["graphs"] == (4 if rank < lone else 2), result


def _texts(rank: int, world_size: int) -> list[str]:
    group = dist.group.WORLD
    norm, other = torch.arange(6.0), torch.arange(6.0)
    found = [difference(group, {"primals_1": norm, "primals_2": other})]
    if rank == 2:
        other[3] += 1e-3
    found.append(difference(group, {"primals_1": norm, "primals_2": other}))
    found.append(difference(group, {"primals_1": norm}))
    found.append(difference(group, {f"primals_{i}": torch.full((2,), float(rank == 1)) for i in range(5)}))
    pair = dist.new_group([1, 2])
    if rank:
        found.append(difference(pair, {"primals_2": other}))
    return found


def test_all_ranks_get_one_text() -> None:
    """If an input differs on any rank, all ranks get one text. A comparison must not read what an earlier one wrote to
    the store."""
    first, second, third = run_ranks(3, _texts)
    assert first == second[:4] == third[:4]
    same, one, again, many = first
    assert same == again == ""
    assert HERE in one and "rank 2" in one and "its values of primals_2 are not those of the first rank" in one
    assert "rank 1" in many and "primals_0, primals_1, primals_2 and 2 more" in many
    assert second[4] == third[4] and "rank 2" in second[4]


def _rounded(rank: int, world_size: int) -> tuple[str, str]:
    mine = {"primals_1": torch.arange(1.0, 7.0) * (1 + rank * torch.finfo(torch.float32).eps)}
    return difference(dist.group.WORLD, mine), difference(dist.group.WORLD, mine, exact=["primals_1"])


def test_parameters_must_be_equal_bit_for_bit() -> None:
    for argument, parameter in run_ranks(2, _rounded):
        assert argument == "" and "its values of primals_1 are not those of the first rank" in parameter
