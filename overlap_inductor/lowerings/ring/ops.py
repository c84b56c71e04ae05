# SPDX-License-Identifier: Apache-2.0
"""The step ops. Unrolled steps of a ring are these ops and Inductor's own matmuls.

A gather in the graph (W ranks, S sub-chunks; token ``chain`` orders the ops of a group)::

    chain    = agree(group, plan)                       # compares the ranks' plans if they were not compared yet
    gathered = gather_start(chain!, shard)              # [W * d0, ...], own shard copied in, first S hops in flight
    y0       = mm(take(gathered, shift=0), w)           # while hops 0 .. S-1 run
    gather_step(chain!, gathered!, hop=0)               # waits for hop 0, starts hop S
    y1       = mm(take(gathered, shift=-1)[part 0], w)  # while hops 1 .. S run
    ...
    y        = assemble([y0, y1, ...], shifts=[0, -1, ...])

On rank ``r``, ``take(gathered, shift)`` is the shard of rank ``r + shift`` (modulo W). ``[part 0]`` is this shard's
first sub-chunk.

- Order: the op that waits for a hop *mutates* the buffer (above: ``gathered``). Inductor moves no read of a buffer past
  a write to the buffer. This fixes the order start, matmul, step, matmul.
- Lifetime: each step has the buffer as an argument, so the buffer lives until the last hop has ended. A reduction sends
  pieces that are not in the buffer. These pieces are arguments of the op that waits for their hops.
- Ranks: ``take`` and ``assemble`` compute at run time, from the rank, where a shard lies in the buffer. So the graph's
  text is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_inductor.lowerings.library import FLEXIBLE
from overlap_inductor.lowerings.library import define
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.transports import exchange as exchanges


def _gather_start(
    chain: torch.Tensor,
    shard: torch.Tensor,
    bounds: Sequence[int],
    route: str,
    group_name: str,
    site: str,
    transport: str = "",
) -> torch.Tensor:
    group = resolve_group(group_name)
    gathered = shard.new_empty([group.size() * shard.shape[0], *shard.shape[1:]])
    gathered.view(group.size(), *shard.shape)[group.rank()].copy_(shard)
    exchange = exchanges.open_exchange(gathered, bounds, route, group, site, transport)
    if exchange is not None:
        for index in range(min(exchange.parts, exchange.hop_count)):
            exchange.post(index)
    return gathered


def _gather_start_fake(
    chain: torch.Tensor,
    shard: torch.Tensor,
    bounds: Sequence[int],
    route: str,
    group_name: str,
    site: str,
    transport: str = "",
) -> torch.Tensor:
    return shard.new_empty([resolve_group(group_name).size() * shard.shape[0], *shard.shape[1:]])


define(
    "gather_start(Tensor(a!) chain, Tensor shard, SymInt[] bounds, str route, str group_name, str site, "
    "str transport='') -> Tensor",
    _gather_start,
    _gather_start_fake,
)


def _gather_step(
    chain: torch.Tensor,
    gathered: torch.Tensor,
    bounds: Sequence[int],
    hop: int,
    route: str,
    group_name: str,
    site: str,
    computed: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    done = chain.new_empty(1)
    if bounds[-1] == 0:
        return done
    group = resolve_group(group_name)
    exchange = exchanges.find_exchange(gathered, group, site)
    exchange.wait(hop)
    if hop + exchange.parts < exchange.hop_count:
        exchange.post(hop + exchange.parts)
    if hop + 1 == exchange.hop_count:
        exchanges.close_exchange(gathered, group, site)
    return done


def _token_fake(chain: torch.Tensor, *args: object) -> torch.Tensor:
    return chain.new_empty(1)


# ``computed`` only adds dependencies: the step runs after the ops that compute these tensors. Without ``computed``,
# Inductor fuses the epilogues of all pieces into one kernel after the last hop.
define(
    "gather_step(Tensor(a!) chain, Tensor(b!) gathered, SymInt[] bounds, int hop, str route, str group_name, str site, "
    "Tensor[]? computed=None) -> Tensor",
    _gather_step,
    _token_fake,
    torch.Tag.flexible_layout,
)


def _exchange_start(
    chain: torch.Tensor,
    shape: Sequence[int],
    bounds: Sequence[int],
    dtype: torch.dtype,
    route: str,
    group_name: str,
    site: str,
    transport: str = "",
) -> torch.Tensor:
    buffer = torch.empty(shape, dtype=dtype, device=chain.device)
    exchanges.open_exchange(buffer, bounds, route, resolve_group(group_name), site, transport)
    return buffer


def _exchange_start_fake(
    chain: torch.Tensor,
    shape: Sequence[int],
    bounds: Sequence[int],
    dtype: torch.dtype,
    route: str,
    group_name: str,
    site: str,
    transport: str = "",
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=chain.device)


define(
    "exchange_start(Tensor(a!) chain, SymInt[] shape, SymInt[] bounds, ScalarType dtype, str route, str group_name, "
    "str site, str transport='') -> Tensor",
    _exchange_start,
    _exchange_start_fake,
)


def _exchange_send(
    chain: torch.Tensor,
    buffer: torch.Tensor,
    piece: torch.Tensor,
    bounds: Sequence[int],
    hop: int,
    route: str,
    group_name: str,
    site: str,
    further: Sequence[int] = (),
) -> torch.Tensor:
    started = chain.new_empty(1)
    if bounds[-1] == 0:
        return started
    group = resolve_group(group_name)
    exchange = exchanges.find_exchange(buffer, group, site)
    if route == "broadcast":
        exchange.piece(group.rank(), hop).copy_(piece.reshape(-1))
        exchange.post(hop)
    else:
        hops = [hop, *further]
        for number, part in zip(hops, piece.view(len(hops), -1), strict=True):
            exchange.post(number, part)
    return started


# Starts hop ``hop``, which sends ``piece``. If there are ``further`` hops, ``piece`` holds one part for each hop: first
# for ``hop``, then for ``further`` in their order. Route ``broadcast`` takes no ``further`` hops. Op ``after`` orders
# the next matmul after the returned token. Without this order, Inductor may run every matmul before the first send.
define(
    "exchange_send(Tensor(a!) chain, Tensor(b!) buffer, Tensor piece, SymInt[] bounds, int hop, str route, "
    "str group_name, str site, int[] further=[]) -> Tensor",
    _exchange_send,
    _token_fake,
)


def _exchange_keep(buffer: torch.Tensor, own: torch.Tensor, group_name: str) -> torch.Tensor:
    group = resolve_group(group_name)
    buffer.view(group.size(), own.numel())[group.rank()].copy_(own.reshape(-1))
    return buffer.new_empty(1)


# Copies ``own``, the slice that this rank keeps, into ``buffer [W, ...]``, at the index of this rank.
define(
    "exchange_keep(Tensor(a!) buffer, Tensor own, str group_name) -> Tensor",
    _exchange_keep,
    lambda buffer, own, group_name: buffer.new_empty(1),
)


def _reduce_tail(
    chain: torch.Tensor,
    buffer: torch.Tensor,
    tail: torch.Tensor,
    offset: int,
    reduce_op: str,
    group_name: str,
    site: str,
) -> torch.Tensor:
    rows = tail.numel()
    if rows == 0:
        return chain.new_empty(1)
    place = buffer.view(-1)[offset : offset + rows]
    place.copy_(tail.reshape(-1))
    group = resolve_group(group_name)
    dist.all_reduce(place, group=group)
    if reduce_op == "avg":
        place.div_(group.size())
    return chain.new_empty(1)


# All-reduces ``tail`` into ``buffer`` from element ``offset`` on. ``tail``: the last rows, fewer than W, which cannot
# be cut into equal shards.
define(
    "reduce_tail(Tensor(a!) chain, Tensor(b!) buffer, Tensor tail, SymInt offset, str reduce_op, str group_name, str"
    " site) -> Tensor",
    _reduce_tail,
    _token_fake,
)


def _exchange_wait(
    chain: torch.Tensor,
    buffer: torch.Tensor,
    sent: Sequence[torch.Tensor],
    bounds: Sequence[int],
    hops: Sequence[int],
    route: str,
    group_name: str,
    site: str,
    computed: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    done = chain.new_empty(1)
    if bounds[-1] == 0:
        return done
    group = resolve_group(group_name)
    exchange = exchanges.find_exchange(buffer, group, site)
    for hop in hops:
        exchange.wait(hop)
    if hops[-1] + 1 == exchange.hop_count:
        exchanges.close_exchange(buffer, group, site)
    return done


# Waits for ``hops``. ``sent``: tensors that are computed before this wait. Among them are the pieces that these hops
# send, because the pieces must stay alive until the hops have ended. ``computed``: as in ``gather_step``.
define(
    "exchange_wait(Tensor(a!) chain, Tensor(b!) buffer, Tensor[] sent, SymInt[] bounds, int[] hops, str route, "
    "str group_name, str site, Tensor[]? computed=None) -> Tensor",
    _exchange_wait,
    _token_fake,
    torch.Tag.flexible_layout,
)


def _take(x: torch.Tensor, dim: int, shift: int, chunk: int, start: int, length: int, group_name: str) -> torch.Tensor:
    group = resolve_group(group_name)
    slot = (group.rank() + shift) % group.size()
    # A functional op may not return a view of its input. The Inductor lowering is a view.
    return x.narrow(dim, slot * chunk + start, length).clone(memory_format=torch.contiguous_format)


def _take_fake(
    x: torch.Tensor, dim: int, shift: int, chunk: int, start: int, length: int, group_name: str
) -> torch.Tensor:
    return x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]])


# Returns ``x`` at ``length`` indices of ``dim``. They belong to the shard of rank ``r + shift`` (modulo W), where ``r``
# is this rank. The first of them is the shard's index ``start``. A shard has ``chunk`` indices of ``dim``.
define(
    "take(Tensor x, int dim, int shift, SymInt chunk, SymInt start, SymInt length, str group_name) -> Tensor",
    _take,
    _take_fake,
    FLEXIBLE,
)


def _take_ranks(
    x: torch.Tensor, dim: int, shifts: Sequence[int], chunk: int, start: int, length: int, group_name: str
) -> torch.Tensor:
    group = resolve_group(group_name)
    slots = [(group.rank() + shift) % group.size() for shift in shifts]
    return torch.cat([x.narrow(dim, slot * chunk + start, length) for slot in slots], dim)


def _take_ranks_fake(
    x: torch.Tensor, dim: int, shifts: Sequence[int], chunk: int, start: int, length: int, group_name: str
) -> torch.Tensor:
    return x.new_empty([*x.shape[:dim], len(shifts) * length, *x.shape[dim + 1 :]])


# ``take`` for each of ``shifts``, copied and joined along ``dim``.
define(
    "take_ranks(Tensor x, int dim, int[] shifts, SymInt chunk, SymInt start, SymInt length, str group_name) -> Tensor",
    _take_ranks,
    _take_ranks_fake,
    FLEXIBLE,
)


def _place_ranks(
    whole: torch.Tensor, part: torch.Tensor, shifts: Sequence[int], chunk: int, start: int, length: int, group_name: str
) -> torch.Tensor:
    group = resolve_group(group_name)
    for index, shift in enumerate(shifts):
        slot = (group.rank() + shift) % group.size()
        whole.narrow(0, slot * chunk + start, length).copy_(part.narrow(0, index * length, length))
    return whole.new_empty(1)


# The inverse of ``take_ranks`` along dim 0: copies ``part`` to the places in ``whole`` from which ``take_ranks`` would
# read it.
define(
    "place_ranks(Tensor(a!) whole, Tensor part, int[] shifts, SymInt chunk, SymInt start, SymInt length, "
    "str group_name) -> Tensor",
    _place_ranks,
    lambda whole, *others: whole.new_empty(1),
)


def _rows_below(
    x: torch.Tensor, dim: int, shift: int, chunk: int, start: int, size: int, group_name: str
) -> torch.Tensor:
    group = resolve_group(group_name)
    first = (group.rank() + shift) % group.size() * chunk + start
    kept = min(max(size - first, 0), x.shape[dim])
    out = x.clone(memory_format=torch.contiguous_format)
    out.narrow(dim, kept, x.shape[dim] - kept).zero_()
    return out


# ``x``: indices ``start, start + 1 ...`` of ``dim`` in the shard of rank ``r + shift``, which has ``chunk`` indices of
# ``dim``. Returns ``x`` with zeros where the index in the gathered tensor is ``size`` or larger.
define(
    "rows_below(Tensor x, int dim, int shift, SymInt chunk, SymInt start, SymInt size, str group_name) -> Tensor",
    _rows_below,
    lambda x, *args: x.new_empty(x.shape),
    FLEXIBLE,
)


def _narrow(x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _narrow_fake(x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    return x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]])


# A slice whose symbolic bounds are known to be inside the dim. ``aten.slice`` would compare sizes to clamp the bounds,
# which adds guards.
define("narrow(Tensor x, int dim, SymInt start, SymInt length) -> Tensor", _narrow, _narrow_fake, FLEXIBLE)

# As ``narrow``. If kernels differ only in the windows that they read, the lowering can give them one source text.
define("window(Tensor x, int dim, SymInt start, SymInt length) -> Tensor", _narrow, _narrow_fake, FLEXIBLE)


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


# A contiguous copy, written to memory once. It can be reshaped without guards. For a view of symbolic size, Inductor
# would compare sizes first.
define("packed(Tensor x) -> Tensor", _packed, lambda x: x.new_empty(x.shape), FLEXIBLE)


def _after(piece: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return piece.clone()


# Makes the kernel that computes ``piece`` run after the op that returned ``token``. The lowering adds this edge, and
# returns ``piece`` itself, written to memory.
define("after(Tensor piece, Tensor token) -> Tensor", _after, lambda piece, token: torch.empty_like(piece), FLEXIBLE)


def assembled_index(
    shape: Sequence[int], dim: int, chunk: int, slot: int, start: Sequence[int], piece: Sequence[int]
) -> list[tuple[int, int]]:
    """``(offset, length)`` of a piece's block in each dim of the assembled tensor. In ``dim``, ``start`` counts from
    the beginning of shard number ``slot``. Each shard has ``chunk`` indices of ``dim``."""
    offsets = [s + (slot * chunk if d == dim else 0) for d, s in enumerate(start)]
    return list(zip(offsets, piece, strict=True))


def _assemble(
    pieces: Sequence[torch.Tensor],
    shape: Sequence[int],
    dim: int,
    chunk: int,
    shifts: Sequence[int],
    starts: Sequence[int],
    group_name: str,
) -> torch.Tensor:
    group = resolve_group(group_name)
    out = pieces[0].new_empty(shape)
    for i, (piece, shift) in enumerate(zip(pieces, shifts, strict=True)):
        start = starts[i * len(shape) : (i + 1) * len(shape)]
        block = out
        slot = (group.rank() + shift) % group.size()
        for d, (offset, length) in enumerate(assembled_index(shape, dim, chunk, slot, start, piece.shape)):
            block = block.narrow(d, offset, length)
        block.copy_(piece)
    return out


def _assemble_fake(
    pieces: Sequence[torch.Tensor],
    shape: Sequence[int],
    dim: int,
    chunk: int,
    shifts: Sequence[int],
    starts: Sequence[int],
    group_name: str,
) -> torch.Tensor:
    return pieces[0].new_empty(shape)


# Joins ``pieces`` to a tensor of ``shape``. Piece i belongs to the shard of rank ``r + shifts[i]``, which has ``chunk``
# indices of ``dim``. ``starts``: where each piece begins in its shard. It has one number for each dim of piece 0,
# then of piece 1, and so on.
define(
    "assemble(Tensor[] pieces, SymInt[] shape, int dim, SymInt chunk, int[] shifts, SymInt[] starts, str group_name) ->"
    " Tensor",
    _assemble,
    _assemble_fake,
    FLEXIBLE,
)
