# SPDX-License-Identifier: Apache-2.0
"""FLOPs of nodes. PyTorch's formulas for matmuls and attention are not used, because they raise for some calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from overlap_inductor.sites.flops import bytes_read
from overlap_inductor.sites.flops import flops
from overlap_inductor.sites.flops import is_counted

aten = torch.ops.aten
Sizes = tuple[int, ...]


def node(target: Any, result: Sizes, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of ``target``. A tuple of sizes in ``args`` stands for a tensor of these sizes."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def tensor(sizes: Sizes) -> fx.Node:
        made = graph.placeholder("x")
        made.meta["val"] = torch.empty(sizes, dtype=torch.bfloat16)
        return made

    with mode:
        call = graph.call_function(target, tuple(tensor(a) if isinstance(a, tuple) else a for a in args), kwargs)
        call.meta["val"] = torch.empty(result, dtype=torch.bfloat16)
    return call


@pytest.mark.parametrize(
    "call",
    [
        (aten.mm.default, (64, 16), (64, 32), (32, 16)),
        (aten.mm.dtype, (64, 16), (64, 32), (32, 16), torch.float32),
        (aten.addmm.default, (64, 16), (16,), (64, 32), (32, 16)),
        (aten.addmm.dtype, (64, 16), (16,), (64, 32), (32, 16), torch.float32),
        (aten.bmm.default, (4, 16, 16), (4, 16, 32), (4, 32, 16)),
        (aten.bmm.dtype, (4, 16, 16), (4, 16, 32), (4, 32, 16), torch.float32),
        (aten.baddbmm.dtype, (4, 16, 16), (4, 16, 16), (4, 16, 32), (4, 32, 16), torch.float32),
        (aten._int_mm.default, (64, 16), (64, 32), (32, 16)),
        (aten._scaled_mm.default, (64, 16), (64, 32), (32, 16), (64, 1), (1, 16)),
    ],
    ids=lambda call: str(call[0]),
)
def test_matmuls_with_and_without_a_dtype_of_the_result(call: tuple[Any, ...]) -> None:
    made = node(*call)
    assert is_counted(made) and flops(made) == 2 * 64 * 32 * 16


def test_attention_with_fewer_heads_of_keys() -> None:
    """For each of 2 sequences and 8 heads of queries, the forward computes two products and the backward five. The
    sizes of a product are 64 queries, 128 keys and 32 elements."""
    query, key, of_one = (2, 8, 64, 32), (2, 2, 128, 32), 2 * 2 * 8 * 64 * 128 * 32
    name = "_scaled_dot_product_flash_attention"
    forward = node(getattr(aten, name).default, query, query, key, key)
    backward = node(getattr(aten, f"{name}_backward").default, query, query, query, key, key)
    assert is_counted(forward) and flops(forward) == 2 * of_one and flops(backward) == 5 * of_one


def test_attention_with_heads_after_tokens() -> None:
    query, key = (2, 64, 8, 32), (2, 128, 8, 32)
    made = node(aten._flash_attention_forward.default, query, query, key, key, None, None, 64, 128, 0.0, False, False)
    assert flops(made) == 2 * 2 * 2 * 8 * 64 * 128 * 32
    made = node(aten._efficient_attention_forward.default, query, query, key, key, None, None, None, None, None, 0.0, 0)
    assert flops(made) == 2 * 2 * 2 * 8 * 64 * 128 * 32


def test_shards_that_differ_a_little_count_the_same() -> None:
    larger, smaller = (node(aten.mm.default, (64, 128), (64, own), (own, 128)) for own in (3670, 3668))
    assert flops(larger) == flops(smaller) and bytes_read(larger) == bytes_read(smaller)


@pytest.fixture
def raising() -> Iterator[Any]:
    """An op for which the user has registered a formula that raises."""
    library = torch.library.Library("flops_test", "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")

    def formula(*args: Any, **kwargs: Any) -> int:
        raise NotImplementedError

    flop_registry[torch.ops.flops_test.f] = formula
    yield torch.ops.flops_test.f.default
    del flop_registry[torch.ops.flops_test.f]
    library._destroy()


def test_what_cannot_be_counted(raising: Any) -> None:
    made = node(raising, (64,), (64,))
    assert is_counted(made) and flops(made) is None
    made = node(aten.mm.default, (64, 16), (64, 32), (32, 16))
    del made.args[1].meta["val"]  # type: ignore[union-attr]
    assert is_counted(made) and flops(made) is None and bytes_read(made) == 64 * 32 * 2


def test_convolutions_and_other_ops() -> None:
    image, result, weight = (2, 8, 16, 16), (2, 16, 16, 16), (16, 8, 3, 3)
    made = node(aten.convolution.default, result, image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert flops(made) == 2 * 2 * 16 * 8 * 9 * 16 * 16
    assert not is_counted(node(aten.add.Tensor, (64,), (64,), (64,)))
