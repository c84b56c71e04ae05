# SPDX-License-Identifier: Apache-2.0
"""A layout says which element of a tensor is at which index. It does not depend on which view ops made the tensor.

A layout is a list of dims. Each dim is a list of *atoms*: its nested factors, outermost first. A dim's size is the
product of its atoms' sizes. R, the rank atom, counts the ranks. A reshape regroups atoms, a permute reorders dims, and
``cat(split(x))`` moves R to another dim. R's place in a matmul's operand says whether B, M, N or K is gathered::

    all_gather(x [b, s, h]) -> [R b] [s] [h] -> split/cat(dim=1) -> [b] [R s] [h] -> reshape -> [b R s] [h]
    the rows consist of the outer atom b, then R, then the chunk s (``ShardedDim``)

Sizes may be symbolic. Comparisons add no guard (``statically_known_true``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import TypeAlias

from torch.fx.experimental.symbolic_shapes import statically_known_true

from overlap_inductor.torch_compat.guards import same_without_floors

Size: TypeAlias = Any  # int or torch.SymInt


class LayoutError(Exception):
    """The layout cannot be followed through an op; the message says why."""


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal. Adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return statically_known_true(a == b) or same_without_floors(a, b)


@dataclass(eq=False)
class Atom:
    """A factor of a dim: an index that counts from 0 to ``size - 1``. Atoms are compared by identity.

    Attributes:
        size: number of indices.
        rank: whether this is the rank atom.
        children: the atoms into which a reshape split this atom, or ``()``.

    Only for a rank atom:

    - ``total``: number of indices of this atom and the next one together. ``None``: the product of their sizes.
    - ``chunk``: the atom of a full shard's rows, if the last shards are short (``Layout.cut_short``).
    - ``uneven``: whether the atom counts rows instead of ranks, because the ranks' parts may differ in rows.
    """

    size: Size
    rank: bool = False
    total: Size | None = None
    chunk: Atom | None = None
    uneven: bool = False
    children: tuple[Atom, ...] = field(default=())

    @property
    def short(self) -> bool:
        return self.chunk is not None

    def leaves(self) -> list[Atom]:
        return [leaf for child in self.children for leaf in child.leaves()] if self.children else [self]


def product(atoms: Sequence[Atom]) -> Size:
    """Number of elements of a run of atoms. The ``total`` of an atom counts for that atom and the next one."""
    result: Size = 1
    skip = False
    for atom in atoms:
        if skip:
            skip = False
            continue
        if atom.total is not None:
            result, skip = result * atom.total, True
        else:
            result = result * atom.size
    return result


@dataclass(frozen=True)
class Layout:
    """Dims of a tensor, each a tuple of atoms (row-major inside the dim)."""

    dims: tuple[tuple[Atom, ...], ...]

    @classmethod
    def of_shape(cls, shape: Sequence[Size]) -> Layout:
        return cls(tuple((Atom(size),) for size in shape))

    @classmethod
    def gathered(cls, shard: Sequence[Size], world_size: int) -> Layout:
        """The result of an all-gather of ``shard`` on dim 0."""
        first, *rest = [(Atom(size),) for size in shard]
        return cls(((Atom(world_size, rank=True), *first), *rest))

    @classmethod
    def scattered(cls, shape: Sequence[Size], world_size: int) -> Layout:
        """The input of a reduce-scatter on dim 0."""
        size = shape[0]
        known = isinstance(size, int) or statically_known_true(size % world_size == 0)
        rank = Atom(world_size, rank=True, total=None if known else size)
        return cls(((rank, Atom(size // world_size)), *((Atom(s),) for s in shape[1:])))

    @classmethod
    def uneven(cls, rows: Size, others: Sequence[Atom]) -> Layout:
        """A tensor ``[rows, ...]`` whose dim 0 holds a part of any size for each rank."""
        return cls(((Atom(rows, rank=True, uneven=True),), *((atom,) for atom in others)))

    def refined(self) -> Layout:
        """The layout with each split atom replaced by its parts. Raises ``LayoutError`` if short shards were split."""
        if any(atom.chunk is not None and atom.chunk.children for dim in self.dims for atom in dim):
            raise LayoutError(
                "a reshape splits the shards into smaller dims, but this tensor lacks the shards' padding"
            )
        return Layout(tuple(tuple(leaf for atom in dim for leaf in atom.leaves()) for dim in self.dims))

    def flat(self) -> list[Atom]:
        """Atoms in order, without those of size 1. A rank atom always stays. The atom after a rank atom also stays if
        the rank atom has a ``total``, because ``total`` counts both."""
        atoms = [a for dim in self.refined().dims for a in dim]
        counted = {id(b) for a, b in zip(atoms, atoms[1:], strict=False) if a.total is not None}
        return [a for a in atoms if not same_size(a.size, 1) or a.rank or id(a) in counted]

    def same_elements(self, other: Layout) -> bool:
        mine, theirs = self.flat(), other.flat()
        return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))

    def permute(self, order: Sequence[int]) -> Layout:
        return Layout(tuple(self.dims[i] for i in order))

    def reshape(self, shape: Sequence[Size]) -> Layout:
        """The layout after a reshape. An atom is split where a boundary between dims falls inside it.

        Raises:
            LayoutError: the rank atom would be split, an atom would be split unevenly, or the sizes do not match. Also
                raised if ``refined`` raises it.
        """
        queue = self.flat()
        dims: list[tuple[Atom, ...]] = []
        for size in shape:
            taken: list[Atom] = []
            while not same_size(product(taken), size):
                if not queue:
                    raise LayoutError(f"the dims of a reshape to {list(shape)} do not match the collective's dims")
                atom = queue.pop(0)
                closes = atom.total is not None and queue and same_size(product([*taken, atom, queue[0]]), size)
                if closes or (atom.short and queue):
                    taken += [atom, queue.pop(0)]
                    continue
                wanted, have = size, product(taken)
                whole = have * atom.size
                if isinstance(wanted, int) and isinstance(have, int) and isinstance(atom.size, int) and whole > wanted:
                    if atom.rank or wanted % have or atom.size % (wanted // have):
                        parted = (
                            "the rank index of a dim in two" if atom.rank else f"{atom.size} indices of a dim unevenly"
                        )
                        raise LayoutError(f"a reshape to {list(shape)} splits {parted}")
                    front = Atom(wanted // have)
                    back = Atom(atom.size // front.size)
                    atom.children = (front, back)
                    atom, queue = front, [back, *queue]
                taken.append(atom)
            dims.append(tuple(taken))
        if queue:
            raise LayoutError(f"a reshape to {list(shape)} has fewer elements than its input")
        return Layout(tuple(dims))

    def move_rank(self, source: int, target: int, size: Size | None = None) -> Layout:
        """The layout of ``cat(split(x, dim=source), dim=target)``: the rank atom moves to the front of ``target``.

        Args:
            size: size of dim ``target`` in the result. Needed if symbols do not show that the world size divides it.

        Raises:
            LayoutError: ``source`` does not begin with the rank atom, or the rank atom is uneven. Also raised if
                ``refined`` raises it.
        """
        dims = [list(d) for d in self.refined().dims]
        if not dims[source] or not dims[source][0].rank:
            raise LayoutError("a cat joins pieces that are not the ranks' shards")
        rank = dims[source].pop(0)
        if rank.uneven:
            raise LayoutError("a cat joins equal pieces, but each rank's part has a size of its own")
        if source != target:
            # A symbolic size is always kept as ``total``. Symbols may prove that two sizes are equal, and yet not prove
            # that products with these sizes are equal.
            rank = Atom(rank.size, rank=True, total=None if size is None or isinstance(size, int) else size)
        dims[target].insert(0, rank)
        return Layout(tuple(tuple(d) for d in dims))

    def leads_with_rank(self, dim: int) -> bool:
        """Whether ``dim`` consists of one full shard of each rank and nothing else."""
        atoms = self.refined().dims[dim]
        return len(atoms) == 2 and atoms[0].rank and not atoms[0].short

    def cut_short(self, dim: int, size: Size) -> Layout:
        """The layout with only the first ``size`` indices of ``dim``. The rest is padding, so the last shards become
        short or empty.

        Raises:
            LayoutError: ``dim`` does not consist of exactly the ranks' shards, or ``size`` is an int below 2. Also
                raised if ``refined`` raises it.
        """
        if not self.leads_with_rank(dim):
            raise LayoutError("rows are appended to, or cut off from, a dim that does not consist of the ranks' shards")
        dims = list(self.refined().dims)
        rank, chunk = dims[dim]
        if isinstance(size, int) and size < 2:
            text = f"the sharded dim has {size} rows without padding; expected at least 2, to follow it in a reshape"
            raise LayoutError(text)
        dims[dim] = (Atom(rank.size, rank=True, total=size, chunk=chunk), chunk)
        return Layout(tuple(dims))

    def rank_dim(self) -> int | None:
        for i, dim in enumerate(self.refined().dims):
            if any(a.rank for a in dim):
                return i
        return None

    def without_rank(self) -> Layout:
        return Layout(tuple(tuple(a for a in dim if not a.rank) for dim in self.refined().dims))

    def shape(self, sizes: dict[int, Size] | None = None) -> list[Size]:
        """Size of each dim. ``sizes`` gives other sizes to some atoms, by ``id(atom)``."""
        sizes = sizes or {}
        return [product([Atom(sizes.get(id(a), a.size), a.rank, a.total) for a in dim]) for dim in self.refined().dims]


@dataclass(frozen=True)
class ShardedDim:
    """A dim that holds the rank atom. Its index is (outer, rank, chunk), row-major.

    Attributes:
        dim: the dim's number.
        outer: number of outer indices.
        chunk: rows of one full shard for each outer index.
        size: number of indices of the dim, without missing rows.
        before, after: the atoms before and after the rank atom.
        missing: rows that the last ranks' chunks lack for each outer index (``Layout.cut_short``).
    """

    dim: int
    outer: Size
    chunk: Size
    size: Size
    before: tuple[Atom, ...]
    after: tuple[Atom, ...]
    missing: Size = 0

    @property
    def short(self) -> bool:
        """Whether rows may be missing. True for a symbolic ``missing``, because comparing it would add a guard."""
        return not (isinstance(self.missing, int) and self.missing == 0)

    @classmethod
    def of(cls, layout: Layout) -> ShardedDim:
        dim = layout.rank_dim()
        if dim is None:
            raise LayoutError("the tensor has no sharded dim")
        atoms = layout.refined().dims[dim]
        at = next(i for i, a in enumerate(atoms) if a.rank)
        before, after = atoms[:at], atoms[at + 1 :]
        rank, missing = atoms[at], 0
        if rank.short:
            missing = (rank.size * after[0].size - rank.total) * product(after[1:])
        return cls(dim, product(before), product(after), product(atoms), tuple(before), tuple(after), missing)
