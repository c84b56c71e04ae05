# SPDX-License-Identifier: Apache-2.0
"""The looping op of gathers: one ring serves all matmuls that read the gathered tensor. The gathered dim may be any dim
of a matmul.

Shapes (W ranks): every rank has a ``shard [m, k]``. A matmul reads the shard of rank r, plain or transposed, as the
*slice* ``s_r [p, q]`` of its operand. The slices are joined along rows, or along the contracted dim::

    rows:        y[r * p : (r + 1) * p] = s_r @ other                   other [q, n], y [W * p, n]
    contraction: y = sum over r of s_r @ other[r * q : (r + 1) * q]     other [W * q, n], y [p, n]

A contraction is accumulated in at least fp32. If the slices are the right operand, the formulas hold for the transposed
matmul. Dgrad (rows) and wgrad (contraction) of a backward graph can share one ring.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from overlap_inductor.lowerings import reference
from overlap_inductor.lowerings.library import define
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.transports import exchange as exchanges
from overlap_inductor.transports import routes

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Form:
    """How a matmul reads the slices.

    Attributes:
        operand: the operand that the slices form: ``lhs`` or ``rhs``.
        role: the role of the joined dim: M, N or K.
        transposed: whether a slice ``s_r`` in the formulas above is the shard transposed. For ``rhs``, the formulas are
            those of the transposed matmul. So for ``rhs``, ``False`` means that the program's own matmul reads each
            shard transposed.
    """

    operand: str
    role: str
    transposed: bool

    @property
    def contracted(self) -> bool:
        return self.role == "K"

    @property
    def by_rows(self) -> bool:
        """Whether the joined dim is made of the shards' rows. If so, shards may have different numbers of rows."""
        return self.transposed == self.contracted

    @property
    def whole(self) -> bool:
        """Whether the matmul needs whole shards. If so, a sub-chunk (some rows of a shard) would split the matmul's
        contracted dim."""
        return self.transposed and not self.contracted

    def __str__(self) -> str:
        return f"{self.operand} {self.role}{' transposed' if self.transposed else ''}"

    @classmethod
    def parse(cls, text: str) -> Form:
        operand, role, *rest = text.split()
        return cls(operand, role, rest == ["transposed"])

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, an operand or the result; transposed (a view) if the slices are the right operand. A second call
        undoes the first."""
        return x.t() if self.operand == "rhs" else x

    def result_shape(self, shard: torch.Tensor, other: torch.Tensor, world_size: int) -> list[int]:
        """The shape of the result for ``shard [m, k]`` and the other operand."""
        rows = shard.shape[1 if self.transposed else 0] * (1 if self.contracted else world_size)
        columns = self.turned(other).shape[1]
        return [columns, rows] if self.operand == "rhs" else [rows, columns]


def texts(forms: Sequence[Form]) -> str:
    return ", ".join(map(str, forms))


def forms_from(text: str, parts: int, site: str) -> list[Form]:
    """The forms that ``texts`` wrote. Raises ``ValueError`` if ``parts`` exceeds 1 but a matmul needs whole shards."""
    parsed = [Form.parse(one) for one in text.split(", ")]
    if parts > 1 and any(f.whole for f in parsed):
        raise ValueError(
            f"site {site}: {parts} sub-chunks would split the contracted dim of a matmul whose gathered dim is another"
            f" one ({text}); expected 1 sub-chunk"
        )
    return parsed


class Matmul:
    """Computes one matmul's result slice by slice. The first call of ``add`` must bring a whole shard.

    Args:
        received: the buffer of all shards, ``[rows of all shards, k]``.
        places: the rows of each rank's shard in ``received`` (``routes.places``). Unless ``form.by_rows``, all shards
            have the same number of rows.
    """

    def __init__(
        self,
        form: Form,
        received: torch.Tensor,
        other: torch.Tensor,
        bias: torch.Tensor | None,
        places: Sequence[Sequence[int]],
    ) -> None:
        self.form, self.bias = form, bias
        self.other = form.turned(other)
        self.dtype, slots = received.dtype, len(places)
        kind = torch.promote_types(self.dtype, torch.float32) if form.contracted else self.dtype
        shard, count = (received, 1) if form.by_rows else (received[: places[0][-1]], slots)
        self.result = received.new_empty(form.result_shape(shard, other, count), dtype=kind)
        self.turned = form.turned(self.result)
        share = (self.other if form.contracted else self.turned).shape[0] // slots
        self.starts = [place[0] if form.by_rows else slot * share for slot, place in enumerate(places)]
        self.empty = True

    def add(self, piece: torch.Tensor, slot: int, start: int) -> None:
        """Multiply ``piece``: rows of the shard of rank ``slot``, from row ``start`` on."""
        form = self.form
        left = piece.t() if form.transposed else piece
        if not form.contracted:
            first = self.starts[slot] + (0 if form.transposed else start)
            reference.product(left, self.other, self.bias, self.turned[first : first + left.shape[0]])
            return
        first = self.starts[slot] + (start if form.transposed else 0)
        right = self.other[first : first + left.shape[1]]
        total = self.turned if form.transposed else self.turned[start : start + left.shape[0]]
        _accumulate(total, left, right, self.empty)
        self.empty = False

    def finish(self) -> torch.Tensor:
        if not self.form.contracted:
            return self.result
        return (self.result if self.bias is None else self.result + self.bias).to(self.dtype)


def _accumulate(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, empty: bool) -> None:
    """``total += a @ b``, or ``total = a @ b`` if ``empty``, in the dtype of ``total``, as ``matmuls.emit_partial``
    does."""
    if a.shape[1] == 0 and not empty:
        return
    if a.dtype is total.dtype or a.device.type != "cuda":
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=0 if empty else 1)
    elif empty:
        total.copy_(torch.ops.aten.mm.dtype(a, b, total.dtype))
    else:
        total.add_(torch.ops.aten.mm.dtype(a, b, total.dtype))


def as_it_stood(
    forms: Sequence[Form],
    gathered: torch.Tensor,
    others: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    world_size: int,
) -> Tensors:
    """The results of the matmuls, each computed at once from all shards, as the program wrote it.
    ``gathered [W * m, k]``: all shards, in the ranks' order."""
    return [_whole(f, gathered, o, b, world_size) for f, o, b in zip(forms, others, biases, strict=True)]


def _whole(
    form: Form, gathered: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None, world_size: int
) -> torch.Tensor:
    rows, width = gathered.shape[0] // world_size, gathered.shape[1]
    if form.by_rows:
        left = gathered.t() if form.transposed else gathered
    else:
        slices = gathered.view(world_size, rows, width)
        left = (
            slices.transpose(0, 1).reshape(rows, world_size * width)
            if form.contracted
            else slices.transpose(1, 2).reshape(world_size * width, rows)
        )
    a, b = (other, left.t()) if form.operand == "rhs" else (left, other)
    return reference.product(a, b, bias)


def _all_gather_matmul(
    chain: torch.Tensor,
    shard: torch.Tensor,
    others: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    forms: str,
    parts: int,
    min_rows: int,
    route: str,
    group_name: str,
    site: str,
    transport: str = "",
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    group = resolve_group(group_name)
    world_size, rank, (rows, width) = group.size(), group.rank(), shard.shape
    parsed = forms_from(forms, parts, site)
    if world_size * rows < min_rows:
        gathered, _ = reference.all_gather_matmul(shard, [], [], group)
        return as_it_stood(parsed, gathered, others, biases, world_size), gathered, chain.new_empty(1)
    gathered = shard.new_empty(world_size * rows, width)
    gathered[rank * rows : (rank + 1) * rows].copy_(shard)
    bounds = [c * width for c in routes.bounds(rows, parts)]
    exchange = exchanges.open_exchange(gathered, bounds, route, group, site, transport)
    places, terms = routes.places([rows] * world_size, parts), (parsed, others, biases)
    return multiply_arrivals(gathered, *terms, places, route, exchange, group), gathered, chain.new_empty(1)


def multiply_arrivals(
    gathered: torch.Tensor,
    forms: Sequence[Form],
    others: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    places: Sequence[Sequence[int]],
    route: str,
    exchange: exchanges.Exchange | None,
    group: dist.ProcessGroup,
    sent: Callable[[int], torch.Tensor | None] = lambda hop: None,
) -> Tensors:
    """Multiply every shard of ``gathered [rows, k]``: this rank's own first, then sub-chunks as they arrive. Returns
    each matmul's result. As many hops are in flight as a shard has sub-chunks.

    Args:
        others: each matmul's other operand.
        places: the rows of each shard's sub-chunks in ``gathered`` (``routes.places``).
        exchange: brings the sub-chunks; closed at the end. ``None`` if the shards have no elements.
        sent: a function of a hop's number. It returns the piece that the hop sends, or ``None`` if the piece is in
            ``gathered``.
    """
    world_size, rank, parts = group.size(), group.rank(), len(places[0]) - 1
    matmuls = [Matmul(f, gathered, o, b, places) for f, o, b in zip(forms, others, biases, strict=True)]

    def multiply(slot: int, start: int, stop: int) -> None:
        for matmul in matmuls:
            matmul.add(gathered[start:stop], slot, start - places[slot][0])

    if exchange is not None:
        for index in range(min(parts, exchange.hop_count)):
            exchange.post(index, sent(index))
    multiply(rank, places[rank][0], places[rank][-1])
    for step, distances in enumerate(routes.distances(route, world_size)):
        for part in range(parts):
            hop = step * parts + part
            # Without an exchange, the shards have no elements, and each result is empty, zeros or its bias.
            if exchange is not None:
                exchange.wait(hop)
                if hop + parts < exchange.hop_count:
                    exchange.post(hop + parts, sent(hop + parts))
            for slot in ((rank + distance) % world_size for distance in distances):
                multiply(slot, places[slot][part], places[slot][part + 1])
    if exchange is not None:
        exchanges.close_exchange(gathered, group, exchange.site)
    return [matmul.finish() for matmul in matmuls]


def _all_gather_matmul_fake(
    chain: torch.Tensor,
    shard: torch.Tensor,
    others: Tensors,
    biases: object,
    forms: str,
    parts: int,
    min_rows: int,
    route: str,
    group_name: str,
    site: str,
    transport: str = "",
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    world_size = resolve_group(group_name).size()
    parsed = [Form.parse(text) for text in forms.split(", ")]
    outs = [shard.new_empty(f.result_shape(shard, o, world_size)) for f, o in zip(parsed, others, strict=True)]
    return outs, shard.new_empty(world_size * shard.shape[0], shard.shape[1]), chain.new_empty(1)


# Returns ``(results, gathered [W * m, k], next token of the chain)``. ``others``: the matmuls' other operands. If the
# gathered dim is contracted, it is in the ranks' order in ``others``. Otherwise it is in the ranks' order in the
# results. ``parts``: sub-chunks of a shard. ``min_rows``: with fewer gathered rows, the plain collective runs.
define(
    "all_gather_matmul(Tensor chain, Tensor shard, Tensor[] others, Tensor?[] biases, str forms, int parts, SymInt"
    " min_rows, str route, str group_name, str site, str transport='') -> (Tensor[], Tensor, Tensor)",
    _all_gather_matmul,
    _all_gather_matmul_fake,
)

__all__ = ["Form", "Matmul", "as_it_stood", "forms_from", "multiply_arrivals", "texts"]
