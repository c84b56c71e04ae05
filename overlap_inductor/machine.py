"""The machine as the analytic gate sees it: a matmul rate, a link rate and the cost of one step. Shipped defaults, not measurements.

They are facts that all ranks of a group share (device type only), so that every rank decides alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """``matmul_flops`` FLOP/s by item size; ``link_bytes`` B/s each way between two ranks; ``step_seconds`` fixed cost of one hop;
    ``fused_efficiency`` rate of a fused kernel's matmul relative to the vendor's; ``fused_exposed`` what it leaves of a collective of one leg and of two;
    ``fused_seconds`` its fixed cost; ``overlapped_efficiency`` rate of chunk matmuls while transfers run beside them, relative to one whole matmul alone."""

    name: str
    matmul_flops: dict[int, float]
    link_bytes: float
    step_seconds: float
    collective_seconds: float
    overlapped_efficiency: float
    fused_efficiency: float = 0.95
    fused_exposed: tuple[float, float] = (0.1, 0.4)
    fused_seconds: float = 20e-6


_MACHINES = {
    "cpu": Machine("cpu", {8: 2e10, 4: 5e10, 2: 5e10, 1: 5e10}, 1e9, 100e-6, 200e-6, 0.93),
    # Fused kernels: from bench/results/fused.jsonl (4 H200s).
    # One H200: dense bf16 about 700 TFLOP/s in practice; NCCL send and receive about 300 GB/s each way on NVLink. NCCL's kernels take
    # SMs and memory bandwidth from the matmuls beside them: 0.75 is what the ring reached on 4 H200s (bench/results/ring_nccl.jsonl).
    "cuda": Machine("cuda", {8: 3e13, 4: 2.5e14, 2: 7e14, 1: 1.3e15}, 3e11, 20e-6, 30e-6, 0.75),
}


def machine_for(device_type: str) -> Machine:
    """The shipped profile of a device type; an unknown accelerator is taken for a CPU, which overlaps only large sites."""
    return _MACHINES.get(device_type, _MACHINES["cpu"])
