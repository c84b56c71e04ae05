# SPDX-License-Identifier: Apache-2.0
"""Compares layouts with numpy: a layout must place each element where reshape, transpose and cat place it.

Each dim of a layout is a list of *atoms* (``sites.layouts``). An index of the dim consists of one index of each atom.
The index of the *rank atom* is the number of a rank.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import LayoutError
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import product
from overlap_inductor.sites.layouts import same_size

many = settings(max_examples=150)

shards = st.lists(st.integers(1, 6), min_size=1, max_size=4)
world_sizes = st.integers(2, 5)


def array_of(layout: Layout, memory: Layout) -> np.ndarray:
    """The elements of a tensor in ``layout``. An element's value is its position in ``memory``, a layout of the same
    atoms."""
    source, target = memory.flat(), layout.flat()
    data = np.arange(int(np.prod([a.size for a in source], dtype=int))).reshape([a.size for a in source])
    return data.transpose(
        [next(i for i, a in enumerate(source) if a is w or a.rank and w.rank) for w in target]
    ).reshape(layout.shape())


def arange(layout: Layout) -> np.ndarray:
    return np.arange(int(np.prod(layout.shape(), dtype=int))).reshape(layout.shape())


@st.composite
def regrouped(draw: st.DrawFn, shape: list[int]) -> list[int]:
    """A shape with as many elements as ``shape``. Neighbouring dims may be merged, dims may be split, and
    dims of size 1 may be inserted."""
    shape = list(shape)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(shape) - 1))
        kind = draw(st.sampled_from(("merge", "split", "one")))
        if kind == "merge" and at + 1 < len(shape):
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        elif kind == "split":
            factor = draw(st.sampled_from([f for f in range(1, shape[at] + 1) if shape[at] % f == 0]))
            shape[at : at + 1] = [factor, shape[at] // factor]
        elif kind == "one":
            shape.insert(at, 1)
    return shape


@many
@given(st.data(), shards, world_sizes)
def test_chains_of_views_and_permutes(data: st.DataObject, shard: list[int], world_size: int) -> None:
    raw = Layout.gathered(shard, world_size)
    layout, array = raw, arange(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(array.ndim)))
            layout, array = layout.permute(order), array.transpose(order)
        else:
            shape = data.draw(regrouped(list(array.shape)))
            try:
                layout = layout.reshape(shape)
            except LayoutError:
                assume(False)
            array = array.reshape(shape)
    assert layout.shape() == list(array.shape)
    np.testing.assert_array_equal(array_of(layout, raw.refined()), array)


@many
@given(st.data(), shards, world_sizes)
def test_gather_on_another_dim(data: st.DataObject, shard: list[int], world_size: int) -> None:
    """After ``cat(split(x, dim=0), dim=d)``, the rank atom must be the first atom of dim ``d``."""
    target = data.draw(st.integers(0, len(shard) - 1))
    raw = Layout.gathered(shard, world_size)
    moved = raw.move_rank(0, target)
    expected = np.concatenate(np.split(arange(raw), world_size), axis=target)
    np.testing.assert_array_equal(array_of(moved, raw), expected)
    assert moved.rank_dim() == target
    sharded = ShardedDim.of(moved)
    assert (sharded.outer, sharded.chunk, sharded.size) == (1, shard[target], shard[target] * world_size)


@many
@given(st.data(), shards, world_sizes)
def test_rows_of_a_rank(data: st.DataObject, shard: list[int], world_size: int) -> None:
    """``ShardedDim``: the dim consists of ``outer`` blocks. Each block holds ``chunk`` rows of rank 0, then ``chunk``
    rows of rank 1, and so on. This is so even if the gathered dim was merged with its neighbours."""
    target = data.draw(st.integers(0, len(shard) - 1))
    raw = Layout.gathered(shard, world_size)
    moved = raw.move_rank(0, target)
    flat = moved.reshape([int(np.prod(moved.shape(), dtype=int))])
    sharded = ShardedDim.of(flat)
    whole = array_of(moved, raw).reshape(sharded.outer, world_size, sharded.chunk)
    for rank in range(world_size):
        own = arange(raw)[rank * shard[0] : (rank + 1) * shard[0]]
        assert set(whole[:, rank].ravel()) == set(own.ravel())
        np.testing.assert_array_equal(whole[:, rank].ravel(), own.ravel())


@many
@given(st.data(), shards, world_sizes)
def test_scatter_mirrors_gather(data: st.DataObject, shard: list[int], world_size: int) -> None:
    """``cat(split(x, dim=d), dim=0)`` before a reduce-scatter moves the rank atom from dim ``d`` to the front."""
    dim = data.draw(st.integers(0, len(shard) - 1))
    shape = list(shard)
    shape[dim] *= world_size
    scattered = [shard[0] * world_size, *shard[1:]]
    before = Layout.scattered(scattered, world_size).move_rank(0, dim)
    assert before.shape() == shape
    joined = np.concatenate(np.split(arange(before), world_size, axis=dim), axis=0)
    after = before.move_rank(dim, 0)
    np.testing.assert_array_equal(array_of(after, before), joined)


@many
@given(shards, world_sizes)
def test_without_rank_is_the_shard(shard: list[int], world_size: int) -> None:
    """Without its rank atom, a layout has the shard's shape. ``shape`` can replace the size of an atom, for example by
    that of a sub-chunk."""
    raw = Layout.gathered(shard, world_size)
    own = raw.without_rank()
    assert own.shape() == shard and own.rank_dim() is None
    atom = raw.dims[0][1]
    assert own.shape({id(atom): 99}) == [99, *shard[1:]]


@many
@given(st.data(), shards, world_sizes)
def test_same_elements(data: st.DataObject, shard: list[int], world_size: int) -> None:
    """``same_elements`` is true only if both layouts hold the same elements in the same order. Layouts with different
    atoms hold different elements, even if the atoms have equal sizes."""
    raw = Layout.gathered(shard, world_size)
    order = data.draw(st.permutations(range(len(shard))))
    moved = raw.permute(order)
    expected = bool((array_of(moved, raw).ravel() == arange(raw).ravel()).all())
    assert moved.same_elements(raw) is expected
    assert not Layout.gathered(shard, world_size).same_elements(raw)


def test_a_split_atom_is_known_to_layouts_made_before() -> None:
    """If an atom is split later, every layout that holds it sees the split (``refined``)."""
    raw = Layout.gathered([12], 2)
    split = raw.reshape([2, 3, 4])
    assert raw.same_elements(split) and raw.reshape([6, 4]).same_elements(split)
    assert [a.size for a in raw.flat()] == [2, 3, 4]


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ([2, 6], "splits the rank index of a dim in two"),
        ([8, 1, 2], "splits 3 indices of a dim unevenly"),
        ([3, 4], "splits the rank index of a dim in two"),
        ([12, 2], "do not match the collective's dims"),
        ([2, 2], "splits the rank index of a dim in two"),
    ],
)
def test_reshapes_that_cannot_be_followed(shape: list[int], why: str) -> None:
    """A reshape raises an error if it splits the rank atom, or if it splits another atom unevenly. A reshape to a wrong
    number of elements raises an error, too."""
    with pytest.raises(LayoutError, match=f"a reshape to .* {why}"):
        Layout.gathered([1, 3], 4).reshape(shape)


def test_move_rank_needs_the_rank_in_front() -> None:
    """After a permute, the pieces along dim 0 are not the ranks' shards."""
    with pytest.raises(LayoutError, match="not the ranks' shards"):
        Layout.gathered([3, 4], 2).permute([1, 0]).move_rank(0, 1)
    with pytest.raises(LayoutError, match="no sharded dim"):
        ShardedDim.of(Layout.of_shape([2, 3]))


def symbol(value: int) -> torch.SymInt:
    from torch._dynamo.source import ConstantSource

    environment = ShapeEnv()
    source = ConstantSource("s")
    expression = environment.create_symbol(value, source, DimDynamic.DYNAMIC)
    return environment.create_symintnode(expression, hint=value, source=source)


def test_symbols_add_no_guard() -> None:
    """Comparing sizes must not specialise the token count."""
    size = symbol(24)
    layout = Layout.scattered([size, 8], 4)
    assert same_size(layout.shape()[0], size) and not same_size(size, 24)
    flat = layout.reshape([size * 8])
    assert same_size(ShardedDim.of(flat).size, size * 8)
    assert len(size.node.shape_env.guards) == 0


def test_total_of_a_size_that_is_not_a_known_multiple() -> None:
    """The atoms of a dim have the sizes ``4`` and ``size // 4``. ``total`` states that together they have ``size``
    indices. Without ``total``, the product would be ``4 * (size // 4)``, which is not known to equal ``size``."""
    size = symbol(24)
    rank = Atom(4, rank=True, total=size)
    assert same_size(product([rank, Atom(size // 4)]), size)
    assert same_size(product([Atom(2), rank, Atom(size // 4), Atom(5)]), 10 * size)
