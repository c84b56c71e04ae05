# SPDX-License-Identifier: Apache-2.0
"""Programs that look like a supported exchange, but differ in a dtype, an order or a dim. They look like all-to-alls of
table lookups or of uneven parts, or like sums of experts. Each must give the results of eager PyTorch, and its report
must show an overlapped site, or a reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F

from overlap_inductor.config import OverlapConfig
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.gloo_ranks import compile_anew
from tests.support.gloo_ranks import run_ranks
from tests.support.interpreted import interpreted

Program = tuple[Callable[..., Any], list[torch.Tensor]]


def _exchange(x: torch.Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> torch.Tensor:
    return functional.wait_tensor(functional.all_to_all_single(x, received, sent, dist.group.WORLD))


def _lookups(join: Callable[[list[torch.Tensor]], torch.Tensor], batch: int, *dtypes: torch.dtype) -> Program:
    tables = [torch.randn(7, 4).to(dtype) for dtype in dtypes]

    def program(*indices: torch.Tensor) -> torch.Tensor:
        return _exchange(join([F.embedding(i, table) for i, table in zip(indices, tables, strict=True)]))

    return program, [torch.randint(7, (batch,)) for _ in dtypes]


def _tables_of_two_dtypes(rank: int) -> Program:
    """``cat`` promotes the result of the first table."""
    return _lookups(lambda parts: torch.cat(parts, 1), 8, torch.bfloat16, torch.float32)


def _computed_tables_of_two_dtypes(rank: int) -> Program:
    return _lookups(lambda parts: torch.cat([p * 2 for p in parts], 1), 8, torch.bfloat16, torch.float32)


def _slices_of_half_rows(rank: int) -> Program:
    """Three rows are flattened, and then divided among two ranks."""
    return _lookups(lambda parts: torch.cat(parts, 1).view(-1), 3, torch.float32, torch.float32)


def _one_table_of_half_rows(rank: int) -> Program:
    return _lookups(lambda parts: parts[0].view(-1), 3, torch.float32)


def _a_table_counted_from_the_end(rank: int) -> Program:
    def program(gradients: torch.Tensor, *indices: torch.Tensor) -> list[torch.Tensor]:
        received = _exchange(gradients)
        parts = [received.select(1, table) for table in (0, 1, -1)]
        return [torch.zeros(7, 4).index_put((i,), p, accumulate=True) for i, p in zip(indices, parts, strict=True)]

    return program, [torch.randn(4, 3, 4), *(torch.randint(7, (4,)) for _ in range(3))]


def _rows_read_in_parts(rank: int) -> Program:
    counts = [[2, 3], [4, 1]]
    received = [row[rank] for row in counts]

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return _exchange(x, received, counts[rank]).view(-1, 8) @ w

    return program, [torch.randn(sum(counts[rank]), 2, 8), torch.randn(8, 5)]


def _experts(reduce: Callable[[torch.Tensor], torch.Tensor], inverse: Callable[..., torch.Tensor]) -> Program:
    same = torch.Generator().manual_seed(0)

    def program(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ordered, order = torch.sort(ids.reshape(-1))
        ends = torch.histc(ordered.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        y = torch._grouped_mm(x[order // 2], weights, offs=ends)
        return reduce(y[inverse(order)].view(-1, 2, 16).sum(1))

    weights = (torch.randn(4, 16, 16, generator=same) / 4).bfloat16()
    ids = torch.randint(0, 4, (16, 2), generator=same)
    return program, [torch.randn(16, 16, generator=same).bfloat16(), ids, weights]


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).index_put((order,), torch.arange(order.shape[0]))


def _summed(x: torch.Tensor) -> torch.Tensor:
    return all_reduce(x, "sum", dist.group.WORLD)


def _places_that_fall(rank: int) -> Program:
    return _experts(_summed, lambda o: torch.empty_like(o).index_put((o,), torch.arange(0, -o.shape[0], -1)))


def _places_added_to_others(rank: int) -> Program:
    def inverse(order: torch.Tensor) -> torch.Tensor:
        count = order.shape[0]
        return torch.full_like(order, -count).index_put((order,), torch.arange(count), accumulate=True)

    return _experts(_summed, inverse)


def _columns_of_experts(rank: int) -> Program:
    return _experts(lambda x: reduce_scatter(x, "sum", 1, dist.group.WORLD), _inverse)


def _gathered_experts(rank: int) -> Program:
    def gathered(x: torch.Tensor) -> torch.Tensor:
        return functional.wait_tensor(functional.all_gather_tensor(x, 0, dist.group.WORLD))

    return _experts(gathered, _inverse)


LAYOUT, UNEVEN = {"layout"}, {"uneven_splits"}
CASES: dict[str, tuple[Callable[[int], Program], dict[str, Any], set[str]]] = {
    "tables of two dtypes": (_tables_of_two_dtypes, {}, LAYOUT),
    "computed tables of two dtypes": (_computed_tables_of_two_dtypes, {}, LAYOUT),
    "slices of half rows": (_slices_of_half_rows, {}, LAYOUT),
    "one table of half rows": (_one_table_of_half_rows, {}, LAYOUT),
    "a table counted from the end": (_a_table_counted_from_the_end, {}, {"overlapped"}),
    "rows read in parts": (_rows_read_in_parts, {}, UNEVEN),
    "places that fall": (_places_that_fall, {}, {"overlapped"}),
    "places added to others": (_places_added_to_others, {}, {"overlapped"}),
    "columns of experts": (_columns_of_experts, {}, LAYOUT),
    "gathered experts, unrolled": (_gathered_experts, {}, {"overlapped"}),
    "gathered experts, no looping op": (_gathered_experts, {"step_node_budget": 1}, {"too_many_steps"}),
}


def _outcomes(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """``{case: (largest error, codes)}``. The codes are those of all reasons in the reports. If a site is overlapped,
    the code ``overlapped`` is added."""
    compile_anew()
    found = {}
    for name in names:
        make, fields, _ = CASES[name]
        torch._dynamo.reset()
        torch.manual_seed(rank)
        program, inputs = make(rank)
        reports: list[OverlapReport] = []
        config = OverlapConfig(schedule="ring", sub_chunks=2, sequence_parallel="off", **fields)
        compiled = torch.compile(program, backend=interpreted(config, reports, compared=True), dynamic=False)
        with torch.no_grad():
            expected, results = ([r] if torch.is_tensor(r) else r for r in (program(*inputs), compiled(*inputs)))
        # Python's ``max`` may lose a NaN.
        errors = [(a.double() - b.double()).abs().max() for a, b in zip(results, expected, strict=True)]
        off = torch.stack(errors).max().item()
        codes = {n.reason.code for r in reports for n in r.near_misses}
        for site in (site for r in reports for site in r.sites):
            codes |= {site.decision.status} if site.decision.status == "overlapped" else set()
            codes |= {reason.code for reason in site.decision.reasons}
        found[name] = (off, codes)
    return found


def test_lookalikes() -> None:
    for rank, found in enumerate(run_ranks(2, _outcomes, list(CASES), timeout=300)):
        wrong = {n: (off, codes) for n, (off, codes) in found.items() if not (off < 0.05 and codes == CASES[n][2])}
        assert found.keys() == CASES.keys() and wrong == {}, f"rank {rank}: {wrong}"
