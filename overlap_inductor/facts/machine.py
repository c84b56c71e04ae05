# SPDX-License-Identifier: Apache-2.0
"""``Machine`` holds the rates and fixed costs of a device type, from which the time of a schedule is estimated.

The values ship with the package, or the user states them (``facts.machine_file``); nothing is measured at run time.
Which shipped values are used depends only on facts that all ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace


@dataclass(frozen=True)
class Machine:
    """Rates and fixed costs of a device type.

    Attributes:
        matmul_flops: FLOP/s of a matmul, by bytes of an operand's element.
        link_bytes: B/s in each direction between two ranks.
        step_seconds: fixed cost of one hop of a ring.
        collective_seconds: fixed cost of a collective.
        overlapped_efficiency: rate of the matmuls of chunks while transfers run, divided by the rate of the whole
            matmul while no transfer runs.
        least_tiles: the fewest output tiles (128 x 256 elements each) of a matmul for which schedules ``chunked``,
            ``fused`` and ``wave_groups`` pay. Schedule ``chunked`` may pay with fewer tiles if its launches are
            replayed as one CUDA graph.
        memory_bytes: B/s that a memory-bound kernel or a lookup reads and writes. One H100 reached 2.72e12.
        packing_bytes: rate (B/s) of repeated reads. If a matmul is cut into pieces, each piece reads the whole operand
            that is not cut. One core took 0.56 to 0.84 ms for 11.5 MB (fp32; 1024 rows, cut into 16 or 32 pieces).
            ``bench.cpu_rates`` measures it. Very large on GPUs, whose matmuls read operands while they compute.
        lookup_seconds: fixed cost of one lookup in a table. On an H100, 64 calls of ``embedding_bag`` took 680 us.
            Their reads and writes alone would take 50 us.
        launch_seconds: host time of two launches together: a matmul, and one kernel of pointwise ops before or after
            the matmul.
        call_seconds: host time of a collective and its wait; 0 on a CPU. On one host, two layers of Llama took 1.6 ms
            with 5 collectives, and 1.1 ms without. On another host, they took 2.7 ms with 5 collectives, and 1.9 ms
            without.
        graph_seconds: host time of one call of a graph that Inductor replays as a CUDA graph. On 4 H200s, plain steps
            of two layers of Llama-70B took 0.6 to 0.85 ms for one sequence, and 0.94 ms for 16 (medians). The GPU reads
            their weights in 0.3 ms.
    """

    name: str
    matmul_flops: dict[int, float]
    link_bytes: float
    step_seconds: float
    collective_seconds: float
    overlapped_efficiency: float
    least_tiles: int = 200
    memory_bytes: float = 2.7e12
    packing_bytes: float = 1e18
    lookup_seconds: float = 0.0
    launch_seconds: float = 0.0
    call_seconds: float = 0.0
    graph_seconds: float = 0.0


WITHOUT_PEERS = "cuda without peer access"

# One H200 reaches 780 TFLOP/s of dense bf16, and NCCL about 300 GB/s each way on NVLink. NCCL takes SMs and memory
# bandwidth from the matmuls. On 4 H200s, matmuls of the ring reached 0.75 of the rate of a matmul beside
# which no transfer runs (bench/results/ring_nccl.jsonl).
_CUDA = Machine(
    name="cuda",
    matmul_flops={8: 3e13, 4: 2.5e14, 2: 7.8e14, 1: 1.3e15},
    link_bytes=3e11,
    step_seconds=20e-6,
    collective_seconds=30e-6,
    overlapped_efficiency=0.75,
    lookup_seconds=1e-5,
    launch_seconds=4e-5,
    call_seconds=1.3e-4,
    graph_seconds=1e-3,
)
_MACHINES = {
    # ``memory_bytes``: one core read 8.5e9 B/s in embedding_bag with 8 rows for each bag, and 4.2e10 with 64 rows.
    "cpu": Machine(
        "cpu", {8: 2e10, 4: 5e10, 2: 5e10, 1: 5e10}, 1e9, 100e-6, 200e-6, 0.93, memory_bytes=2e10, packing_bytes=1.6e10
    ),
    "cuda": _CUDA,
    # GPUs that cannot access each other's memory: two H200s with NCCL_P2P_DISABLE=1 moved 25 to 29 GB/s through the
    # host. Schedule ``wave_groups`` ran 1.34 to 1.54 times as fast as the plain graph, and schedule ``ring`` 0.82 to
    # 0.98 times as fast (bench/results/operators_without_peers.jsonl).
    WITHOUT_PEERS: replace(_CUDA, name=WITHOUT_PEERS, link_bytes=2.8e10, overlapped_efficiency=0.3),
}


@dataclass(frozen=True)
class Box:
    """A machine of several GPUs for which ``overlap-inductor explain --machine`` can plan.

    Attributes:
        name: the value of ``--machine``.
        title: the machine in words.
        gpus: number of its GPUs; each reaches the memory of all others.
        capability: compute capability of its GPUs.
    """

    name: str
    title: str
    gpus: int
    capability: tuple[int, int]
    machine: Machine


BOXES = {"h200": Box("h200", "8 x NVIDIA H200, each linked to all others by NVLink", 8, (9, 0), _MACHINES["cuda"])}


def machine_for(device_type: str) -> Machine:
    """The shipped ``Machine`` for ``device_type``: a torch device type, or ``WITHOUT_PEERS``. An unknown accelerator
    gets the CPU's ``Machine``."""
    return _MACHINES.get(device_type, _MACHINES["cpu"])
