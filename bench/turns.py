# SPDX-License-Identifier: Apache-2.0
"""Measure the bandwidth of copy engines with turns and without, when all ranks send a shard to every peer.

    torchrun --nproc-per-node 8 -m bench.turns --out rows.jsonl

Without turns, two ranks that are microseconds out of step send to one receiver at once. Each gets half of the
receiver's link, and is further out of step when it sends to its next peer (``transports.copy_engine``).

A call ends when the rows of all peers have arrived. Each rank takes the median of its samples. A JSON row
holds the largest of these medians. Transfers are timed alone, and while two matmuls run. Before the timing, the data
that arrived is compared with the data that was sent.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import rows
from bench.timing import greatest
from bench.timing import timed
from overlap_inductor.kernels.layout import WAIT_PART
from overlap_inductor.runtime.arena import Request
from overlap_inductor.runtime.side_stream import side_stream
from overlap_inductor.runtime.workspace import workspace_of
from overlap_inductor.transports.arrivals import wait_kernel
from overlap_inductor.transports.copy_engine import CopyEngine
from overlap_inductor.transports.credits import credit_kernel
from overlap_inductor.transports.credits import end_kernel
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import Share

WIDTH = 8192
LEGS = 3
"""The number of transfers of one call: a scatter, a gather, a scatter."""
LIMIT = 1 << 34


class Legs:
    """``LEGS`` transfers of shards of ``shard_rows`` rows, one after the other on the side stream. Shards of at least
    ``turns_from`` bytes take turns. If ``turns_from`` is ``None``, none do."""

    def __init__(self, shard_rows: int, turns_from: int | None, name: str) -> None:
        group, self.device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
        self.world_size, self.shard_rows = group.size(), shard_rows
        self.source = torch.randn(self.world_size * shard_rows, WIDTH, device=self.device).bfloat16()
        nbytes = LEGS * self.source.nbytes
        place = workspace_of(group, self.device)
        place.prepare([Request(name, nbytes, LEGS)], LIMIT)
        launch = place.launch(name, nbytes, LEGS)
        if launch is None:
            raise RuntimeError(f"{nbytes} bytes of workspace are more than {LIMIT}")
        transfers = [
            Transfer(shard_rows, WIDTH, shard_rows, leg % 2 == 0, base=leg * self.world_size * shard_rows, index=leg)
            for leg in range(LEGS)
        ]
        self.launch = launch
        transport, share = CopyEngine(), Share(turns_from=turns_from)
        self.sends = [transport.prepare(launch, t, range(self.world_size - 1), self.source, share) for t in transfers]
        self.waits = [wait_kernel(launch, t, 0, self.world_size - 1, WAIT_PART) for t in transfers]
        self.came = launch.slot.data.local[:nbytes].view(torch.bfloat16).view(LEGS, self.world_size, shard_rows, WIDTH)

    def send(self) -> None:
        """Start the transfers and wait for the peers' rows. The caller must then launch ``end_kernel``."""
        side = side_stream(self.device)
        with side:
            credit_kernel(self.launch)()
            for send in self.sends:
                send(self.source)
        for wait in self.waits:
            wait()
        side.join()

    def __call__(self) -> None:
        self.send()
        end_kernel(self.launch)()

    def is_right(self) -> bool:
        everyone = self.source.new_empty(self.world_size, *self.source.shape)
        dist.all_gather_into_tensor(everyone.view(-1, WIDTH), self.source)
        self.came.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        self.send()
        rank = dist.get_rank()
        expected = everyone.view(self.world_size, self.world_size, self.shard_rows, WIDTH)
        peers = [r for r in range(self.world_size) if r != rank]
        right = all(
            torch.equal(self.came[leg, peers], expected[peers, rank if leg % 2 == 0 else 0]) for leg in range(LEGS)
        )
        end_kernel(self.launch)()
        return greatest(float(not right)) == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.turns", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 8, 16, 32], help="sizes of a shard in MiB")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    world_size, where = dist.get_world_size(), rows.environment(device)
    left, right = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product, beside = torch.empty_like(left), torch.cuda.Stream()
    found: list[dict[str, Any]] = []
    for megabytes in options.megabytes:
        for name, turns_from in (("copy_engine", None), ("copy_engine, in turn", 0)):
            legs = Legs((megabytes << 20) // (2 * WIDTH), turns_from, f"{name} {megabytes}")
            if not legs.is_right():
                raise SystemExit(f"{name} of {megabytes} MiB: the data that arrived is not the data that was sent")

            def with_matmul(legs: Legs = legs) -> None:
                beside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(beside):
                    for _ in range(2):
                        torch.mm(left, right, out=product)
                legs()
                torch.cuda.current_stream().wait_stream(beside)

            for kind, call in (("alone", legs), ("beside two matmuls", with_matmul)):
                times = sorted(timed({name: call}, options.repeats)[name])
                us = greatest(times[len(times) // 2])
                rate = LEGS * (world_size - 1) * (megabytes << 20) / us / 1e3
                row = {
                    "world_size": world_size,
                    "megabytes": megabytes,
                    "rounds": LEGS * (world_size - 1),
                    "provider": name,
                    "kind": kind,
                }
                found.append({**row, "us": round(us, 1), "gb_per_s": round(rate, 1), **where})
                if dist.get_rank() == 0:
                    print(found[-1]["megabytes"], name, kind, found[-1]["us"], found[-1]["gb_per_s"], flush=True)
    if dist.get_rank() == 0 and options.out:
        rows.append(options.out, found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
