# SPDX-License-Identifier: Apache-2.0
"""Kernels for messages between two ranks whose sizes only these two ranks know. Copy engines move the bytes.

A *channel* leads from one rank to another, in one *lane*. It has room for one message in the receiver's memory. Both
ranks count its messages: the sender those that it sent, the receiver those that it took. Each rank has, for every peer
and lane, two flags and two counters::

    sender, on one stream                               receiver
    begin_round: until the receivers have taken         wait_for_message: until ``arrived`` is
        all earlier messages (``taken``)                    one more than the messages that it waited for
    copy the bytes                                      read the bytes
    copy the counter of sent messages into              end_round: set the senders' ``taken`` to
        the receiver's ``arrived``                          the number of messages that it waited for

A *round* is a set of channels, each with one message. One launch begins a round for all its channels, and one launch
ends it. Bit ``p`` of a mask stands for the channel from or to rank ``p``.

Flags. Flag ``2 * lane`` of ``signals.signal_flag`` is ``arrived``: its source is the sender. Flag ``2 * lane + 1`` is
``taken``: its source is the receiver. Word ``QUEUE_WORDS + peer * signals + 2 * lane`` of the queues counts the
messages sent to the peer. The word after it counts the messages that this rank waited for.

Memory ordering. A copy begins when everything that the previous copy of its stream has written is visible
(``transports.copy_engine``). So a reader that acquires ``arrived`` sees the bytes. ``end_round`` runs on a stream after
the reads, and releases. So the sender's next copy, which follows its acquire, cannot overwrite bytes that are still
read.

Aborts. If a wait ends because its patience is over or the group has been aborted, queued copies still run. As in
``transfer.wait_for_credits``, ``begin_round`` then sets every rank's abort word before it ends. It also sets its
counters to a number for which no rank waits. A receiver whose bytes are overwritten finds its abort word set after its
last read, and sets its results to NaN (``spoil_rows``).

Forward progress. See ``lowerings.chunked.experts_launch``: the order in which a rank launches its sends and waits.

CUDA graphs. The kernels read all numbers from device memory, so they may be replayed. But an op whose sizes come from
the host cannot be captured.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overlap_inductor.kernels.signals import QUEUE_WORDS
from overlap_inductor.kernels.signals import WAIT_CREDIT
from overlap_inductor.kernels.signals import WAIT_KINDS
from overlap_inductor.kernels.signals import WAIT_PART
from overlap_inductor.kernels.signals import look
from overlap_inductor.kernels.signals import signal
from overlap_inductor.kernels.signals import signal_flag
from overlap_inductor.kernels.signals import wait_at_least
from overlap_inductor.kernels.transfer import NOBODY
from overlap_inductor.kernels.transfer import set_abort_words


@triton.jit
def _counter(queues, peer, index, signals):
    return queues + QUEUE_WORDS + peer * signals + index


@triton.jit(do_not_specialize=["there_mask", "back_mask", "site", "signals"])
def begin_round(there_mask, back_mask, flags, queues, stop, patience, site, signals, WORLD: tl.constexpr):
    """Wait until the ranks in ``there_mask`` have taken all messages that this rank sent them in lane 0, and
    those in ``back_mask`` all in lane 1. Then count the next message of each of these channels. Grid: one block."""
    for lane in tl.static_range(2):
        mask = back_mask if lane else there_mask
        for peer in range(WORLD):
            if (mask >> peer) & 1:
                counter = _counter(queues, peer, 2 * lane, signals)
                sent = tl.load(counter)
                flag = signal_flag(flags, peer, 2 * lane + 1, signals, WORLD)
                wait_at_least(flag, sent, stop, patience, site * WAIT_KINDS + WAIT_CREDIT, peer)
                tl.store(counter, sent + tl.where(look(stop) == 0, 1, NOBODY))
    set_abort_words(stop)


@triton.jit(do_not_specialize=["site", "peer", "lane", "signals"])
def wait_for_message(flags, queues, stop, patience, site, peer, lane, signals, WORLD: tl.constexpr):
    """Wait until the next message of ``peer`` in ``lane`` has arrived. Grid: one block."""
    counter = _counter(queues, peer, 2 * lane + 1, signals)
    number = tl.load(counter) + 1
    flag = signal_flag(flags, peer, 2 * lane, signals, WORLD)
    wait_at_least(flag, number, stop, patience, site * WAIT_KINDS + WAIT_PART, peer)
    tl.store(counter, number)


@triton.jit(do_not_specialize=["there_mask", "back_mask", "rank", "signals"])
def end_round(there_mask, back_mask, peer_flags, queues, stop, rank, signals, WORLD: tl.constexpr):
    """Tell the ranks in ``there_mask`` for lane 0, and those in ``back_mask`` for lane 1, that this rank has read the
    last message that it waited for. Does nothing if the group has been aborted. Grid: one block, on a stream after the
    reads."""
    for lane in tl.static_range(2):
        mask = back_mask if lane else there_mask
        for peer in range(WORLD):
            if (mask >> peer) & 1:
                number = tl.load(_counter(queues, peer, 2 * lane + 1, signals))
                flags = tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32))
                signal(signal_flag(flags, rank, 2 * lane + 1, signals, WORLD), number, look(stop))


@triton.jit(do_not_specialize=["row_bytes"], do_not_specialize_on_alignment=["rows"])
def spoil_rows(result, rows, row_bytes, stop, BLOCK: tl.constexpr):
    """If the group has been aborted, set ``result`` to NaN (``transfer.spoil``). ``rows``: int64 ``[1]`` on the device,
    the number of rows. ``row_bytes``: bytes of a row. Grid: one block."""
    to = result.to(tl.pointer_type(tl.int32), bitcast=True)
    limit = tl.where(look(stop) == 0, 0, tl.cdiv(tl.load(rows) * row_bytes, 4))
    for start in range(0, limit, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.full((BLOCK,), -1, tl.int32), mask=at < limit)
