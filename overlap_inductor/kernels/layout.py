# SPDX-License-Identifier: Apache-2.0
"""The layout of the memory that host and kernels share. This module holds numbers only and does not import Triton.

A call of a site holds one *slot* of its group's workspace (``runtime.arena``). The flags of a slot lie ``FLAG_WORDS``
apart. First comes one credit for each rank. Then come the flags that rank 0 sets, as many flags that rank 1 sets, and
so on. A group's *board* is memory of the host that holds the ranks' fault records (``runtime.board``).
"""

from __future__ import annotations

FLAG_WORDS = 32
"""int32 words from one flag to the next: 128 bytes."""
QUEUE_WORDS = 8
"""int32 words at the head of a slot's queues: counters of claimed work and of finished blocks, and word
``ANNOUNCED``."""
ANNOUNCED = QUEUE_WORDS - 1
"""The queue word that holds the call number for copy engines."""
WINDOW = 2**20
"""A flag has reached its target if it is ahead of the target by 0 or more, but less than this (modulo 2**32)."""
FAULT_WORDS = 8
"""int32 words of a rank's fault record on its group's board:

* words 0 and 1: whether the record is complete; the code of the wait (0 if the host aborted the group);
* words 2 to 4: the peer, the value wanted and the value seen;
* words 6 and 7: when the rank gave up or aborted the group, in nanoseconds. Word 5 is unused.
"""
BOARD_HEAD = 16
"""int32 words before the first record. Word 0: not 0 if any rank has given up or has aborted the group. Word 1: the
constant ``1``. The other words are unused."""
STOP_WORDS = 8
"""int32 words of a group's fault memory on a GPU (``runtime.faults``):

* word 0: the abort word of this rank, which ends the waits of this rank's kernels when it is set;
* word 1: the number of abort words that a kernel sets when it gives up;
* then three addresses of two words each: this rank's record, the board, and a table of these abort words' addresses.
"""

WAIT_KINDS = 8
"""The code of a wait is ``site * WAIT_KINDS + kind``."""
WAIT_CREDIT, WAIT_PART, WAIT_PARTIALS, WAIT_RESULT, WAIT_TILES, WAIT_TURN = 1, 2, 3, 4, 5, 6
TABLE_FACTS = 9
"""int64 words that a kernel reads about each embedding table:

* words 0 to 3: addresses of table, indices, offsets and weights of samples;
* words 4 to 6: number of rows, number of indices, padding index (-1: none);
* word 7: where the kernel stores the bag of each index (0: nowhere);
* word 8: where the kernel stores how many rows of each bag are not padding (0: nowhere).
"""
