# SPDX-License-Identifier: Apache-2.0
"""Compares each op of epilogues with torch's op. Compares results in fp64 with those of fused kernels that have
epilogues. Ranks are processes that share memory. Kernels run in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels import epilogue as kernels
from overlap_inductor.lowerings.fused import calls as fused
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.sites import tile_epilogue as tail
from overlap_inductor.sites.epilogue_program import TORCH_OPS
from overlap_inductor.sites.epilogue_program import Epilogue
from overlap_inductor.sites.epilogue_program import applied
from overlap_inductor.sites.epilogue_program import from_text
from overlap_inductor.sites.epilogue_program import to_text
from tests.kernels.ranks import SharedWorkspace
from tests.kernels.ranks import run_ranks
from tests.kernels.ranks import shared
from tests.support.shared_memory import SMALL_TILES

SILU = (("neg", "x"), ("exp", "t0"), ("add", "t1", 1.0), ("div", "x", "t2"))
ONE_ARGUMENT = ("abs", "exp", "neg", "relu", "sigmoid")


@triton.jit
def of_one_tile(x, y, e0, e1, rows, columns, EPILOGUE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = (at < rows)[:, None] & (at < columns)[None, :]
    offsets = at[:, None] * columns + at[None, :]
    tile = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        y + offsets,
        kernels.by_quarters(EPILOGUE, tile, 0, at, at < rows, 0, columns, e0, e1, y.dtype.element_ty),
        mask=inside,
    )


def computed(epilogue: Epilogue, x: torch.Tensor, extras: list[torch.Tensor]) -> torch.Tensor:
    y = torch.empty_like(x)
    of_one_tile[(1,)](
        x,
        y,
        *extras,
        *[None] * (2 - len(extras)),
        *x.shape,
        kernels.function_of(((epilogue.extras, epilogue.ops),)),
        32,
    )
    return y


@pytest.mark.parametrize("name", TORCH_OPS)
def test_each_op_agrees_with_torch(name: str) -> None:
    x = torch.randn(13, 24, generator=torch.Generator().manual_seed(1)) * 3
    x[0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    x[2] = torch.linspace(-0.3, 0.3, 24)
    x[3] = x[2] * 1e-5
    y = torch.randn(13, 24, generator=torch.Generator().manual_seed(2))
    y[1, 0] = float("nan")
    others: list[Any] = [[]] if name in ONE_ARGUMENT else [["float16"]] if name == "to" else [["e0"], [0.75]]
    for other in others:
        epilogue = Epilogue(("full",) if other == ["e0"] else (), ((name, "x", *other),))
        extras = [y] if other == ["e0"] else []
        expected = applied(epilogue, x, extras)
        assert torch.allclose(computed(epilogue, x, extras), expected, rtol=2e-6, atol=1e-12, equal_nan=True), other
    if name in ("sub", "div"):
        first = Epilogue((), ((name, 2.0, "x"),))
        assert torch.allclose(computed(first, x, []), applied(first, x, []), rtol=1e-5, equal_nan=True)


def test_torch_triton_and_the_search_for_epilogues_know_the_same_ops() -> None:
    assert set(TORCH_OPS) == set(kernels.TRITON_OPS) == {*tail._OPS.values(), "to"}


@pytest.mark.parametrize(("kind", "shape"), [("full", (13, 24)), ("row", (24,)), ("column", (13,)), ("scalar", (1,))])
def test_extra_tensors_of_each_kind(kind: str, shape: tuple[int, ...]) -> None:
    """The epilogue reads two extra tensors of different dtypes, with NaN in the memory after them. It rounds to fp16,
    because the interpreter does not round to bf16 as a GPU does."""
    x = torch.randn(13, 24)
    first, second = (torch.full((1000,), float("nan")) for _ in range(2))
    extras = [e[: torch.Size(shape).numel()].normal_().view(shape) for e in (first, second.bfloat16())]
    epilogue = Epilogue((kind, kind), (("mul", "x", "e0"), ("to", "t0", "float16"), ("add", "t1", "e1")))
    wide = [e.float()[:, None] if kind == "column" else e.float() for e in extras]
    expected = (x * wide[0]).half().float() + wide[1]
    assert torch.equal(applied(epilogue, x, extras), expected) and torch.equal(computed(epilogue, x, extras), expected)


def test_epilogues_survive_a_round_trip_through_text() -> None:
    epilogues = (None, Epilogue(("full", "row"), (("mul", "x", "e0"), ("add", "t0", 0.5))))
    assert from_text(to_text(epilogues)) == epilogues
    assert str(epilogues[1]) == "e0 full, e1 row: mul(x, e0), add(t0, 0.5)"


def test_a_function_has_room_for_two_extra_tensors() -> None:
    with pytest.raises(ValueError, match="read 3 extra tensors; a launch has room for 2"):
        kernels.source_of(((("row",), SILU), None, (("row", "row"), SILU)))


HOSTILE = {
    "code as an argument": ((), (("add", "x", "x); __import__('os').system('true') #"),)),
    "code on several lines": ((), (("add", "x", "0\n        import os"),)),
    "an unknown name": ((), (("mul", "x", "open"),)),
    "a name of another weight": ((), (("mul", "x", "t0_1"),)),
    "a name that is used before it has a value": ((), (("mul", "x", "t1"), ("neg", "t0"))),
    "a tensor that is not given": (("row",), (("mul", "x", "e1"),)),
    "an unknown op": ((), (("__import__", "x"),)),
    "an op that is not a string": ((), ((1, "x"),)),
    "an argument too few": ((), (("add", "x"),)),
    "an argument too many": ((), (("neg", "x", "x"),)),
    "infinity": ((), (("add", "x", float("inf")),)),
    "not a number": ((), (("add", "x", float("nan")),)),
    "a truth value": ((), (("add", "x", True),)),
    "a list": ((), (("add", "x", [1]),)),
    "an unknown dtype": ((), (("to", "x", "float32).foo(tl.float32"),)),
    "an unknown kind": (("matrix",), (("mul", "x", "e0"),)),
    "no op": ((), ()),
}


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_invalid_program_becomes_no_code(program: Any) -> None:
    with pytest.raises(ValueError, match="Compile the model anew"):
        kernels.source_of((program,))


@pytest.mark.parametrize(
    "line",
    [
        "x = __builtins__", "x = tl.core", "x = x.__class__", "x = open(x)",
        "x = (lambda: x)()", "x = [e0 for e0 in x]", "x = 'text'", "import os", "x = tl.load.to", "x = 1e999",
        "x = True", "exec(x)", "def epilogue(x): return x",
    ],
)  # fmt: skip
def test_a_line_that_no_epilogue_needs_is_rejected_in_generated_source(line: str) -> None:
    """The test adds the line to a source that ``source_of`` made. ``check_source`` must then reject the source."""
    own = kernels.source_of((((), (("neg", "x"),)),))
    kernels.check_source(own)
    with pytest.raises(ValueError, match="which no epilogue needs"):
        kernels.check_source(own.replace("    return x", f"    {line}\n    return x"))


def test_the_source_of_every_op_and_kind_is_accepted() -> None:
    for kind in ("full", "row", "column", "scalar"):
        kernels.source_of((((kind,), (("mul", "x", "e0"),)),))
    for name, template in kernels.TRITON_OPS.items():
        second = ("bfloat16",) if name == "to" else (-1e-20,)
        kernels.source_of((((), ((name, "x", *second * ("{1}" in template)),)),))


@dataclass(frozen=True)
class Case:
    """A call with epilogues. Extra tensors differ from rank to rank.

    Attributes:
        epilogues: for each result, its epilogue, or ``None`` if it has none.
        widths: columns of each result.
        rows: rows of a shard.
        missing: rows that the last shard lacks.
        keep: the workspace must still hold the gathered tensor after the kernel. So the kernel does not end the call.
    """

    pattern: str
    world_size: int
    epilogues: tuple[Epilogue | None, ...]
    widths: tuple[int, ...] = (24,)
    rows: int = 24
    missing: int = 0
    keep: bool = False

    @property
    def whole(self) -> int:
        return self.world_size * self.rows - self.missing

    @property
    def rows_out(self) -> int:
        return self.rows if self.pattern == "matmul_reduce_scatter" else self.whole

    def extras(self, rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(100 + rank)
        found = []
        for epilogue, width in zip(self.epilogues, self.widths, strict=True):
            for kind in epilogue.extras if epilogue is not None else ():
                shape = {"full": (self.rows_out, width), "row": (width,), "column": (self.rows_out,), "scalar": (1,)}[
                    kind
                ]
                found.append(torch.randn(shape, generator=generator).half())
        return found


RESIDUAL = Epilogue(("full",), (("add", "e0", "x"),))
SCALED = Epilogue(("row", "column"), (("mul", "x", "e0"), ("add", "t0", "e1"), ("maximum", "t1", 0.0)))
CASES = {
    "gather, three weights, two with epilogues": Case(
        "all_gather_matmul", 2, (Epilogue((), SILU), None, RESIDUAL), (24, 16, 40)
    ),
    "gather, rows that are no multiple of a tile, gathered tensor read": Case(
        "all_gather_matmul", 3, (SCALED,), rows=20, keep=True
    ),
    "scatter, residual": Case("matmul_reduce_scatter", 2, (RESIDUAL,), rows=40),
    "all-reduce, a short shard, residual": Case("matmul_all_reduce", 3, (RESIDUAL,), rows=20, missing=3),
    "all-reduce, row and column": Case("matmul_all_reduce", 2, (SCALED,)),
    "all-reduce, summed in place": Case("matmul_all_reduce", 2, (SCALED,), rows=32),
}


def _rank(
    rank: int, workspace: SharedWorkspace, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, case: Case
) -> None:
    launch, parameters = workspace.launch(rank), FusedParameters(2, parts=2, pieces=2, pushers=1, **SMALL_TILES)
    tail = fused.Tail(case.epilogues, case.extras(rank))
    for call in range(len(a)):
        if case.pattern == "all_gather_matmul":
            weights = [w.t() for w in b[rank].split(case.widths)]
            out[call, rank] = torch.cat(
                fused.all_gather_matmuls(
                    a[call, rank], weights, launch, parameters, [None] * len(weights), case.keep, tail
                ),
                1,
            )
            if case.keep:
                fused.end(launch)
        else:
            out[call, rank] = getattr(fused, case.pattern)(a[call, rank], b[rank].t(), launch, parameters, tail=tail)
        launch.faults.check()


def _exact(case: Case, rank: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The result of ``rank``: product and sum in fp64, the epilogue in fp32."""
    if case.pattern == "all_gather_matmul":
        result = a.flatten(0, 1).double() @ b[rank].double().t()
    else:
        result = sum(a[r].double() @ b[r].double().t() for r in range(case.world_size))  # type: ignore[assignment]
        result = (
            result[rank * case.rows : (rank + 1) * case.rows] if case.pattern == "matmul_reduce_scatter" else result
        )
    pieces, extras = [], iter(case.extras(rank))
    for epilogue, piece in zip(case.epilogues, result.split(case.widths, 1), strict=True):
        given = [next(extras) for _ in epilogue.extras] if epilogue is not None else []
        pieces.append(applied(epilogue, piece.float(), given).double())
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_fp64(name: str) -> None:
    case, calls, inner = CASES[name], 2, 32
    w, gathers, columns = case.world_size, case.pattern == "all_gather_matmul", sum(case.widths)
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(calls, w, case.rows if gathers else case.whole, inner, generator=generator).half().share_memory_()
    b = (torch.randn(w, columns, inner, generator=generator) / 4).half().share_memory_()
    out = shared(calls, w, case.rows_out, columns, dtype=torch.float16, fill=float("nan"))
    run_ranks(w, _rank, SharedWorkspace.of(w, 4 * w * 48 * max(columns, inner), 4), a, b, out, case)
    for call in range(calls):
        for rank in range(w):
            assert torch.allclose(out[call, rank].double(), _exact(case, rank, a[call], b), rtol=1e-2, atol=2e-2), (
                call,
                rank,
            )


def test_extra_tensors_that_do_not_fit_are_refused() -> None:
    launch = SharedWorkspace.of(2, 8192, 2).launch(0)
    a, b, p = torch.zeros(32, 32).half(), torch.zeros(16, 32).half().t(), FusedParameters(1, **SMALL_TILES)
    with pytest.raises(
        UnsupportedError, match=r"have shapes \[\[32, 16\]\]; expected \[\[16, 16\]\], at most 2 tensors"
    ):
        fused.matmul_reduce_scatter(a, b, launch, p, tail=fused.Tail((RESIDUAL,), [torch.zeros(32, 16).half()]))
    with pytest.raises(UnsupportedError, match="not contiguous, or not floating point"):
        fused.matmul_reduce_scatter(a, b, launch, p, tail=fused.Tail((RESIDUAL,), [torch.zeros(16, 16).half().t()]))
