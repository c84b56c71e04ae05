# SPDX-License-Identifier: Apache-2.0
"""The kernel that looks up tables and sends the results, on processes that share memory, in Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace

import pytest
import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.lowerings.fused.table_calls import Lookups
from overlap_inductor.lowerings.fused.table_calls import _on_device
from overlap_inductor.lowerings.fused.table_calls import look_up
from overlap_inductor.lowerings.fused.table_parameters import TableParameters
from overlap_inductor.lowerings.fused.table_parameters import needed
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import at_rest
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared

PARAMETERS = TableParameters(1, blocks_an_sm=2, unroll=2, bags=4, most=2, copies=2, copy_words=64)
CALLS = 2
aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """Calls of one site. ``rows``: for each table, the number of bags that one rank receives. Bags have 0 to
    ``longest`` indices. With ``longest`` 0, the site looks up plain rows."""

    world_size: int = 2
    tables: int = 2
    rows: int = 5
    width: int = 8
    longest: int = 3
    mean: bool = False
    weighted: bool = False
    padded: bool = False
    last_offset: bool = False
    rows_first: bool = True
    saves: bool = False
    dtype: torch.dtype = torch.float32
    index: torch.dtype = torch.int64

    @property
    def bags(self) -> int:
        return self.world_size * self.rows

    @property
    def need(self) -> tuple[int, int]:
        return needed(self.world_size, self.tables, self.rows, self.width, self.dtype.itemsize)

    def lookups(self, rank: int, call: int) -> Lookups:
        generator = torch.Generator().manual_seed(10 * call + rank)
        height = 5 + rank
        tables = [torch.randn(height + t, self.width, generator=generator).to(self.dtype) for t in range(self.tables)]
        lengths = [torch.randint(self.longest + 1, (self.bags,), generator=generator) for _ in tables]
        counts = [int(n.sum()) if self.longest else self.bags for n in lengths]
        indices = [torch.randint(len(t), (n,), generator=generator).to(self.index) for t, n in zip(tables, counts)]
        offsets = [(n.cumsum(0) - n).to(self.index) for n in lengths] if self.longest else []
        if self.last_offset:
            offsets = [torch.cat([o, torch.tensor([n]).to(self.index)]) for o, n in zip(offsets, counts)]
        samples = [torch.rand(n, generator=generator).to(self.dtype) for n in counts] if self.weighted else []
        padding = [1 if self.padded else -1] * self.tables
        return Lookups(
            tables, indices, offsets, samples, padding, self.bags, self.mean, self.last_offset, self.rows_first
        )


CASES = {
    "sums": Case(),
    "sums, three ranks, int32, saved": Case(3, 3, 3, saves=True, index=torch.int32),
    "sums, tables first, bf16, rows that are no power of two": Case(width=24, rows_first=False, dtype=torch.bfloat16),
    "means, padding, saved": Case(mean=True, padded=True, saves=True),
    "means, fp16, last offset": Case(mean=True, last_offset=True, dtype=torch.float16),
    "weights of samples, padding": Case(weighted=True, padded=True, longest=4),
    "plain rows": Case(longest=0, tables=1),
    "plain rows, three ranks, bf16, tables first": Case(3, 2, 5, longest=0, rows_first=False, dtype=torch.bfloat16),
    "empty bags": Case(longest=1, rows=3),
}


def _pooled(lookups: Lookups, table: int, dtype: torch.dtype) -> torch.Tensor:
    """One table's results in ``dtype``. A bag's rows are added one after the other. For a mean, the sum is then
    divided. Plain rows are only read."""
    if not lookups.offsets:
        return lookups.tables[table][lookups.indices[table].long()].to(dtype)
    rows, indices = lookups.tables[table].to(dtype), lookups.indices[table].tolist()
    bounds = [*lookups.offsets[table].tolist()[: lookups.bags], len(indices)]
    found = torch.zeros(lookups.bags, lookups.width, dtype=dtype)
    for bag, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        kept = [i for i in range(begin, end) if indices[i] != lookups.padding[table]]
        for i in kept:
            scale = lookups.samples[table][i].to(dtype) if lookups.samples else 1
            found[bag] += rows[indices[i]] * scale
        if lookups.mean and kept:
            found[bag] /= len(kept)
    return found


def _received(every: list[list[torch.Tensor]], case: Case, rank: int) -> torch.Tensor:
    """What ``rank`` receives. ``every``: for each rank, its pooled tables ``[bags, width]``."""
    slots = [torch.stack([t.view(case.world_size, case.rows, -1)[rank] for t in tables]) for tables in every]
    return torch.stack([slot.transpose(0, 1) if case.rows_first else slot for slot in slots]).flatten()


def _rank(rank: int, workspace: SharedWorkspace, out: torch.Tensor, case: Case) -> None:
    launch = workspace.launch(rank)
    for call in range(CALLS):
        lookups, saved = case.lookups(rank, call), []
        if case.saves:
            saved = [
                (i.new_full(i.shape, -7), o.new_full(o.shape, -7)) for i, o in zip(lookups.indices, lookups.offsets)
            ]
        out[call, rank] = look_up(lookups, launch, PARAMETERS, saved)
        assert at_rest(launch.slot) and launch.slot.calls.tolist() == [call + 1]
        launch.faults.check()
        for table, (of_index, sizes) in enumerate(saved):
            _check_saved(lookups, table, of_index, sizes)


def _check_saved(lookups: Lookups, table: int, of_index: torch.Tensor, sizes: torch.Tensor) -> None:
    """``of_index`` and ``sizes`` must hold what torch's GPU kernel writes: each index's bag, and each bag's number of
    indices without padding."""
    lengths = torch.diff(lookups.offsets[table][: lookups.bags].long(), append=torch.tensor([len(of_index)]))
    bags = torch.repeat_interleave(torch.arange(lookups.bags), lengths)
    kept = torch.zeros(lookups.bags, dtype=torch.int64).index_add(
        0, bags, (lookups.indices[table] != lookups.padding[table]).long()
    )
    assert torch.equal(of_index.long(), bags) and torch.equal(sizes.long(), kept)


@pytest.mark.parametrize("name", CASES)
def test_against_fp64_and_the_order_of_torch(name: str) -> None:
    """Results in fp32 and fp16 are bitwise equal to fp32 sums or means in the order of the indices, rounded once. All
    results are close to fp64 and to torch's op."""
    case = CASES[name]
    out = shared(CALLS, case.world_size, case.bags * case.tables * case.width, dtype=case.dtype, fill=float("nan"))
    run_ranks(case.world_size, _rank, SharedWorkspace.of(case.world_size, *case.need), out, case)
    for call in range(CALLS):
        every = [case.lookups(rank, call) for rank in range(case.world_size)]
        for dtype in (torch.float32, torch.float64):
            pooled = [[_pooled(one, t, dtype) for t in range(case.tables)] for one in every]
            for rank in range(case.world_size):
                expected, found = _received(pooled, case, rank), out[call, rank]
                # Triton's interpreter truncates to bf16, but torch rounds to nearest. So results in bf16 are not
                # compared bit for bit.
                if dtype == torch.float32 and case.dtype != torch.bfloat16:
                    assert torch.equal(found, expected.to(case.dtype)), f"call {call} rank {rank}"
                torch.testing.assert_close(found.to(dtype), expected, rtol=1e-2, atol=1e-2)
        pooled = [[_by_torch(one, t) for t in range(case.tables)] for one in every]
        for rank in range(case.world_size):
            torch.testing.assert_close(out[call, rank], _received(pooled, case, rank), rtol=1e-2, atol=1e-2)


def _by_torch(lookups: Lookups, table: int) -> torch.Tensor:
    weights, indices = lookups.tables[table], lookups.indices[table]
    if not lookups.offsets:
        return aten.embedding(weights, indices)
    samples = lookups.samples[table] if lookups.samples else None
    mode, padding = int(lookups.mean), lookups.padding[table]
    offsets = lookups.offsets[table]
    return aten._embedding_bag(weights, indices, offsets, False, mode, False, samples, lookups.last_offset, padding)[0]


def _rank_of_plain_rows(rank: int, workspace: SharedWorkspace, out: torch.Tensor, case: Case) -> None:
    lookups = case.lookups(rank, 0)
    for table in lookups.tables:
        table.fill_(-0.0)
    out[rank] = look_up(lookups, workspace.launch(rank), PARAMETERS)


def test_plain_rows_keep_the_sign_of_zero() -> None:
    case = CASES["plain rows"]
    out = shared(case.world_size, case.bags * case.tables * case.width, dtype=case.dtype, fill=1.0)
    run_ranks(case.world_size, _rank_of_plain_rows, SharedWorkspace.of(case.world_size, *case.need), out, case)
    assert (out == 0).all() and out.signbit().all()


def test_facts_that_were_not_copied_are_copied_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call copies changed facts, for example the tables' addresses, to the device. If the copy fails, the next call
    must copy them again. Otherwise the next call would read the facts of an older call."""
    launch = SharedWorkspace.of(2, *Case().need).launch(0)
    _on_device([1, 2], launch)

    def fails(*_: object, **options: object) -> torch.Tensor:
        raise RuntimeError("no copy")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no copy"):
        patched.setattr(torch.Tensor, "copy_", fails)
        _on_device([3, 4], launch)
    assert _on_device([3, 4], launch).tolist() == [3, 4]


@contextmanager
def _with_asserts() -> Iterator[None]:
    """Set the interpreter's option ``debug``, as ``look_up`` does for a GPU. Without ``debug``, asserts are dropped."""
    from triton.runtime import interpreter

    before = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter.interpreter_builder.options = before


def _changed(lookups: Lookups, index: int | None = None, offsets: list[int] | None = None) -> Lookups:
    if index is not None:
        indices = lookups.indices[0].clone()
        indices[-1] = index
        return replace(lookups, indices=[indices, *lookups.indices[1:]])
    return replace(lookups, offsets=[torch.tensor(offsets), *lookups.offsets[1:]])


def test_a_wrong_index_or_offset_fails_an_assert() -> None:
    """On a GPU, the assert stops the kernel. Without the assert, the kernel could read and send another tensor's
    memory."""
    case = Case(rows=2, tables=1)
    good = case.lookups(0, 0)
    wrong = [_changed(good, index=len(good.tables[0])), _changed(good, index=-1)]
    wrong += [_changed(good, offsets=o) for o in ([0, 2, 1, 2], [0, 1, 1, 99], [0, 1, -1, 1])]
    for lookups in wrong:
        launch = SharedWorkspace.of(2, *case.need).launch(0, 20_000)
        with _with_asserts(), pytest.raises(Exception, match="out of range|not in order"):
            look_up(lookups, launch, PARAMETERS)


def _alone(rank: int, workspace: SharedWorkspace, out: torch.Tensor, case: Case) -> None:
    """Rank 0 runs a call for which the other rank sends nothing. Rank 0's next call raises."""
    launch = workspace.launch(rank, patience_ns=20_000)
    out.copy_(look_up(case.lookups(rank, 0), launch, PARAMETERS))
    with pytest.raises(TransferError):
        look_up(case.lookups(rank, 1), launch, PARAMETERS)


def test_results_that_do_not_arrive_become_nan() -> None:
    case = CASES["sums"]
    out = shared(case.bags * case.tables * case.width, dtype=case.dtype, fill=0.0)
    run_ranks(1, functools.partial(_alone, workspace=SharedWorkspace.of(2, *case.need), out=out, case=case))
    own, theirs = out.chunk(2)
    pooled = [_pooled(case.lookups(0, 0), t, torch.float32) for t in range(case.tables)]
    assert torch.equal(own, _received([pooled], case, 0)) and theirs.isnan().all()


def test_what_the_kernel_does_not_support() -> None:
    case = Case(rows=2, tables=2)
    launch = SharedWorkspace.of(2, *case.need).launch(0, 20_000)
    good = case.lookups(0, 0)
    table, indices, offsets = good.tables[0], good.indices[0], good.offsets[0]
    for wrong, text in (
        ({"tables": [t.double() for t in good.tables]}, "float64"),
        ({"tables": [t[:, :6].contiguous() for t in good.tables]}, "vectors of 16 bytes"),
        ({"tables": [torch.empty(8, 5).t(), table]}, "strides"),
        ({"indices": [indices.int(), good.indices[1]]}, "int32"),
        ({"offsets": [offsets[:-1], good.offsets[1]]}, "expected 4"),
        ({"samples": [torch.rand(1), torch.rand(2)]}, "weights of samples"),
        ({"bags": 3}, "equal slices"),
        ({"tables": [*good.tables, table], "indices": [*good.indices, indices], "offsets": [*good.offsets, offsets],
          "padding": [-1] * 3}, "its slot has"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=text):
            look_up(replace(good, **wrong), launch, PARAMETERS)
