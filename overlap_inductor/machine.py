"""The machine as the analytic gate sees it: a matmul rate, a link rate and the cost of one step. Shipped defaults, not measurements.

They are facts that all ranks of a group share (device type only), so that every rank decides alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What a device type does.

    Attributes:
        matmul_flops: FLOP/s by item size.
        link_bytes: B/s each way between two ranks; collective_seconds: fixed cost of a collective.
        step_seconds: fixed cost of one hop of a ring.
        overlapped_efficiency: rate of chunk matmuls while transfers run beside them, relative to one whole matmul alone.
        fused_exposed: part of the shorter of matmul and wire that a fused kernel leaves in sight, of a gather, a scatter, an all-reduce with a longer matmul, and one
            with a longer wire (of an all-reduce as one of 8 ranks on 2 GPUs, and a tenth for contention: not measured on 8); fused_leg_seconds, fused_leg_peer_seconds: its
            fixed cost a leg, and for each peer.
        chunked_exposed, chunked_leg_seconds, chunked_leg_peer_seconds, chunked_ranks: the same of vendor matmuls on chunks; chunked_copy_exposed: part of the gathered
            tensor's copy that shows beside a matmul (2 H200s, 2048 and 8192 tokens: 10 and 46 us, where a fused kernel's copy takes 23 and 67:
            bench/results/handed_out.jsonl; in larger groups not measured).
        chunked_host_seconds, chunked_peer_seconds: of the host, for the launches of a call, and of each peer's leg; chunked_gain_seconds: by which such a call must be faster
            than ``keep``, since a model that waits for its host has nothing of less.
        chunked_replay_seconds: of the host, for all launches as one CUDA graph; chunked_replay_gain_seconds, chunked_replay_gain_peer_seconds: by which such a call must be
            faster a leg, in all or for each peer, whichever is more (peers that are late); chunked_replay_tiles: how many tiles for each rank chunks are cut from (a chunk that
            leaves most of the GPU idle takes as long as a larger one), or ``fused_tiles``, whichever is fewer.
        push_bytes: B/s each way that SMs store to peers; push_seconds: fixed cost of a small all-reduce; push_leg_seconds: of its second leg.
        wave_efficiency: rate of matmul and collective beside each other in groups of waves; wave_groups: groups that a call is cut into; wave_ranks: largest group in which
            that was measured.
        memory_bytes: B/s that a kernel reads and writes (sums of partial results on one H100: 2.72e12).
        fused_ranks: largest group in which that was measured; fused_tiles: tiles from which on a fused kernel is worth a thought.
    """

    name: str
    matmul_flops: dict[int, float]
    link_bytes: float
    step_seconds: float
    collective_seconds: float
    overlapped_efficiency: float
    fused_exposed: tuple[float, float, float, float] = (0.05, 0.12, 0.16, 0.15)
    fused_leg_seconds: float = 15e-6
    fused_leg_peer_seconds: float = 8e-6
    fused_ranks: int = 8
    fused_tiles: int = 200
    chunked_exposed: tuple[float, float, float, float] = (0.12, 0.1, 0.36, 0.25)
    chunked_leg_seconds: float = 8e-6
    chunked_leg_peer_seconds: float = 7e-6
    chunked_ranks: int = 8
    chunked_copy_exposed: float = 0.45
    chunked_host_seconds: float = 200e-6
    chunked_peer_seconds: float = 10e-6
    chunked_gain_seconds: float = 30e-6
    chunked_replay_seconds: float = 40e-6
    chunked_replay_gain_seconds: float = 10e-6
    chunked_replay_gain_peer_seconds: float = 4e-6
    chunked_replay_tiles: int = 48
    push_bytes: float = 3e11
    push_seconds: float = 8e-6
    push_leg_seconds: float = 2e-6
    wave_efficiency: float = 0.85
    wave_groups: int = 4
    wave_ranks: int = 0
    memory_bytes: float = 2.7e12


WITHOUT_PEERS = "cuda without peer access"

_MACHINES = {
    "cpu": Machine("cpu", {8: 2e10, 4: 5e10, 2: 5e10, 1: 5e10}, 1e9, 100e-6, 200e-6, 0.93),
    # Fused kernels and chunks: llama3-70b MLP on 2, 4 and 8 H200s, 1024 to 16384 tokens (bench/results/operators.jsonl, fused.jsonl).
    # Small messages: 4 to 11 us at 1 to 128 rows of 8192 on 2 H200s (bench/results/small_message.jsonl).
    # One H200: dense bf16 780 TFLOP/s in large matmuls; NCCL send and receive about 300 GB/s each way on NVLink. NCCL's kernels take
    # SMs and memory bandwidth from the matmuls beside them: 0.75 is what the ring reached on 4 H200s (bench/results/ring_nccl.jsonl).
    "cuda": Machine("cuda", {8: 3e13, 4: 2.5e14, 2: 7.8e14, 1: 1.3e15}, 3e11, 20e-6, 30e-6, 0.75),
    # GPUs of one machine that do not reach each other's memory. Two H200s with NCCL_P2P_DISABLE=1, 4096 to 16384 tokens: 25 to 29 GB/s through the host's memory;
    # groups of waves 1.34 to 1.54 times as fast as the plain graph, the ring 0.82 to 0.98 (bench/results/operators_without_peers.jsonl).
    WITHOUT_PEERS: Machine(WITHOUT_PEERS, {8: 3e13, 4: 2.5e14, 2: 7.8e14, 1: 1.3e15}, 2.8e10, 20e-6, 30e-6, 0.3, wave_efficiency=0.95, wave_ranks=2),
}


def machine_for(device_type: str) -> Machine:
    """The shipped profile of a device type, or of GPUs ``WITHOUT_PEERS``; an unknown accelerator is taken for a CPU, which overlaps only large sites."""
    return _MACHINES.get(device_type, _MACHINES["cpu"])
