# SPDX-License-Identifier: Apache-2.0
"""The code that Inductor generates for a ring's steps: their order, the ops fused into a piece, and the life of
buffers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._inductor.ir import ComputedBuffer
from torch._inductor.virtualized import V

from overlap_inductor.inductor import rank_symbol
from overlap_inductor.switch.install import install_hooks
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.generated_code import WORLD_SIZE
from tests.support.generated_code import events
from tests.support.generated_code import lines_of

pytestmark = pytest.mark.usefixtures("alone")


def world() -> Any:
    return dist.group.WORLD


def test_bias_and_activation_are_fused_into_each_chunk() -> None:
    """Each piece has one matmul with its bias and one pointwise kernel. The pointwise kernels write directly into the
    result."""
    lines = lines_of(
        lambda x, w, b: torch.relu(torch.addmm(b, all_gather(x, 0, world()), w)) * 2, (16, 32), (32, 24), (24,)
    )
    assert events(lines) == ["start", "mm", "pointwise", *["step", "mm", "pointwise"] * (WORLD_SIZE - 1)]
    whole = re.findall(r"(buf\d+) = empty_strided_cpu\(\(128, 24\)", "\n".join(lines))
    assert len(whole) == 1 and f"return ({whole[0]}, )" in lines


def test_gated_mlp_in_chunks() -> None:
    """``silu(gate) * up`` needs both matmuls of a piece. The pieces are written directly into all three results."""

    def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(x, 0, world())
        g, u = gathered @ gate, gathered @ up
        return g, u, F.silu(g) * u

    lines = lines_of(mlp, (16, 32), (32, 24), (32, 24))
    assert events(lines) == ["start", "mm", "mm", "pointwise", *["step", "mm", "mm", "pointwise"] * (WORLD_SIZE - 1)]
    assert len(re.findall(r"empty_strided_cpu\(\(128, 24\)", "\n".join(lines))) == 3
    assert "empty_strided_cpu((16, 24)" not in "\n".join(lines)


def test_an_op_that_is_fused_elsewhere_stays_there() -> None:
    """A scale before a softmax costs nothing in the softmax's kernel. Computed on each piece, the scale would be one
    more pass over the tensor."""
    lines = lines_of(lambda x, w: torch.softmax(all_gather(x, 0, world()) @ w * 2, 1), (16, 32), (32, 24))
    assert events(lines) == ["start", "mm", *["step", "mm"] * (WORLD_SIZE - 1), "pointwise"]


def test_order_of_a_reduction() -> None:
    """Each partial sum is sent before the next one is computed. The partial sum of the rank's own slice is computed
    last."""
    lines = lines_of(lambda x, w: reduce_scatter(x @ w, "sum", 0, world()), (128, 32), (32, 24))
    assert events(lines) == ["start", *["mm", "send"] * (WORLD_SIZE - 1), "mm", "wait", "pointwise"]


def test_cast_before_a_reduction_is_fused_into_each_chunk() -> None:
    """Ops before a reduction are computed on each partial sum, not on the whole matrix."""
    lines = lines_of(lambda x, w: reduce_scatter((x @ w).relu().bfloat16(), "sum", 0, world()), (128, 32), (32, 24))
    assert events(lines) == [
        "start",
        *["mm", "pointwise", "send"] * (WORLD_SIZE - 1),
        "mm",
        "pointwise",
        "wait",
        "pointwise",
    ]


def test_chunks_are_read_in_place() -> None:
    """No slice is copied. The copies would cost as much time as the overlap saves."""
    lines = lines_of(lambda x, w: all_gather(x, 1, world()) @ w, (1, 16, 32), (32, 24))
    assert events(lines) == ["start", "mm", *["step", "mm"] * (WORLD_SIZE - 1)]
    lines = lines_of(lambda x, w: reduce_scatter(x @ w, "sum", 1, world()), (1, 128, 32), (32, 24))
    assert events(lines).count("pointwise") == 1


def test_a_view_of_a_computed_tensor_is_cut_in_place() -> None:
    """All pieces read one tensor. No piece may make its own copy of all rows."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(torch.relu(x).view(128, 32) @ w, "sum", 0, world())

    lines = lines_of(program, (1, 128, 32), (32, 24))
    assert events(lines).count("mm") == WORLD_SIZE
    assert len(re.findall(r"empty_strided_cpu\(\((?:1, )?128, 32\)", "\n".join(lines))) == 1


@pytest.mark.parametrize("reduces", [False, True], ids=["gather", "reduction"])
def test_a_kept_collective_stays_behind_the_steps(reduces: bool) -> None:
    """All ranks must call the steps and the kept collective in one order. An edge of the graph keeps this order. The
    edge must not begin at a result that no node reads, because Inductor removes such a result with its edges."""

    def fn(x: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = reduce_scatter(x @ w, "sum", 0, world()) if reduces else all_gather(x, 0, world()) @ w
        return y, all_gather(h, 0, world())

    options = {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": ["raise_comms"]}
    lines = lines_of(fn, (16, 32), (32, 24), (3, 5), options=options)
    kept = next(i for i, line in enumerate(lines) if "all_gather_into_tensor.default(" in line and line[0] != "#")
    last = max(i for i, line in enumerate(lines) if "gather_step.default(" in line or "exchange_send.default(" in line)
    assert kept > last


def test_max_autotune_applies_to_the_chunks() -> None:
    """Autotuning must not change the order of the steps."""
    fn = lambda x, w, b: torch.relu(torch.addmm(b, all_gather(x, 0, world()), w))  # noqa: E731
    lines = lines_of(
        fn, (16, 32), (32, 24), (24,), options={"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}
    )
    assert events(lines) == ["start", "mm", "pointwise", *["step", "mm", "pointwise"] * (WORLD_SIZE - 1)]


def branches(collective: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function with a site of ``x`` and ``w``, and with other matmuls. ``z`` and ``v`` have the shapes of ``x`` and
    ``w``. So the allocator could give one buffer first to the site and later to another matmul."""

    def fn(x: torch.Tensor, w: torch.Tensor, z: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        early = torch.sin(z @ v)
        y = collective(x, w)
        late = torch.cos(z @ v.flip(0))
        return y.sum() + torch.tanh(early @ v.t()).sum() + torch.tanh(late @ v.t()).sum()

    return fn


@pytest.mark.parametrize(
    ("collective", "numerics"),
    [
        (lambda x, w: all_gather(x, 0, world()) @ w, "preserve"),
        (lambda x, w: reduce_scatter(x @ w, "sum", 0, world()), "preserve"),
        (lambda x, w: reduce_scatter((x @ w).to(torch.bfloat16), "sum", 0, world()), "preserve"),
        (lambda x, w: reduce_scatter(x @ w + 1, "sum", 0, world()), "allow_hop_rounding"),
        (lambda x, w: all_reduce(x @ w, "sum", world()), "preserve"),
        (lambda x, w: all_reduce(x @ w + 1, "sum", world()), "preserve"),
        (lambda x, w: all_gather(x @ w, 0, world()), "preserve"),
        (lambda x, w: all_gather((x @ w).to(torch.bfloat16), 0, world()), "preserve"),
    ],
    ids=[
        "gather",
        "scatter",
        "scatter a cast",
        "travelling",
        "all-reduce",
        "all-reduce plus one",
        "gathered output",
        "gathered cast",
    ],
)
def test_nothing_in_flight_is_freed_or_reused(collective: Callable[..., torch.Tensor], numerics: str) -> None:
    """No buffer may be freed or reused while a transfer uses it."""
    sub_chunks = 2
    lines = lines_of(
        branches(collective), (64, 32), (32, 24), (64, 32), (32, 24), sub_chunks=sub_chunks, numerics=numerics
    )
    # {exchange buffer: {hop: buffers that it sends}}
    in_flight: dict[str, dict[int, set[str]]] = {}
    checked = 0
    for line in lines:
        if line.startswith("del ") or "# reuse" in line:
            for exchange, hops in in_flight.items():
                lost = set(re.findall(r"\bbuf\d+\b", line)) & {exchange}.union(*hops.values())
                assert not lost, f"{line} while {lost} is in flight"
        if match := re.search(r"(\w+) = torch\.ops\.overlap_inductor\.(?:gather|exchange)_start", line):
            in_flight[match[1]] = {}
        elif (match := re.match(r"(buf\d+) = (buf\d+)$", line)) and match[2] in in_flight:
            # Later lines use the new name. The first name is deleted at once.
            in_flight[match[1]] = in_flight.pop(match[2])
        elif match := re.search(r"exchange_send\.default\(buf\d+, (buf\d+), (.*?), \[[\d, ]*\], (\d+), '(\w+)'", line):
            # A broadcast copies the piece into its place in the buffer, and sends from there.
            sent = set() if match[4] == "broadcast" else set(re.findall(r"\bbuf\d+\b", match[2]))
            in_flight[match[1]][int(match[3])] = sent
            checked += 1
        elif match := re.search(r"gather_step\.default\(buf\d+, (buf\d+),.* (\d+), 'ring'", line):
            checked += 1
            if int(match[2]) == (WORLD_SIZE - 1) * sub_chunks - 1:
                in_flight.pop(match[1])
        elif match := re.search(
            r"exchange_wait\.default\(buf\d+, (buf\d+), \[.*?\], \[[\d, ]*\], \[([\d, ]*)\], '(\w+)'", line
        ):
            for hop in match[2].split(","):
                in_flight[match[1]].pop(int(hop))
            # An exchange is over after its last hop. Before that, it may have nothing in flight: a rank may receive a
            # sum before it sends the sum on.
            last = (1 if match[3] == "broadcast" else WORLD_SIZE - 1) * sub_chunks - 1
            if not in_flight[match[1]] and int(hop) == last:
                in_flight.pop(match[1])
    assert checked >= sub_chunks and not in_flight, in_flight


def test_the_scheduler_traces_no_kernel_again_for_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the graph, a symbolic integer (the rank's symbol) stands for the rank. Inductor asks each pointwise kernel for
    the symbols that it reads, and would trace the kernel again for the answer. This package's wrapper of
    ``get_read_writes`` answers with what the scheduler has noted before. The answer must have the symbols of a new
    trace."""
    install_hooks()
    ours = ComputedBuffer.get_read_writes
    used: dict[str, set[str]] = {}

    def compared(buffer: ComputedBuffer) -> Any:
        found = ours(buffer)
        if V.graph.__dict__.get(rank_symbol._ACCESSES):
            traced = ours.__wrapped__(buffer)  # type: ignore[attr-defined]
            assert found is not traced and found.get_free_symbol_uses(True) == traced.get_free_symbol_uses(True)
            used[buffer.get_name()] = {str(symbol) for symbol in found.get_free_symbol_uses(True)}
        return found

    monkeypatch.setattr(ComputedBuffer, "get_read_writes", compared)
    lines = lines_of(lambda x, w: (all_gather(x.sin(), 0, world()).cos() @ w).relu(), (16, 32), (32, 24))
    assert events(lines).count("pointwise") == len(used) == 1 + 2 * WORLD_SIZE
    # ``cos`` reads a rank's slice of the gathered rows, at an offset that holds the symbol. ``sin`` reads ``x``.
    assert set() in used.values() and sum(len(symbols) == 1 for symbols in used.values()) >= WORLD_SIZE
