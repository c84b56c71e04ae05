# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused``, transport ``sm_push``: lookups in tables and the all-to-all that follows, in one kernel (fused
embedding + all-to-all, arXiv 2305.06942). A rank looks up the batch in its own tables, and stores each result at the
rank that needs it.

A *bag* is a list of indices; their rows in one table give one result. A *slice* is the part of the batch that belongs
to one rank. A *piece* is some bags of one table and one slice. ::

    claim pieces: slices of ranks ``rank + 1``, ``rank + 2``, ..., then the own slice
        store results for a peer into its workspace; signal the peer after the last piece of its slice
        store own results into ``out``
    claim copies: wait for the results of one peer, copy a part of them to ``out``

So the last transfer to a peer runs under the lookups of the own slice.

Numbers. A bag is summed in fp32, in the order of its indices, and rounded once. For a mean, the sum is divided by the
number of rows that are not padding. The mean of an empty bag is 0. Torch's kernel for GPUs gives the same bits. If
samples have weights, the last bit may differ, because a compiler may fuse multiplication and addition. Plain rows
(``BAGGED`` is False) are copied exactly.

Errors. A ``tl.device_assert`` fails if an index is not in its table. It also fails if a bag ends before it begins, or
lies outside the indices. It fails before the bag's result is stored or signalled. CUDA then reports ``device-side
assert triggered``, and the context is lost. The peers wait until their patience is over. Launch with ``debug=True``, so
that Triton keeps asserts. Also launch with ``sanitize_overflow=False``, so that Triton adds no asserts against
overflow.

Memory ordering (``signals``). ``count_and_signal`` follows the ordinary stores of a piece, and sets the peer's flag
after the last piece. The peer waits for the flag before it copies (``receive``). ``last_block_ends`` gives the credits
after the last copy out of the workspace.

Forward progress. A piece waits only for its peer's credit, which depends only on the previous call. A block claims a
copy only after running blocks have claimed all pieces of its rank. So all pieces end, and then all copies, even with
one resident block on each rank.

Aborts. A block looks at the abort word before it stores a piece. The block that stores the last piece of a slice looks
again before it sets the peer's flag. If the word is set, nothing is stored or signalled, and copied words become NaN.

CUDA graphs. Addresses of tensors and numbers of indices are read from ``facts``. In a captured graph, an earlier node
writes ``facts`` from host memory that is never changed or freed (``lowerings.fused.table_calls``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels import layout
from overlap_inductor.kernels.all_gather_matmul import last_block_ends
from overlap_inductor.kernels.receive import receive_piece
from overlap_inductor.kernels.signals import QUEUE_WORDS
from overlap_inductor.kernels.signals import WAIT_CREDIT
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import count_and_signal
from overlap_inductor.kernels.signals import credit_flag
from overlap_inductor.kernels.signals import may_store
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import wait_at_least

TABLE_FACTS = tl.constexpr(layout.TABLE_FACTS)


@triton.jit
def _bounds(fact, index, bags, inside, all_bags, count, BAGGED: tl.constexpr):
    """``(position of the first index, number of indices)`` of each bag, int64 and int32. A bag that is not ``inside``
    is empty."""
    begin = bags.to(tl.int64)
    end = begin + 1
    if BAGGED:
        offsets = tl.load(fact + 2).to(index.dtype)
        # As in torch, the first bag begins at 0 and the last bag ends with the indices, whatever the offsets are.
        begin = tl.load(offsets + bags, mask=inside & (bags > 0), other=0).to(tl.int64)
        end = tl.load(offsets + bags + 1, mask=inside & (bags + 1 < all_bags), other=0).to(tl.int64)
        end = tl.where(bags + 1 < all_bags, end, count)
    in_order = (begin >= 0) & (begin <= end) & (end <= count)
    tl.device_assert(in_order | (inside == 0), "a bag's offsets are not in order, or lie outside the indices")
    return begin, tl.where(inside & in_order, end - begin, 0).to(tl.int32)


@triton.jit
def _look_up(
    fact, out, index, bags, inside, all_bags, columns,
    WIDTH: tl.constexpr, BAGS: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr, BAGGED: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SAVES: tl.constexpr,
):  # fmt: skip
    """The results ``[BAGS, SPAN]`` of ``bags`` in one table, in the dtype of ``out``.

    ``fact``: the table's facts. ``SAVES``: also store, for the backward graph, the bag of each index, and each bag's
    number of rows that are not padding.
    """
    table = tl.multiple_of(tl.load(fact).to(out.dtype), 16)
    indices = tl.load(fact + 1).to(index.dtype)
    samples = tl.load(fact + 3).to(out.dtype)
    rows = tl.load(fact + 4)
    count = tl.load(fact + 5)
    padding = tl.load(fact + 6)
    begin, length = _bounds(fact, index, bags, inside, all_bags, count, BAGGED)
    total = tl.zeros((BAGS, SPAN), tl.float32)
    wrong = tl.zeros((BAGS,), tl.int32)
    padded = tl.zeros((BAGS,), tl.int32)
    for start in range(0, tl.max(length), UNROLL):
        # The loads of all rows come first, so that their latencies overlap.
        found = ()
        for step in tl.static_range(UNROLL):
            there = start + step < length
            place = begin + start + step
            row = tl.load(indices + place, mask=there, other=0).to(tl.int64)
            known = (row >= 0) & (row < rows)
            pad = row == padding
            wrong |= (there & (known == 0)).to(tl.int32)
            padded += (there & pad).to(tl.int32)
            at = row[:, None] * WIDTH + columns[None, :]
            read = (there & known & (pad == 0))[:, None] & (columns < WIDTH)[None, :]
            found = found + (tl.load(table + at, mask=read, other=0.0),)
        for step in tl.static_range(UNROLL):
            if WEIGHTED:
                there = start + step < length
                weight = tl.load(samples + begin + start + step, mask=there, other=0.0)
                total += found[step].to(tl.float32) * weight.to(tl.float32)[:, None]
            elif BAGGED:
                total += found[step].to(tl.float32)
            else:
                # The row is not added to ``total``, because -0 plus 0 is 0.
                total = found[step].to(tl.float32)
        if SAVES:
            of_index = tl.load(fact + 7)
            for step in tl.static_range(UNROLL):
                there = (start + step < length) & (of_index != 0)
                tl.store(of_index.to(index.dtype) + begin + start + step, bags.to(index.dtype.element_ty), mask=there)
    tl.device_assert(wrong == 0, "index out of range of its embedding table")
    counted = length - padded
    if SAVES:
        sizes = tl.load(fact + 8)
        tl.store(sizes.to(index.dtype) + bags, counted.to(index.dtype.element_ty), mask=inside & (sizes != 0))
    if MEAN:
        total = tl.math.div_rn(total, tl.maximum(counted, 1).to(tl.float32)[:, None])
    return total.to(out.dtype.element_ty)


@triton.jit
def _pool_piece(
    out, facts, index, peer_data, peer_flags, flags, queues, call, stop, patience, site, rank, signals,
    tables, rows, piece_rows, row_stride, table_stride,
    WORLD: tl.constexpr, WIDTH: tl.constexpr, BAGS: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr,
    BAGGED: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SAVES: tl.constexpr,
):  # fmt: skip
    """Claim one piece, look up its bags and store their results. Returns whether there was a piece to claim."""
    i = tl.atomic_add(queues, 1, sem="relaxed")
    of_table = tl.cdiv(rows, piece_rows)
    of_slice = tables * of_table
    there = i < of_slice * WORLD
    if there:
        peer = (rank + 1 + i // of_slice) % WORLD
        table = i % of_slice // of_table
        first = i % of_table * piece_rows
        last = tl.minimum(first + piece_rows, rows)
        if peer != rank:
            wait_at_least(credit_flag(flags, peer), call, stop, patience, site * WAIT_KINDS + WAIT_CREDIT, peer)
        # If the credit did not arrive, nothing is stored at the peer.
        limit = tl.where((peer == rank) | may_store(stop), last, first)
        base = tl.where(peer == rank, out.to(tl.int64), tl.load(peer_data + peer)).to(out.dtype)
        slot = tl.cast(rank, tl.int64) * tables * rows * WIDTH + tl.cast(table, tl.int64) * table_stride
        to = tl.multiple_of(base, 16) + slot
        columns = tl.arange(0, SPAN)
        for start in range(first, last, BAGS):
            of_peer = start + tl.arange(0, BAGS)
            found = _look_up(
                facts + table * TABLE_FACTS, out, index, peer * rows + of_peer, of_peer < last, WORLD * rows, columns,
                WIDTH, BAGS, SPAN, UNROLL, BAGGED, MEAN, WEIGHTED, SAVES,
            )  # fmt: skip
            at = of_peer[:, None].to(tl.int64) * row_stride + columns[None, :]
            tl.store(to + at, found, mask=(of_peer < limit)[:, None] & (columns < WIDTH)[None, :])
        if peer != rank:
            flag = tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32))
            count_and_signal(
                queues + QUEUE_WORDS + peer, of_slice, signal_flag(flag, rank, 0, signals, WORLD), call + 1, stop
            )
    return there


@triton.jit(do_not_specialize=["rank", "site", "signals", "tables", "rows", "piece_rows"])
def embedding_all_to_all(
    out, facts, index, staging, peer_data, peer_flags, flags, queues, calls, stop, patience, site, rank, signals,
    tables, rows, piece_rows, row_stride, table_stride, slot_vectors,
    WORLD: tl.constexpr, WIDTH: tl.constexpr, BAGS: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr,
    BAGGED: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SAVES: tl.constexpr, COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: any number of blocks.

    Args: see ``kernels`` for those not listed.
        out: the collective's result: from each rank a slot of ``tables * rows * WIDTH`` elements. ``out``, the tables
            and the workspace have one dtype (fp32, fp16 or bf16), are row-major, and are aligned to 16 bytes.
        facts: int64 ``[tables, TABLE_FACTS]``: see ``kernels.layout``.
        index: any pointer to the dtype of indices and offsets, int32 or int64; never read from.
        staging: this rank's workspace as int32 words, with the layout of ``out``.
        queues: word 0 counts claimed pieces, word 1 claimed copies, word 3 finished blocks. Word ``QUEUE_WORDS + peer``
            counts the pieces that are stored for ``peer``.
        rows: bags of a slice. Every table has ``WORLD * rows`` bags.
        piece_rows: bags of a piece, a multiple of ``BAGS``.
        row_stride, table_stride: elements from bag to bag of a table, and from table to table, in a slot.
        slot_vectors: number of 16-byte vectors in a slot.
        WIDTH: elements of a row. A row is a whole number of 16-byte vectors.
        BAGS: bags that are looked up at once, a power of two.
        SPAN: a power of two, at least ``WIDTH``.
        UNROLL: rows of each bag that are loaded at once.
        BAGGED: False for plain rows: bag ``i`` then holds only index ``i``.
        WEIGHTED: each row is multiplied by the weight of its sample, which has the dtype of the tables.
        COPIES: number of parts in which a peer's results are copied.
    """
    call = tl.load(calls)
    working = True
    while working:
        working = _pool_piece(
            out, facts, index, peer_data, peer_flags, flags, queues, call, stop, patience, site, rank, signals,
            tables, rows, piece_rows, row_stride, table_stride,
            WORLD, WIDTH, BAGS, SPAN, UNROLL, BAGGED, MEAN, WEIGHTED, SAVES,
        )  # fmt: skip
    result = out.to(tl.pointer_type(tl.int32), bitcast=True)
    copying = True
    while copying:
        # The sizes are written as multiples of four, so the compiler knows that no mask ends inside a vector.
        copying = receive_piece(
            result, staging, queues + 1, flags, call, stop, patience, site, rank, signals,
            1, COPIES, slot_vectors * 4, slot_vectors * 4, slot_vectors * 4,
            WORLD, BLOCK,
        )  # fmt: skip
    last_block_ends(queues, calls, peer_flags, call, rank, stop, WORLD, False)
