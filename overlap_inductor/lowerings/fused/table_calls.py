# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused`` launches one kernel for lookups in tables and the all-to-all that follows, on the current stream.

Hundreds of addresses do not fit into a kernel's arguments. So the kernel reads them from ``facts``, a tensor on the
device (``kernels.layout.TABLE_FACTS``). If a call has new facts, it first copies them there from pinned memory. The
host never waits for the device.

CUDA graphs. A captured graph has its own ``facts`` in its pool, and its own pinned memory. The copy is a node of the
graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch

from overlap_inductor.errors import OverlapError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.kernels.embedding_all_to_all import embedding_all_to_all
from overlap_inductor.lowerings.fused.table_parameters import TableParameters
from overlap_inductor.lowerings.fused.table_parameters import needed
from overlap_inductor.lowerings.fused.table_parameters import power_of_two
from overlap_inductor.lowerings.fused.table_parameters import why_not
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.memory import rows_like
from overlap_inductor.torch_compat.triton_launch import PreparedKernel
from overlap_inductor.transports.call_arguments import call_arguments


@dataclass(frozen=True)
class Lookups:
    """The lookups of one call. A list of tensors has one tensor for each table, or is empty.

    Attributes:
        tables: ``[rows, width]``, contiguous and aligned to 16 bytes.
        indices: one dim, contiguous, int32 or int64.
        offsets: where each bag begins, in the dtype of ``indices``. Empty: each index is a bag.
        samples: weights of the indices, in the dtype of the tables.
        padding: the padding index of each table, or -1.
        bags: number of bags of each table, counted over the slices of all ranks.
        mean: bags are averaged, not summed.
        last_offset: each tensor in ``offsets`` has one more element than there are bags.
        rows_first: what one rank sends to another is ordered by bag, then by table. If False: by table, then by bag.
    """

    tables: Sequence[torch.Tensor]
    indices: Sequence[torch.Tensor]
    offsets: Sequence[torch.Tensor]
    samples: Sequence[torch.Tensor]
    padding: Sequence[int]
    bags: int
    mean: bool
    last_offset: bool
    rows_first: bool

    @property
    def width(self) -> int:
        return self.tables[0].shape[1]

    def check(self, launch: Launch) -> None:
        """Raises ``UnsupportedError`` if the kernel does not support a tensor. Also raises it if the call's slot, its
        part of the workspace (``runtime.arena``), is too small."""
        like, index = self.tables[0], self.indices[0]
        if (reason := why_not(like.dtype, launch.world_size, self.width)) is not None:
            raise UnsupportedError(reason)
        if self.bags % launch.world_size or not self.bags:
            raise UnsupportedError(f"{self.bags} bags cannot be cut into {launch.world_size} equal slices")
        expected = self.bags + self.last_offset if self.offsets else self.bags
        for table in self.tables:
            if table.dtype != like.dtype or table.shape[1] != self.width or not _plain(table):
                raise UnsupportedError(
                    f"a table is {table.dtype}{list(table.shape)} with strides {list(table.stride())}; expected"
                    f" {like.dtype} rows of {self.width}, contiguous and aligned to 16 bytes"
                )
        for name, tensor in (("offsets", self.offsets), ("indices", () if self.offsets else self.indices)):
            if wrong := [t.numel() for t in tensor if t.numel() != expected]:
                raise UnsupportedError(f"a table has {wrong[0]} {name}; expected {expected}")
        for tensor in (*self.indices, *self.offsets):
            if tensor.dtype != index.dtype or tensor.dtype not in (torch.int32, torch.int64):
                found = ", ".join(sorted({str(index.dtype), str(tensor.dtype)}))
                raise UnsupportedError(f"dtypes of indices and offsets: {found}; expected all int32 or all int64")
        for weights, indices in zip(self.samples, self.indices):
            if weights.dtype != like.dtype or weights.numel() != indices.numel():
                raise UnsupportedError(
                    f"{weights.numel()} weights of samples are {weights.dtype}; expected {indices.numel()} of"
                    f" {like.dtype}"
                )
        if not all(t.is_contiguous() for t in (*self.indices, *self.offsets, *self.samples)):
            raise UnsupportedError("indices, offsets or weights of samples are not contiguous")
        rows = self.bags // launch.world_size
        launch.check_room(*needed(launch.world_size, len(self.tables), rows, self.width, like.element_size()))


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


_CAPTURED: list[torch.Tensor] = []
"""The host memory from which captured graphs copy their facts. Never freed, because a graph may be replayed at any
time."""


@dataclass
class _Facts:
    """The facts of a site's tables on the device, for calls outside of captured graphs. ``values`` are in ``memory``,
    or on their way there."""

    memory: torch.Tensor
    values: list[int] = field(default_factory=list)


def look_up(
    lookups: Lookups,
    launch: Launch,
    p: TableParameters,
    saved: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> torch.Tensor:
    """The result of the all-to-all, flat: for this rank's slice of the batch, the results of all tables of all ranks.

    Args:
        saved: two tensors for each table, filled for the backward graph: the bag of each index, and each bag's number
            of indices that are not the padding index. A tensor without elements is not filled.

    Raises:
        UnsupportedError: the kernel does not support a tensor, or the slot is too small.
        TransferError: an earlier call of the group gave up waiting, or was aborted.
    """
    launch.faults.check()
    tables = lookups.tables
    out = rows_like(tables[0], lookups.bags, len(tables) * lookups.width, tables[0].dtype).view(-1)
    key = (
        "embedding_all_to_all", p, len(tables), lookups.width, lookups.bags, tables[0].dtype, lookups.indices[0].dtype,
        bool(lookups.offsets), bool(lookups.samples), lookups.mean, lookups.rows_first, bool(saved),
    )  # fmt: skip
    lookups.check(launch)
    kernel = launch.prepared.get(key)
    values = _values(lookups, saved)
    facts = _on_device(values, launch)
    if kernel is None:
        kernel = _prepare(lookups, out, facts, launch, p, bool(saved))
        launch.remember(key, kernel)
    kernel(out, facts, _as_index(facts, lookups))
    return out


def _values(lookups: Lookups, saved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    """The facts of all tables, flat, in the order of ``kernels.layout.TABLE_FACTS``."""
    found: list[int] = []
    for i, (table, indices) in enumerate(zip(lookups.tables, lookups.indices, strict=True)):
        offsets = lookups.offsets[i].data_ptr() if lookups.offsets else 0
        samples = lookups.samples[i].data_ptr() if lookups.samples else 0
        found += [table.data_ptr(), indices.data_ptr(), offsets, samples]
        found += [table.shape[0], indices.numel(), lookups.padding[i]]
        found += [t.data_ptr() for t in saved[i]] if saved else [0, 0]
    return found


def _on_device(values: list[int], launch: Launch) -> torch.Tensor:
    """``values`` as an int64 tensor on the device, for launches that follow on the current stream.

    Raises:
        OverlapError: memory would have to be allocated while a CUDA graph is captured.
    """
    device, capturing = launch.slot.calls.device, symmetric.capturing()
    key = "facts of tables", len(values)
    facts = launch.kept.get(key)
    if facts is None:
        if capturing:
            raise OverlapError(
                "a site that looks up tables runs for the first time while a CUDA graph is captured. Run the compiled"
                " function once before capturing it."
            )
        memory = symmetric.lasting(torch.zeros(len(values), dtype=torch.int64), device)
        facts = launch.kept[key] = _Facts(memory)
    if not capturing and facts.values == values:
        return facts.memory
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    if capturing:
        _CAPTURED.append(host)
        return host.to(device, non_blocking=True)
    # The previous call has read its facts when this copy runs, because a rank's calls run one after the other.
    facts.memory.copy_(host, non_blocking=True)
    # ``values`` is set after the copy. So if the copy raises, the next call copies again.
    facts.values = values
    return facts.memory


def _as_index(facts: torch.Tensor, lookups: Lookups) -> torch.Tensor:
    """A tensor of the dtype of the indices. The kernel uses only its dtype."""
    return facts.view(lookups.indices[0].dtype)


def _prepare(
    lookups: Lookups, out: torch.Tensor, facts: torch.Tensor, launch: Launch, p: TableParameters, saves: bool
) -> PreparedKernel:
    world_size, tables, width = launch.world_size, len(lookups.tables), lookups.width
    rows, itemsize = lookups.bags // world_size, out.element_size()
    bags = p.bags_at_once(width, itemsize)
    slot_bytes = out.nbytes // world_size
    fixed = {
        **call_arguments(embedding_all_to_all, launch),
        "staging": launch.slot.data.local[: out.nbytes].view(torch.int32),
        "tables": tables,
        "rows": rows,
        "piece_rows": p.piece_rows(rows, tables, world_size, bags),
        "row_stride": tables * width if lookups.rows_first else width,
        "table_stride": width if lookups.rows_first else rows * width,
        "slot_vectors": slot_bytes // 16,
        "WIDTH": width,
        "BAGS": bags,
        "SPAN": power_of_two(width),
        "UNROLL": p.unroll if lookups.offsets else 1,
        "BAGGED": bool(lookups.offsets),
        "MEAN": lookups.mean,
        "WEIGHTED": bool(lookups.samples),
        "SAVES": saves,
        "COPIES": p.copies or p.blocks,
        "BLOCK": p.copy_words,
    }
    varying = {"out": out, "facts": facts, "index": _as_index(facts, lookups)}
    # With ``debug``, Triton keeps the kernel's asserts. ``sanitize_overflow=False``: no asserts against integer
    # overflow.
    return PreparedKernel(
        embedding_all_to_all,
        p.blocks * p.blocks_an_sm,
        varying,
        fixed,
        num_warps=p.warps,
        debug=True,
        sanitize_overflow=False,
    )
