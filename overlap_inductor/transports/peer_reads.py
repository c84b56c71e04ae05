# SPDX-License-Identifier: Apache-2.0
"""Copy engines read the peers' memory. When this rank's rows are ready, copies set its flags at the peers. When the
peers' flags have arrived here, copies of rows follow. The rows need not be contiguous in the result.

Ordering. ``announce`` follows the matmul that computes the rows, on its stream or on one that has waited for it. So the
rows are complete and visible in their owner's memory before the flag is set (``transports.copy_engine``). The reader's
kernel acquires the flag, and the reads follow on its stream (``kernels.transfer``). Reads of a peer's memory go to that
memory, and no cache of the reader holds older values: copy engines do not read through the SMs' caches.

Overwriting. A rank writes its part only after every peer's credit for it: then all peers have ended the earlier calls
that read the slot. A call ends behind its reads. All calls on a slot of protocol ``READS`` read, so no peer writes
there. If the wait for credits ended without one, the rows that a slow peer reads may be overwritten. The peer's results
become NaN, as ``transports.copy_engine`` explains for copies. This rank has set the abort words before it writes, and
the peer looks at its abort word after its last read.

Turns. Rank ``r`` reads from ranks ``r + 1``, ``r + 2``, ... While the ranks are in step, no two of them read from the
same rank. All ranks wait for all flags of a part before they read it, so they begin to read in step.
"""

from __future__ import annotations

import torch

from overlap_inductor.runtime.driver import copier
from overlap_inductor.runtime.driver import plane_copier
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.transports.credits import announced
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import Reads


def prepared(launch: Launch, transfer: Transfer, example: torch.Tensor) -> Reads:
    """As ``PeerReads.prepare_reads``."""
    device, ranks, slot = example.device, launch.world_size, launch.slot
    start, start_plane = copier(device.type), plane_copier(device.type)
    word = announced(launch)
    number_of_call, word_bytes = word.data_ptr(), word.element_size()
    width, rows = transfer.width * example.element_size(), transfer.rows
    at = transfer.flag(0, launch.rank, ranks, slot.signals) * slot.flags.local.element_size()
    peers = [(launch.rank + step) % ranks for step in range(1, ranks)]
    flags = [slot.flags.peers[peer].data_ptr() + at for peer in peers]
    # The own rows come last: the copies from peers have begun earlier then.
    sources = [(r, (slot.data.peers[r] if r in peers else slot.data.local).data_ptr()) for r in (*peers, launch.rank)]
    sources = [(r, address + transfer.origin * width) for r, address in sources]

    def announce() -> None:
        stream = symmetric.stream_number(device)
        for flag in flags:
            start(flag, number_of_call, word_bytes, stream)

    def read(places: torch.Tensor) -> None:
        stream, itemsize = symmetric.stream_number(device), places.element_size()
        base, (apart, pitch, _) = places.data_ptr(), (stride * itemsize for stride in places.stride())
        for rank, source in sources:
            if pitch == width:
                start(base + rank * apart, source, rows * width, stream)
            else:
                start_plane(base + rank * apart, pitch, source, width, rows, stream)

    return Reads(announce, read)
