"""Where things lie in the memory that host and kernels share. No Triton here: the host's part needs only the numbers.

Flags of a slot, ``FLAG_WORDS`` apart: one credit a peer, then ``signals`` a peer. Fault records: see
``runtime.board``.
"""

from __future__ import annotations

FLAG_WORDS = 32
"""int32 words from flag to flag: 128 bytes."""
QUEUE_WORDS = 8
"""int32 words at the head of a slot's queues: what blocks claim, how many have finished, and ``ANNOUNCED``."""
ANNOUNCED = QUEUE_WORDS - 1
"""Which of them holds the number of the call for copy engines."""
WINDOW = 2**20
"""A flag that is this far or further ahead of what is waited for is one that was last touched nearly 2**32 calls
ago."""
FAULT_WORDS = 8
"""int32 words of a rank's fault record on its group's board: whether it stands there, code of the wait, peer, value
wanted, value seen, nothing, and the
GPU's clock in two words."""
BOARD_HEAD = 16
"""int32 words before the first record: whether anybody has given up, and the constant ``1``."""
STOP_WORDS = 8
"""int32 words of a group's fault memory on a GPU: the abort word, how many ranks are to be told, and, in two words
each, the addresses of this rank's
record, of the board, and of a table of the abort words of all ranks."""

WAIT_KINDS = 8
"""The code of a wait is ``site * WAIT_KINDS + kind``."""
WAIT_CREDIT, WAIT_PART, WAIT_PARTIALS, WAIT_RESULT, WAIT_TILES, WAIT_TURN = 1, 2, 3, 4, 5, 6
