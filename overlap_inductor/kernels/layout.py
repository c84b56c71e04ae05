"""Where things lie in the memory that host and kernels share. No Triton here: the host's part needs only the numbers.

Flags of a slot, ``FLAG_WORDS`` apart: one credit a peer, then ``signals`` a peer. A fault record: see ``transports.faults``.
"""

from __future__ import annotations

FLAG_WORDS = 32
"""int32 words from flag to flag: 128 bytes."""
QUEUE_WORDS = 8
"""int32 words at the head of a slot's queues: what blocks claim, how many have finished, and ``ANNOUNCED``."""
ANNOUNCED = QUEUE_WORDS - 1
"""Which of them holds the number of the call for copy engines."""
FAULT_WORDS = 8
"""int32 words of a fault record in the host's memory: whether a wait was given up, its code, peer, value wanted, value seen."""
STOP_WORDS = 4
"""int32 words of its half in the GPU's memory: the abort word, nothing, and the address of the host's half in two words."""

WAIT_KINDS = 8
"""The code of a wait is ``site * WAIT_KINDS + kind``."""
WAIT_CREDIT, WAIT_PART, WAIT_PARTIALS, WAIT_RESULT, WAIT_TILES, WAIT_TURN = 1, 2, 3, 4, 5, 6
