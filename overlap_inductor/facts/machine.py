# SPDX-License-Identifier: Apache-2.0
"""``Machine`` holds the rates and fixed costs from which schedules are estimated, by device type.

The values are shipped defaults; nothing is measured in the run. They rest on facts that all ranks of a group share, so
every rank decides alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Rates and fixed costs of a device type.

    Attributes:
        matmul_flops: FLOP/s by item size.
        link_bytes: B/s in each direction between two ranks.
        step_seconds: fixed cost of one hop of a ring.
        collective_seconds: fixed cost of a collective.
        overlapped_efficiency: rate of chunk matmuls while transfers run beside them, relative to one whole matmul
            alone.
        least_tiles: fewest tiles of 128 x 256 for which a schedule that cuts the matmul inside one op pays.
        memory_bytes: B/s that a kernel reads and writes (summing partial results on one H100: 2.72e12).
    """

    name: str
    matmul_flops: dict[int, float]
    link_bytes: float
    step_seconds: float
    collective_seconds: float
    overlapped_efficiency: float
    least_tiles: int = 200
    memory_bytes: float = 2.7e12


WITHOUT_PEERS = "cuda without peer access"

_MACHINES = {
    "cpu": Machine("cpu", {8: 2e10, 4: 5e10, 2: 5e10, 1: 5e10}, 1e9, 100e-6, 200e-6, 0.93),
    # One H200: dense bf16 780 TFLOP/s in large matmuls; NCCL send and receive about 300 GB/s each way on NVLink. NCCL's
    # kernels take SMs and memory bandwidth from the matmuls beside them: 0.75 is what the ring reached on 4 H200s
    # (bench/results/ring_nccl.jsonl).
    "cuda": Machine("cuda", {8: 3e13, 4: 2.5e14, 2: 7.8e14, 1: 1.3e15}, 3e11, 20e-6, 30e-6, 0.75),
    # GPUs of one machine that cannot access each other's memory. Two H200s with NCCL_P2P_DISABLE=1 at 4096 to 16384
    # tokens moved 25 to 29 GB/s through the host's memory. Against the plain graph, wave groups ran 1.34 to 1.54 times
    # as fast and the ring 0.82 to 0.98 times (bench/results/operators_without_peers.jsonl).
    WITHOUT_PEERS: Machine(WITHOUT_PEERS, {8: 3e13, 4: 2.5e14, 2: 7.8e14, 1: 1.3e15}, 2.8e10, 20e-6, 30e-6, 0.3),
}


@dataclass(frozen=True)
class Box:
    """A machine of several GPUs that ``overlap-inductor explain --machine`` plans for. There is one for each machine
    whose figures were measured.

    Attributes:
        name: what ``--machine`` is given.
        title: the machine in words.
        gpus: number of its GPUs; each reaches the memory of all others.
        capability: compute capability of its GPUs.
        machine: rates and fixed costs of one GPU and its links.
    """

    name: str
    title: str
    gpus: int
    capability: tuple[int, int]
    machine: Machine


BOXES = {"h200": Box("h200", "8 x NVIDIA H200, each linked to all others by NVLink", 8, (9, 0), _MACHINES["cuda"])}


def machine_for(device_type: str) -> Machine:
    """The shipped profile of a device type, or of GPUs ``WITHOUT_PEERS``. An unknown accelerator gets the CPU's
    profile, which overlaps only large sites."""
    return _MACHINES.get(device_type, _MACHINES["cpu"])
