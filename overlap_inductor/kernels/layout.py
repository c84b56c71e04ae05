# SPDX-License-Identifier: Apache-2.0
"""The layout of the memory that host and kernels share. This module holds numbers only and does not import Triton.

The flags of a slot lie ``FLAG_WORDS`` apart. First comes one credit for each rank. Then come ``signals`` flags of rank
0, as many of rank 1, and so on. Fault records: see ``runtime.board``.
"""

from __future__ import annotations

FLAG_WORDS = 32
"""int32 words from one flag to the next: 128 bytes."""
QUEUE_WORDS = 8
"""int32 words at the head of a slot's queues: counters of claimed work, the number of finished blocks, and word
``ANNOUNCED``."""
ANNOUNCED = QUEUE_WORDS - 1
"""The queue word that holds the call number for copy engines."""
WINDOW = 2**20
"""A flag has reached its target if it equals the target, or is ahead of it by less than this (modulo 2**32). Any other
flag was last written by an earlier call, or after an abort."""
FAULT_WORDS = 8
"""int32 words of a rank's fault record on its group's board. The first two hold whether the record is complete, and the
code of the wait (0 if the host aborted the group). The next three hold the peer, the value wanted and the value seen.
One word is unused. The last two words hold the time in nanoseconds."""
BOARD_HEAD = 16
"""int32 words before the first record. The first word says whether any rank has given up or has aborted the group. The
second word holds the constant ``1``. The other words are unused."""
STOP_WORDS = 8
"""int32 words of a group's fault memory on a GPU: the abort word, the number of abort words to set, and three addresses
in two words each. The addresses are those of this rank's record, of the board, and of a table of the abort words to set
(``runtime.faults``)."""

WAIT_KINDS = 8
"""The code of a wait is ``site * WAIT_KINDS + kind``."""
WAIT_CREDIT, WAIT_PART, WAIT_PARTIALS, WAIT_RESULT, WAIT_TILES, WAIT_TURN = 1, 2, 3, 4, 5, 6
TABLE_FACTS = 9
"""int64 words that a kernel reads about each embedding table. Words 0 to 3 are the addresses of table, indices, offsets
and weights of samples. Words 4 to 6 are the number of rows, the number of indices, and the padding index (-1: none).
Words 7 and 8 are addresses to which the kernel stores the bag of each index and the number of rows of each bag (0:
nowhere)."""
