# SPDX-License-Identifier: Apache-2.0
"""``find_norm`` finds the residual add and the RMSNorm after an all-reduce. It must not find a chain of ops that is
only similar to them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from overlap_inductor.passes.find import SiteFinder
from overlap_inductor.sites.norm_epilogue import NormEpilogue
from overlap_inductor.sites.norm_epilogue import find_norm
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.torch_compat.functional_collectives import all_reduce
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.hand_graph import HandGraph

aten, prims = torch.ops.aten, torch.ops.prims
ROWS, COLUMNS, EPS = 6, 32, 1e-5


@pytest.fixture(autouse=True)
def group() -> Iterator[Any]:
    with fake_group() as made:
        yield made


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[NormEpilogue | None]]:
    """A function. It compiles its argument ``function`` in mode ``report`` and returns one entry for each all-reduce
    site: the norm found after the site, or ``None``."""
    results: list[NormEpilogue | None] = []
    find = SiteFinder.run

    def run(finder: SiteFinder) -> SiteFinder:
        find(finder)
        results.extend(find_norm(s.nodes.result) for s in finder.sites if isinstance(s.nodes, ReduceNodes))
        return finder

    monkeypatch.setattr(SiteFinder, "run", run)

    def of(function: Callable[..., Any], *inputs: Any) -> list[NormEpilogue | None]:
        with torch.no_grad():
            report_of(function, *inputs, mode="report")
        return results

    return of


def llama_norm() -> Any:
    """Hugging Face's norm. Without transformers, the test is skipped."""
    return pytest.importorskip(
        "transformers.models.llama.modeling_llama", reason="transformers is not installed here; `make test` installs it"
    ).LlamaRMSNorm(COLUMNS, EPS)


@pytest.mark.parametrize("shape", [(ROWS, 16), (1, ROWS, 16)], ids=["rows", "a batch of one sequence"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_layers_of_llama(shape: tuple[int, ...], dtype: torch.dtype, group: Any, found: Any) -> None:
    norms = [llama_norm().to(dtype) for _ in range(2)]
    weights = [torch.randn(16, COLUMNS).to(dtype), torch.randn(COLUMNS, 16).to(dtype)]

    def layers(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        residual = residual + all_reduce(x @ weights[0], "sum", group)
        hidden = norms[0](residual)
        added = all_reduce(torch.relu(hidden @ weights[1]) @ weights[0], "sum", group) + residual
        return norms[1](added), added

    residual = torch.randn(*shape[:-1], COLUMNS).to(dtype)
    first, second = found(layers, torch.randn(shape).to(dtype), residual)
    assert first is not None and second is not None
    assert first.residual.op == "placeholder" and second.residual is first.residual_out
    for norm in (first, second):
        assert norm.eps == EPS and norm.weight.op == "placeholder" and list(norm.weight.meta["val"].shape) == [COLUMNS]
        assert (
            norm.normed.target is aten.mul.Tensor
            and norm.normed.meta["val"].dtype == dtype
            and norm.residual_out.target is aten.add.Tensor
        )


def test_a_norm_that_rounds_later_is_not_found(group: Any, found: Any) -> None:
    norm, weight = torch.nn.RMSNorm(COLUMNS, EPS).bfloat16(), torch.randn(16, COLUMNS).bfloat16()
    assert found(
        lambda x, y: norm(y + all_reduce(x @ weight, "sum", group)),
        torch.randn(ROWS, 16).bfloat16(),
        torch.randn(ROWS, COLUMNS).bfloat16(),
    ) == [None]


class Hand:
    """The chain of residual add and norm, node by node. Each optional argument of ``norm`` changes one part."""

    def __init__(self) -> None:
        self.g = HandGraph()
        x, w, self.residual, self.weight = (
            self.input(n, *s)
            for n, s in (("x", (ROWS, 16)), ("w", (16, COLUMNS)), ("residual", (ROWS, COLUMNS)), ("weight", (COLUMNS,)))
        )
        self.result = self.g.reduce(self.g.mm(x, w))

    def input(self, name: str, *shape: int) -> fx.Node:
        return self.g.input(*shape, dtype=torch.bfloat16, name=name)

    def wide(self, node: fx.Node) -> fx.Node:
        return self.g.call(prims.convert_element_type.default, node, torch.float32)

    def norm(
        self,
        added: fx.Node,
        square: Callable[[HandGraph, fx.Node], fx.Node] = lambda g, x: g.call(aten.pow.Tensor_Scalar, x, 2),
        mean: Callable[[HandGraph, fx.Node], fx.Node] = lambda g, x: g.call(aten.mean.dim, x, [-1], True),
        shift: Callable[[HandGraph, fx.Node], fx.Node] = lambda g, x: g.call(aten.add.Tensor, x, EPS),
        root: Any = aten.rsqrt.default,
        weight: fx.Node | None = None,
        weight_first: bool = True,
    ) -> fx.Node:
        wide = self.wide(added)
        inverse = self.g.call(root, shift(self.g, mean(self.g, square(self.g, wide))))
        rounded = self.g.call(
            prims.convert_element_type.default, self.g.call(aten.mul.Tensor, inverse, wide), torch.bfloat16
        )
        factors = [weight or self.weight, rounded]
        return self.g.call(aten.mul.Tensor, *(factors if weight_first else factors[::-1]))

    def add(self, **keywords: Any) -> fx.Node:
        return self.g.call(aten.add.Tensor, self.result, self.residual, **keywords)

    def found(self, *outputs: fx.Node) -> NormEpilogue | None:
        self.g.output(*outputs)
        return find_norm(self.result)


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"weight_first": False, "mean": lambda g, x: g.call(aten.mean.dim, x, [1], True)},
        {"square": lambda g, x: g.call(aten.mul.Tensor, x, x), "shift": lambda g, x: g.call(aten.add.Tensor, x, 1)},
    ],
)
def test_spellings(keywords: dict[str, Any]) -> None:
    h = Hand()
    added = h.add()
    normed = h.norm(added, **keywords)
    assert h.found(normed, added) == NormEpilogue(
        h.residual, h.weight, 1.0 if "square" in keywords else EPS, normed, added
    )


def test_views_between() -> None:
    h = Hand()
    view = h.g.view(h.result, 2, 3, COLUMNS)
    h.residual = h.g.view(h.residual, 2, 3, COLUMNS)
    added = h.g.call(aten.add.Tensor, h.residual, view)
    normed = h.norm(h.g.view(added, ROWS, COLUMNS))
    assert h.found(normed) == NormEpilogue(h.residual, h.weight, EPS, normed, added)


NEAR_MISSES: dict[str, dict[str, Any]] = {
    "mean over rows": {"mean": lambda g, x: g.call(aten.mean.dim, x, [0], True)},
    "mean over everything": {"mean": lambda g, x: g.call(aten.mean.dim, x, [0, 1], True)},
    "a sum": {"mean": lambda g, x: g.call(aten.sum.dim_IntList, x, [-1], True)},
    "eps times two": {"shift": lambda g, x: g.call(aten.add.Tensor, x, EPS, alpha=2)},
    "eps is a tensor": {"shift": lambda g, x: g.call(aten.add.Tensor, x, x)},
    "eps is a bound": {"shift": lambda g, x: g.call(aten.clamp_min.default, x, EPS)},
    "a square root": {"root": aten.sqrt.default},
    "a cube": {"square": lambda g, x: g.call(aten.pow.Tensor_Scalar, x, 3)},
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_chain_that_is_almost_a_norm_is_not_found(name: str) -> None:
    h = Hand()
    normed = h.norm(h.add(), **NEAR_MISSES[name])
    assert h.found(normed) is None


@pytest.mark.parametrize(
    "what",
    [
        "sum read elsewhere",
        "alpha",
        "residual is one row",
        "weight of a row each",
        "weight computed later",
        "wide read elsewhere",
        "two norms",
        "no norm",
        "square of another",
    ],
)
def test_a_chain_with_other_operands_or_readers_is_not_found(what: str) -> None:
    h = Hand()
    if what == "residual is one row":
        h.residual = h.weight
    added = h.add(alpha=2) if what == "alpha" else h.add()
    others: list[fx.Node] = [h.result] if what == "sum read elsewhere" else []
    keywords: dict[str, Any] = {}
    if what == "weight of a row each":
        keywords["weight"] = h.residual
    if what == "weight computed later":
        keywords["weight"] = h.g.call(aten.neg.default, h.weight)
    if what == "square of another":
        another = h.wide(h.residual)
        keywords["square"] = lambda g, x: g.call(aten.pow.Tensor_Scalar, another, 2)
    normed = h.wide(added) if what == "no norm" else h.norm(added, **keywords)
    if what == "wide read elsewhere":
        others.append(h.g.call(aten.neg.default, next(u for u in added.users)))
    if what == "two norms":
        others.append(h.norm(added))
    assert h.found(normed, *others) is None
