# SPDX-License-Identifier: Apache-2.0
"""One rank's view of a larger group, on 2 GPUs: parameters for 4 and 8 GPUs can be tried, checked and timed on two.

    torchrun --nproc-per-node 2 -m bench.mirrored --world-size 8 --tokens 1024 4096 [--variants '{"name": ["fused",
    {"parts": 2}]}'] [--out rows.jsonl]

Each GPU plays rank 0 of ``--world-size`` ranks, and the other GPU plays all its peers: what rank 0 sends to peer ``p``
is written into the other GPU's workspace as if it came from as far behind. So a GPU multiplies, sends and receives
exactly what it would in the larger group, through the same NVLink (each GPU's links end in a switch, so that one peer
may take a GPU's whole bandwidth). What is missing: peers that are late one by one, contention in the switch, and NCCL's
collective, so there is no ``keep`` here: times stand beside the matmul alone, and bytes over time beside the links'
rate.

How far off. Of 8 ranks, gathers and scatters from 2048 tokens on come within 5 % of what 8 GPUs take, and all-reduces
of ``fused`` are 6 to 13 % too low. All-reduces of ``chunked`` in bands are 25 to 37 % too low: eight ranks that send to
all at once meet at receivers (``transports.copy_engine``), and one peer that stands for seven meets nobody. That
inverts rankings (4096 tokens: 2 bands 574 us here and 720 there, 4 bands 692 and 914): never choose a number of bands,
or bands against ``fused``, by these rows.

Results are right where each rank's are: they are compared with fp32 on random data before anything is timed. A peer's
credits are taken as given (calls are kept apart by a collective before each of them).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton

from bench.timing import greatest as worst
from bench.timing import timed
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.layout import QUEUE_WORDS
from overlap_inductor.kernels.layout import WINDOW
from overlap_inductor.lowerings.chunked import launch as chunked
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.fused import calls as fused
from overlap_inductor.lowerings.fused import parameters as fused_plan
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.runtime.arena import TILE_BYTES
from overlap_inductor.runtime.arena import Slot
from overlap_inductor.runtime.faults import FaultRecord
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import symmetric

HIDDEN, WIDE = 8192, 28672
PATIENCE_NS = 2_000_000_000
SIGNALS = 64
TOLERANCE = 2e-2
GIVEN = WINDOW // 2
"""A credit for more calls than there will be."""


def margin_words(world_size: int) -> int:
    """Words before a site's flags: see ``mirrored``."""
    return world_size * SIGNALS * FLAG_WORDS


@dataclass(frozen=True)
class MirroredBuffer:
    """The other GPU's memory in place of every peer's, shifted so that rank 0's writes land where rank ``p`` would
    write."""

    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    pointers: torch.Tensor


def mirrored(
    buffer: symmetric.SymmetricBuffer, world_size: int, shift: int, margin: int = 0, turned: bool = False
) -> MirroredBuffer:
    """``shift``: elements from what one source writes to what the next one writes. For a rank ``p`` steps further on,
    the sender is ``p`` steps further back: so what is sent first to those behind comes first from those ahead, as in
    the larger group.

    ``turned``: for flags that copy engines write by address (``peers``) and that a gather's turns read through
    ``pointers``. A turn waits for what the source ``world_size - 1`` has sent to receiver ``p``. Written as source 0's
    flags lie, that would be the flag of source ``2 * world_size - 1 - p``, whom nobody plays. The table turns
    it back by a whole round: source ``world_size - 1 - p``, whose part this GPU has sent just before. What kernels
    write through this table (credits) then falls into the ``margin`` of elements that the buffer has before everything
    else.
    """
    local, other = buffer.local[margin:], buffer.peers[1 - dist.get_rank()][margin:]
    back = world_size * shift * other.element_size() if turned else 0
    if back > margin * other.element_size():
        raise ValueError(
            f"{world_size} sources, {shift} elements apart, are turned back beyond a margin of {margin} elements"
        )
    peers = (local, *(other[(world_size - p) * shift :] for p in range(1, world_size)))
    addresses = [peer.data_ptr() - (back if p else 0) for p, peer in enumerate(peers)]
    return MirroredBuffer(local, peers, torch.tensor(addresses, dtype=torch.int64, device=local.device))


class Site:
    """One pattern at one size, as rank 0 of ``world_size`` ranks sees it."""

    def __init__(
        self,
        pattern: str,
        tokens: int,
        world_size: int,
        data: symmetric.SymmetricBuffer,
        flags: symmetric.SymmetricBuffer,
        faults: FaultRecord,
    ) -> None:
        self.pattern, self.world_size, self.data, self.flags, self.faults = pattern, world_size, data, flags, faults
        self.margin = margin_words(world_size)
        self.rows = tokens // world_size
        gathers = pattern == "all_gather_matmul"
        inner, columns = (HIDDEN, WIDE // world_size) if gathers else (WIDE // world_size, HIDDEN)
        self.a = torch.randn(self.rows if gathers else tokens, inner, device="cuda").bfloat16() / 4
        self.b = (torch.randn(columns, inner, device="cuda").bfloat16() / 16).t()
        self.whole = torch.randn(tokens, inner, device="cuda").bfloat16() if gathers else self.a
        self.out = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)

    def matmul(self) -> torch.Tensor:
        return torch.mm(self.whole, self.b, out=self.out)

    def expected(self, bands: int) -> torch.Tensor:
        """In fp32, from what the other GPU multiplies; ``bands``: in each of which every rank owns rows."""
        mine = self.a.float() if self.pattern == "all_gather_matmul" else self.a.float() @ self.b.float()
        both = torch.empty(2, *mine.shape, device="cuda")
        dist.all_gather_into_tensor(both, mine)
        other = both[1 - dist.get_rank()]
        if self.pattern == "all_gather_matmul":
            return torch.cat([mine, *([other] * (self.world_size - 1))]) @ self.b.float()
        # A band is a part of each rank's shard; one band is the whole shard.
        mine, other = (x.view(bands, self.world_size, self.rows // bands, -1) for x in (mine, other))
        reduced = (mine[:, 0] + other[:, 1:].sum(1)).reshape(self.rows, -1)
        if self.pattern == "matmul_reduce_scatter":
            return reduced
        gathered = torch.empty(2 * self.rows, reduced.shape[1], device="cuda")
        dist.all_gather_into_tensor(gathered, reduced)
        reduced, finished = (
            x.view(bands, 1, self.rows // bands, -1)
            for x in (reduced, gathered.view(2, self.rows, -1)[1 - dist.get_rank()])
        )
        return torch.cat([reduced, finished.expand(-1, self.world_size - 1, -1, -1)], 1).reshape(
            self.world_size * self.rows, -1
        )

    def provider(self, schedule: str, settings: dict[str, Any]) -> tuple[Callable[[], torch.Tensor], int]:
        """A call of the schedule with these parameters, and its bands. All ranks make and use providers in the same
        order, one at a time."""
        text, sms, pattern = json.dumps(settings), symmetric.multiprocessors(self.a.device), self.pattern
        width = self.a.shape[1] if pattern == "all_gather_matmul" else self.b.shape[1]
        if schedule == "fused":
            parameters: Any = fused_plan.parameters_of(text, sms)
            from_source = (
                self.rows
                if pattern == "all_gather_matmul"
                else -(-self.rows // parameters.block_m) * parameters.block_m
            )
            bands = [(0, self.rows)]
        else:
            parameters = chunked_plan.parameters_of(text, sms)
            fitted = chunked_plan.fitted(pattern, self.world_size, self.rows, *self.b.shape, 2, 2, parameters)
            bands = chunked_plan.bands_of(self.rows, fitted) if pattern == "matmul_all_reduce" else [(0, self.rows)]
            from_source = bands[0][1]
        if len({size for _, size in bands}) > 1:
            raise ValueError(
                f"{len(bands)} bands of {self.rows} rows are not equal: what each source writes has no one distance"
            )
        words = torch.zeros(1 + QUEUE_WORDS + 2 * self.world_size * SIGNALS, dtype=torch.int32, device="cuda")
        tiles = torch.zeros(self.data.local.numel() // TILE_BYTES, dtype=torch.int32, device="cuda")
        turned = schedule == "chunked" and pattern == "all_gather_matmul" and parameters.transport == "copy_engine"
        flags = mirrored(self.flags, self.world_size, SIGNALS * FLAG_WORDS, self.margin, turned)
        slot = Slot(
            self.data.local.numel(),
            SIGNALS,
            mirrored(self.data, self.world_size, from_source * width * 2),
            flags,
            words[:1],
            words[1:],
            tiles,
        )
        launch = Launch(0, self.world_size, slot, self.faults, self.faults.number(pattern), PATIENCE_NS)

        def run() -> torch.Tensor:
            if schedule == "fused":
                return getattr(fused, pattern)(self.a, self.b, launch, parameters)
            if pattern == "all_gather_matmul":
                return chunked.all_gather_matmul(self.a, [VendorMatmul(self.b)], launch, parameters)[0]
            return getattr(chunked, pattern)(self.a, VendorMatmul(self.b), launch, parameters)

        return run, len(bands)

    def forget(self) -> None:
        """Reset the flags to their state before the first call."""
        torch.cuda.synchronize()
        dist.barrier()
        self.flags.local.zero_()
        self.flags.local[self.margin : self.margin + self.world_size * FLAG_WORDS : FLAG_WORDS] = GIVEN
        torch.cuda.synchronize()
        dist.barrier()


NEVER = fused_plan.NEVER
DEFAULTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "all_gather_matmul": {
        "fused, pushed": ("fused", {"copies_from": NEVER, "slices": 1}),
        "fused, copied": ("fused", {"copies_from": 0, "slices": 1}),
        "fused, 2 slices": ("fused", {"copies_from": NEVER, "slices": 2, "slices_tiles": NEVER}),
        "fused, 4 slices": ("fused", {"copies_from": NEVER, "slices": 4, "slices_tiles": NEVER}),
        "chunked copy_engine": ("chunked", {"transport": "copy_engine"}),
        "chunked copy_engine c3": ("chunked", {"transport": "copy_engine", "chunks": 3}),
    },
    "matmul_reduce_scatter": {
        "fused": ("fused", {}),
        "chunked copy_engine": ("chunked", {"transport": "copy_engine"}),
        **{f"chunked copy_engine c{c}": ("chunked", {"transport": "copy_engine", "chunks": c}) for c in (3, 7)},
    },
    "matmul_all_reduce": {
        **{f"fused, {n} push": ("fused", {"pushers": n}) for n in (8, 12, 16, 24)},
        **{f"chunked copy_engine b{b}": ("chunked", {"transport": "copy_engine", "bands": b}) for b in (1, 2, 4)},
    },
}
"""What is tried where nothing else is asked for; a fused kernel's parameters stand before the tuned ones."""


def measure(site: Site, variants: dict[str, tuple[str, dict[str, Any]]], repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    known: dict[int, torch.Tensor] = {}
    alone = worst(statistics.median(timed({"matmul": site.matmul}, repeats)["matmul"]))
    for name, (schedule, settings) in variants.items():
        settings = {**fused_plan.settings_for(site.pattern, "sm_push"), **settings} if schedule == "fused" else settings
        try:
            run, bands = site.provider(schedule, settings)
        except ValueError as error:
            rows.append({"provider": name, "left_out": str(error)})
            continue
        if bands not in known:
            known[bands] = site.expected(bands)
        site.forget()
        off = 0.0
        for _ in range(2):
            # Give credits: a call must not begin before the other GPU has read what the call before has sent.
            found = run()
            torch.cuda.synchronize()
            error = float((found.float() - known[bands]).abs().max() / known[bands].abs().max())
            # Python's maximum of a number and NaN is the number.
            off = max(off, error) if error == error else float("inf")
            dist.barrier()
        off = worst(off)
        site.faults.check()
        row = {"provider": name, "error": round(off, 5), "right": off <= TOLERANCE, "parameters": settings}
        if off <= TOLERANCE:
            times = timed({name: run}, repeats)[name]
            us = worst(statistics.median(times))
            row |= {"us": round(us, 1), "over_matmul": round(us / alone, 3)}
        rows.append(row)
    return [{"provider": "matmul", "us": round(alone, 1)}, *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, nargs="+", default=[8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--patterns", nargs="+", default=list(DEFAULTS))
    parser.add_argument(
        "--variants",
        type=json.loads,
        help="JSON: name to [schedule, parameters], instead of those that are tried otherwise",
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    if dist.get_world_size() != 2:
        raise SystemExit("bench.mirrored runs on 2 GPUs (torchrun --nproc-per-node 2)")
    largest, most = max(arguments.tokens), max(arguments.world_size)
    data = symmetric.allocate(3 * largest * HIDDEN * 2 + 2**24, torch.uint8, device, dist.group.WORLD)
    flags = symmetric.allocate(
        margin_words(most) + 2 * most * (1 + SIGNALS) * FLAG_WORDS, torch.int32, device, dist.group.WORLD
    )
    faults = FaultRecord.of(dist.group.WORLD.group_name, [0, *[1] * (most - 1)], device)
    environment = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    for world_size, pattern, tokens in itertools.product(arguments.world_size, arguments.patterns, arguments.tokens):
        site = Site(pattern, tokens, world_size, data, flags, faults)
        rows = measure(site, arguments.variants or DEFAULTS[pattern], arguments.repeats)
        del site
        if dist.get_rank() == 0:
            print(
                world_size,
                pattern,
                tokens,
                {r["provider"]: (r.get("us"), r.get("over_matmul"), r.get("left_out") or r.get("right")) for r in rows},
                flush=True,
            )
            if arguments.out:
                with open(arguments.out, "a") as file:
                    file.writelines(
                        json.dumps(
                            {"world_size": world_size, "pattern": pattern, "tokens": tokens, **row, **environment}
                        )
                        + "\n"
                        for row in rows
                    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
