# SPDX-License-Identifier: Apache-2.0
"""The graphs of experts between two exchanges of rows: golden graph, plans, order, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol

from bench.support.experts import SMALL
from bench.support.experts import DispatchedExperts
from overlap_inductor.lowerings.ring import looped_experts_ops as ops
from overlap_inductor.lowerings.ring import schedule
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites import permutations
from overlap_inductor.sites.row_program import RowProgram
from tests.compile.readings import misses
from tests.compile.readings import summary
from tests.support.dispatched_experts import inputs
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_by_fields
from tests.support.generated_code import lines_of
from tests.support.golden import check_golden
from tests.support.graph_text import waste
from tests.support.uneven_exchanges import by_counts
from tests.support.uneven_exchanges import by_sizes

SITE = ("all_to_all_experts", 0, ["grouped_mm M"] * 3, "overlapped")
Rows = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _scalars() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def _reports(rank: int, *several: dict[str, Any], world_size: int = 2) -> list[list[OverlapReport]]:
    """The reports of a layer's forward and backward graph with each of ``several`` settings. Ranks have different
    numbers of tokens."""
    x, ids, scores = inputs(16 + rank, "random", rank, torch.bfloat16)
    with fake_group(world_size, rank):
        layer = DispatchedExperts(rank, world_size, shared=True)
        return reports_by_fields(layer, x.requires_grad_(), ids, scores.requires_grad_(), several=several)


def test_both_graphs_are_rewritten_unless_they_are_kept() -> None:
    """Ranks agree although they send different numbers of rows. The host reads no more numbers than without overlap.
    These matmuls run before the wait for the results:

    - forward: the shared expert's first matmul;
    - backward: three grouped matmuls, which compute the gradients of the weights of the rank's own experts. No matmul
      of the shared expert is among them.
    """
    first, without_the_pattern, planned = _reports(0, {}, {"patterns": ("all_to_all_matmul",)}, {"schedule": "auto"})
    found = [first, *_reports(1, {})]
    how = "by ring/p2p (route=direct, sub_chunks=4)"
    for reports in found:
        assert [summary(r) for r in reports] == [[SITE], [SITE]]
        assert [text for r in reports for text in (*waste(r), *r.notices)] == []
        for report in reports:
            assert report.before.count("_local_scalar_dense.default") == report.after.count(
                "_local_scalar_dense.default"
            )
            assert json.loads(report.exchange)["steps"][-2:] == [
                f"g0: all_to_all bfloat16 [uneven, 16] in all_to_all_experts {how}",
                "g0: all_to_all bfloat16 returning rows of the one before",
            ]
        # The exchange of the counts comes before the rows'.
        assert [misses(report) for report in reports] == [[("all_to_all", "no_matmul")], []]
        held = [_held(report) for report in reports]
        assert held == [["mm"], ["_grouped_mm"] * 3]
    assert [r.exchange for r in found[0]] == [r.exchange for r in found[1]]
    assert len(without_the_pattern) == len(planned) == 2
    for report in without_the_pattern:
        assert [s.decision.reasons[0].code for s in report.sites] == ["switched_off"]
        assert report.after == report.before
    for report in planned:
        assert [(s.decision.status, s.decision.reasons[0].code) for s in report.sites] == [("kept", "too_small")]
    if torch.__version__.startswith("2.13"):
        check_golden("\n".join(f"{r.phase}\n{r.after}" for r in first), "dispatched_experts.txt")


SLOW = {"link_bytes": 1e5, "matmul_flops": {"2": 1e7}, "memory_bytes": 1e9, "step_seconds": 1e-9}
"""A machine on which the matmuls and the transfers of these layers take about as long as each other."""


def test_auto_expects_as_many_rows_as_the_rank_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows that arrive is known only at run time. Without this expectation there is no estimate, and
    ``auto`` keeps the layer. On GPUs it keeps the layer, because the host needs longer than the GPU."""
    told = {"schedule": "auto", "machine": json.dumps(SLOW)}
    for rank in (0, 1):
        (planned,) = _reports(rank, told)
        for report in planned:
            (site,) = report.sites
            assert site.decision.status == "overlapped" and site.decision.source == "analytic", site.decision
            assert site.decision.moving.schedule == "ring"
    monkeypatch.setattr(schedule, "on_gpu", lambda device: True)
    (planned,) = _reports(0, told)
    assert [s.decision.reasons[0].code for r in planned for s in r.sites] == ["host_bound"] * 2


def _held(report: OverlapReport) -> list[str]:
    """The ops of the matmuls that must run before the wait for the results."""
    (wait,) = (line for line in report.after.splitlines() if "exchange_wait.default(" in line)
    names = wait.split("[", 2)[2].split("]")[0].split(", ")
    lines = {line.split(":")[0].split(" =")[0]: line for line in report.after.splitlines()}
    return [lines[name].split("aten.")[1].split(".")[0] for name in names if "aten." in lines.get(name, "")]


@pytest.mark.usefixtures("alone")
def test_order_in_the_generated_code() -> None:
    """The shared expert's first matmul runs while the results return. Its second matmul is an ``addmm`` that adds the
    results."""
    layer = DispatchedExperts(0, 2, shared=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer(x.bfloat16(), (x[:, :2].abs() * 100).long() % 8, x[:, 2:4])

    lines = lines_of(run, (16, SMALL.hidden), world_size=2, rank=0)
    marks = {"all_to_all_experts.default(": "experts", "extern_kernels.mm(": "mm", "exchange_wait.default(": "wait"}
    found = [step for line in lines for mark, step in marks.items() if mark in line]
    assert found == ["experts", "mm", "wait"]


class _Recorded:
    """Takes the place of an exchange, and records the op's messages and waits."""

    def __init__(self, name: str, events: list[str], hops: int) -> None:
        self.name, self.events, self.hop_count = name, events, hops

    def post(self, hop: int, piece: torch.Tensor) -> None:
        self.events.append(f"{self.name} {hop} of {piece.numel()}")

    def wait(self, hop: int) -> None:
        self.events.append(f"wait {hop}")


def _run_recorded(
    monkeypatch: pytest.MonkeyPatch, rows: int, sent: list[int], received: list[int]
) -> tuple[list[str], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the op on rank 1 of 3 with a program that doubles rows. Returns ``(events, x, buffer, results)``."""
    events: list[str] = []
    names = iter(["send", "return"])
    monkeypatch.setattr(ops.exchanges, "open_uneven", lambda *given: _Recorded(next(names), events, 2))
    compute = ops.Experts.compute

    def recorded(experts: ops.Experts, start: int, stop: int) -> None:
        events.append(f"rows {start} to {stop}")
        compute(experts, start, stop)

    monkeypatch.setattr(ops.Experts, "compute", recorded)
    program = RowProgram((("aten.mul.Tensor", [{"row": 0}, 2], {}),), 1, 3, "float32", ())
    arriving = sum(received)
    x, index, ends = torch.randn(rows, 3), torch.randperm(arriving), torch.tensor([arriving]).int()
    with fake_group(3, rank=1) as group:
        buffer, results, _, _ = torch.ops.overlap_inductor.all_to_all_experts(
            torch.zeros(1), x, index, ends, [], [], program.to_text(), sent, received, 1, group.group_name, "s"
        )
    return events, x, buffer, results


def test_order_in_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank sends all pieces before it computes the first part of its own rows. Then it waits for each piece,
    computes it and returns the results to the sender. While the last results return, it computes the second part of
    its own rows."""
    events, x, buffer, results = _run_recorded(monkeypatch, 9, [2, 3, 4], [4, 3, 5])
    # Ranks 0 and 2 send 4 and 5 rows. Hop 0 goes to rank 2 and comes from rank 0; hop 1 the other way round.
    assert events == [
        *("send 0 of 12", "send 1 of 6", "rows 4 to 6"),
        *("wait 0", "rows 0 to 4", "return 1 of 12"),
        *("wait 1", "rows 7 to 12", "return 0 of 15"),
        "rows 6 to 7",
    ]
    assert torch.equal(buffer[2:5], 2 * x[2:5]) and torch.equal(results[4:7], 2 * x[2:5])


def test_own_rows_are_one_piece_if_no_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """No results return then. A second piece would only read the weights again."""
    events, x, buffer, results = _run_recorded(monkeypatch, 9, [2, 3, 4], [0, 3, 0])
    computed = [event for event in events if event.startswith("rows")]
    assert [event for event in computed if event not in ("rows 0 to 0", "rows 3 to 3")] == ["rows 0 to 3"]
    assert torch.equal(buffer[2:5], 2 * x[2:5]) and torch.equal(results, 2 * x[2:5])


def _programs(report: OverlapReport) -> list[str]:
    """The ops of each row program in the rewritten graph."""
    texts = re.findall(r"'(\{\"ops\": .*?\})'", report.after)
    return [" ".join(name.split(".")[1] for name, _, _ in json.loads(text)["ops"]) for text in texts]


def test_an_activation_is_one_op_of_the_program() -> None:
    """Forward: ``silu`` is one op. Backward: ``silu`` and the gradient of ``silu`` are computed with each piece, by one
    op each. So the op gets the two tensors that the forward saved, and no tensor in fp32."""
    (forward, backward), *_ = _reports(0, {})
    assert _programs(forward) == ["_grouped_mm silu _grouped_mm mul _grouped_mm"]
    assert _programs(backward) == ["_grouped_mm silu mul mul _grouped_mm silu_backward _grouped_mm add"]
    (line,) = [line for line in backward.after.splitlines() if "all_to_all_experts.default(" in line]
    assert "[_grouped_mm, _grouped_mm_1], [permute_" in line


def _grouped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, w, offs=ends)


def _back(y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(y).index_put((index,), y)


def _added(y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(y).index_put((index,), y, accumulate=True)


EXCHANGE = by_sizes([5, 11], [9, 7])


def _there(x: torch.Tensor) -> torch.Tensor:
    return EXCHANGE(x)


def _home(x: torch.Tensor) -> torch.Tensor:
    return EXCHANGE(x, back=True)


def _twice(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return _home(_back(_grouped(_grouped(_there(x)[i], w, ends), w, ends + 1), i))


MISSES: dict[str, tuple[Rows, str]] = {
    "another index": (lambda x, w, e, i: _home(_back(_grouped(_there(x)[i], w, e), i.flip(0))), "different indices"),
    "any index": (lambda x, w, e, i: _home(_back(_grouped(_there(x)[i], w, e), i)), "not known to hold each row once"),
    "sums": (lambda x, w, e, i: _home(_added(_grouped(_there(x)[i], w, e), i)), "not known to hold each row once"),
    "read elsewhere": (
        lambda x, w, e, i: _home(y := _back(_grouped(_there(x)[i], w, e), i)).sum() + y.sum(),
        "is also read by a node other than",
    ),
    "other parts": (
        lambda x, w, e, i: by_sizes([8, 8], [8, 8])(_back(_grouped(_there(x)[i], w, e), i)),
        "same parts to return",
    ),
    "other experts": (lambda x, w, e, i: _twice(x, w, e, i), "different ends"),
    "rows of others": (
        lambda x, w, e, i: _home(_back((y := _grouped(_there(x)[i], w, e)) * y.cumsum(0), i)),
        "not computed row by row",
    ),
}


def _arguments() -> tuple[torch.Tensor, ...]:
    x, w = torch.randn(16, 16).bfloat16(), torch.randn(4, 16, 16).bfloat16()
    return x, w, torch.tensor([4, 4, 9, 16]).int(), torch.randperm(16)


@pytest.mark.parametrize("name", MISSES)
@pytest.mark.usefixtures("two")
def test_a_near_miss(name: str) -> None:
    function, words = MISSES[name]
    report = report_of(function, *_arguments())
    assert summary(report) == [] and report.after == report.before
    assert any(words in m.reason.text for m in report.near_misses) and not report.failures


@pytest.mark.usefixtures("two")
def test_one_exchange_returns_rows_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exchanges bring rows to experts. One exchange returns the elementwise product of the experts' two results.
    The returning exchange belongs to the site that is found first."""
    monkeypatch.setattr(permutations, "is_permutation", lambda index: True)

    def run(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        first, second = (_grouped(_there(rows)[i], w, ends) for rows in (x, x.relu()))
        return _home(_back(first * second, i))

    report = report_of(run, *_arguments())
    assert summary(report) == [("all_to_all_experts", 0, ["grouped_mm M"], "overlapped")] and not report.failures
    (near,) = report.near_misses
    assert near.reason.code == "shares_nodes" and "belongs to another site" in near.reason.text


def _index(rows: int, starts: torch.Tensor, lengths: torch.Tensor, first: int = 0) -> torch.Tensor:
    segments = torch.arange(lengths.shape[0]).repeat_interleave(lengths, output_size=rows)
    return starts[segments] + torch.arange(first, rows + first) - (lengths.cumsum(0) - lengths)[segments]


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.view(2, 4).t().reshape(-1)


INDICES: dict[str, tuple[Callable[[torch.Tensor, int], torch.Tensor], bool]] = {
    "by experts": (lambda c, n: _index(n, _turned(c.cumsum(0) - c), _turned(c)), True),
    "as they are": (lambda c, n: _index(n, c.cumsum(0) - c, c), True),
    "ends for starts": (lambda c, n: _index(n, _turned(c.cumsum(0)), _turned(c)), False),
    "starts in another order": (lambda c, n: _index(n, c.cumsum(0) - c, _turned(c)), False),
    "starts of other runs": (lambda c, n: _index(n, _turned((c + 1).cumsum(0) - (c + 1)), _turned(c)), False),
    "from one on": (lambda c, n: _index(n, _turned(c.cumsum(0) - c), _turned(c), 1), False),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.usefixtures("two")
def test_an_index_that_holds_each_row_once_is_proved(name: str) -> None:
    """The results are added to the rows that an index names. If the index may hold a row twice, the exchange is a near
    miss."""
    index, proved = INDICES[name]

    def run(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        exchange = by_counts(counts.view(2, 4).sum(1))
        there = exchange(x)
        i = index(counts, there.shape[0])
        return exchange(_added(_grouped(there[i], w, ends), i), back=True)

    x, w, ends, _ = _arguments()
    report = report_of(run, x, w, ends, torch.full((8,), 2))
    assert proved or any("not known to hold" in m.reason.text for m in report.near_misses)
    assert [s.facts.pattern for s in report.sites] == ["all_to_all_experts"] * proved


def _with_experts(experts: int) -> OverlapReport:
    x, _, _, i = _arguments()
    w, ends = torch.randn(experts, 16, 16).bfloat16(), torch.linspace(1, 16, experts).int()
    torch._dynamo.reset()
    return report_of(lambda x, w, e, i: _home(_back(_grouped(_there(x)[i], w, e), i)), x, w, ends, i)


@pytest.mark.usefixtures("two")
def test_weights_of_as_many_experts_as_rows_are_not_cut_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 experts' weights look like one entry for each of the 16 rows. The op must still get all weights, and the
    estimate must count their bytes."""
    monkeypatch.setattr(permutations, "is_permutation", lambda index: True)
    few, many = _with_experts(4), _with_experts(16)
    for report in (few, many):
        (line,) = [line for line in report.after.splitlines() if "all_to_all_experts.default(" in line]
        assert re.search(r", \[\], \[\w+\], ", line), line
    few_times, many_times = (report.sites[0].decision.moving.estimate_us for report in (few, many))
    assert few_times["ring"] < many_times["ring"] and few_times["keep"] <= many_times["keep"]


def _loop(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """One matmul for each expert. The second expert has no rows."""
    return torch.cat([x[a:b] @ one for a, b, one in zip([0, 3, 3, 10], [3, 3, 10, 16], w)])


@pytest.mark.usefixtures("two")
def test_a_loop_over_experts_is_left_as_written() -> None:
    """The rows are divided by experts, so a cut by ranks does not fit. The near miss names the ``cat``."""
    for function in (
        lambda *given: _home(_loop(*given)),
        lambda *given: funcol.all_reduce(_loop(*given), "sum", torch.distributed.group.WORLD),
    ):
        torch._dynamo.reset()
        report = report_of(function, *_arguments())
        assert summary(report) == [] and report.after == report.before
        assert "cat" in report.near_misses[0].reason.text
