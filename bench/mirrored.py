# SPDX-License-Identifier: Apache-2.0
"""Plays one rank of a larger group on 2 GPUs, to check and time parameters for 4 and 8 GPUs.

    torchrun --nproc-per-node 2 -m bench.mirrored --world-size 8 --tokens 1024 4096 [--out rows.jsonl] \\
        [--variants '{"name": ["fused", {"parts": 2}]}']

Each GPU plays rank 0 of ``--world-size`` ranks, and the other GPU plays all of its peers. A GPU multiplies, sends and
receives exactly what it would in the larger group.

**Where rows are written.** A GPU sends as rank 0 to peer ``p``, which comes ``p`` ranks after the sender. The other GPU
counts itself as rank 0, so the sender must count as rank ``world_size - p``. The rows go to that rank's place in the
other GPU's workspace.

**What is missing.** All peers are one GPU. So no peer is later than another, and no two GPUs send to one receiver at
once. NCCL's collective is not run. So there is no row for ``keep``, and times are compared with the matmul alone.

**How good the times are.** Times with ``--world-size 8`` were compared with times on 8 GPUs::

    gathers and scatters, from 2048 tokens on    at most 5 % apart
    all-reduces of fused                         6 to 13 % longer on 8 GPUs
    all-reduces of chunked in bands              25 to 37 % longer on 8 GPUs
        4096 tokens in 2 bands                   720 us on 8 GPUs, 574 us here
        4096 tokens in 4 bands                   914 us on 8 GPUs, 692 us here

On 8 GPUs, several ranks send to one receiver at once (``transports.copy_engine``). So this program cannot compare
numbers of bands, or ``chunked`` in bands with ``fused``.

Before a variant is timed, its result on random data is compared with fp32. Credits of peers are preset, so no
call waits for a credit. Instead, a barrier or an all-reduce before each call ensures that the previous call's data has
been read.
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
from overlap_inductor.lowerings.chunked import gather_launch
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked import reduce_launch
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
"""Largest error of a right result, relative to the largest element."""
GIVEN = WINDOW // 2
"""A preset credit. It allows more calls than a run makes."""


def margin_words(world_size: int) -> int:
    """The number of int32 words to leave free before a site's flags. It is the argument ``margin`` of ``mirrored``."""
    return world_size * SIGNALS * FLAG_WORDS


@dataclass(frozen=True)
class MirroredBuffer:
    """The buffers of ``world_size`` ranks, made from those of two GPUs (``mirrored``).

    Attributes:
        local: this GPU's memory.
        peers: entry 0 is ``local``; entry ``p`` is the part of the other GPU's memory that stands for peer ``p``.
        pointers: int64 ``[world_size]``, the addresses that kernels use for ``peers``.
    """

    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    pointers: torch.Tensor


def mirrored(
    buffer: symmetric.SymmetricBuffer, world_size: int, shift: int, margin: int = 0, turned: bool = False
) -> MirroredBuffer:
    """Make ``buffer``, which two GPUs share, look to rank 0 like the buffers of ``world_size`` ranks.

    Rank 0 writes to peer ``p`` as source 0. The write reaches the place of source ``world_size - p`` in the other GPU's
    memory. So a GPU receives from its peers in the order of the larger group.

    Args:
        shift: elements from the place of one source to that of the next.
        margin: elements to leave free at the beginning of the buffer.
        turned: whether the buffer holds the flags of a gather by copy engines with turns.

    Copies write turned flags through ``peers``. Before a copy to receiver ``p``, a kernel reads the flag of source
    ``world_size - 1`` through ``pointers``. Counted from ``peers[p]``, this flag would lie behind the other GPU's last
    flag. So the addresses in ``pointers`` are lower by ``world_size * shift`` elements, and the kernel reads the flag
    of source ``world_size - 1 - p``. This GPU's copy to receiver ``p + 1`` has set that flag one turn earlier. Credits
    written through ``pointers`` fall into the margin.

    Raises:
        ValueError: ``turned`` is set, and the margin is smaller than ``world_size * shift`` elements.
    """
    local, other = buffer.local[margin:], buffer.peers[1 - dist.get_rank()][margin:]
    back = world_size * shift * other.element_size() if turned else 0
    if back > margin * other.element_size():
        raise ValueError(
            f"turned flags need a margin of {world_size} * {shift} elements (ranks * shift), but the margin has only"
            f" {margin} elements; allocate the buffer with margin_words"
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
        """The right result in fp32, computed from both GPUs' operands. Both ranks call this together. ``bands``: number
        of bands of rows; every rank owns rows of each band."""
        mine = self.a.float() if self.pattern == "all_gather_matmul" else self.a.float() @ self.b.float()
        both = torch.empty(2, *mine.shape, device="cuda")
        dist.all_gather_into_tensor(both, mine)
        other = both[1 - dist.get_rank()]
        if self.pattern == "all_gather_matmul":
            return torch.cat([mine, *([other] * (self.world_size - 1))]) @ self.b.float()
        # A band is a part of each rank's shard, or the whole shard if there is one band.
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
        """Returns ``(run, bands)``: ``run`` calls the schedule with these parameters, and ``bands`` is the
        number of a call's bands.

        Both ranks make and use providers in the same order, one at a time. Raises ``ValueError`` if a parameter is out
        of range, or if bands are not of one size.
        """
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
                f"the {len(bands)} bands of a shard of {self.rows} rows differ in size; expected equal bands, so that"
                " the places of all sources are equally far apart"
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
                return gather_launch.all_gather_matmul(self.a, [VendorMatmul(self.b)], launch, parameters)[0]
            return getattr(reduce_launch, pattern)(self.a, VendorMatmul(self.b), launch, parameters)

        return run, len(bands)

    def forget(self) -> None:
        """Reset the flags to their state before the first call, with all credits given."""
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
"""The variants that run without ``--variants``: by pattern and name, ``(schedule, parameters)``. Parameters of
``fused`` override the tuned ones."""


def measure(site: Site, variants: dict[str, tuple[str, dict[str, Any]]], repeats: int) -> list[dict[str, Any]]:
    """Check and time each variant. Returns a row for the matmul alone, then a row for each variant.

    ``us`` is the median of ``repeats`` samples on the slower GPU. It is missing if the result was wrong or the variant
    cannot run (``left_out`` says why).
    """
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
            # The barrier after each call replaces credits: a call must not begin before the other GPU has read the
            # previous call's data.
            found = run()
            torch.cuda.synchronize()
            error = float((found.float() - known[bands]).abs().max() / known[bands].abs().max())
            # ``max`` of a number and NaN may return the number, so a NaN is tested for first.
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
        help='JSON, {"name": ["schedule", {parameters}]}: the variants to run in place of the default ones',
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    if dist.get_world_size() != 2:
        raise SystemExit("bench.mirrored needs 2 ranks; start it with torchrun --nproc-per-node 2 -m bench.mirrored")
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
