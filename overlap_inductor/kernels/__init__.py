# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, and the layout of the memory that they share with the host (``layout``). The kernels import no FX.
Within the package, only ``lowerings`` and ``transports`` import the kernels; ``runtime`` imports ``layout``.

Arguments with one meaning in all kernels:

    WORLD, rank, site: number of ranks, this rank, and the number of the site in fault records
    peer_data, peer_flags: int64 [WORLD], addresses of the ranks' workspace and flags
    flags, signals: this rank's flags, and how many of them each source (a sending rank) has (``signals.signal_flag``)
    calls: int32, one word in this rank's own memory: number of calls that have ended
    queues: int32 in this rank's own memory, zero between calls except for word ``layout.ANNOUNCED``
    stop, patience: the fault memory (``layout.STOP_WORDS``), and the longest wait for a peer in ns
    scale: factor of a sum over ranks (1, or 1 / WORLD for an average)
    BATCH: each time a block has computed this many tiles, it waits until its last store has left shared memory
    EPILOGUE: None, or a function that ``kernels.epilogue`` made; the function reads ``extra0`` and ``extra1``

In a CUDA graph, a kernel's arguments never change. So kernels read the number of the call from ``calls``, and the last
kernel of a call increments ``calls``.
"""
