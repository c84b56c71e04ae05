"""What a kernel that gave up waiting left behind, and how a waiting kernel is told to stop.

The record lies in the host's memory (pinned), so that it can be read while a kernel runs, without a stream. What a waiting kernel looks at lies in
the GPU's memory (``kernels.signals`` says why); the host sets it by a copy on a stream of its own, which passes running kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.kernels import layout
from overlap_inductor.torch_compat import symmetric

_WAITED_FOR = {
    layout.WAIT_CREDIT: "leave to write into the workspace of",
    layout.WAIT_PART: "rows from",
    layout.WAIT_PARTIALS: "partial sums from",
    layout.WAIT_RESULT: "finished rows from",
    layout.WAIT_TURN: "another receiver to get its rows from",
}


def stop_words(record: torch.Tensor) -> torch.Tensor:
    """The half of a fault record that goes to the device, for the host's half ``record``."""
    return torch.tensor([0, record.data_ptr()], dtype=torch.int64).view(torch.int32)


@dataclass
class FaultRecord:
    """The fault record of one group on this rank.

    Attributes:
        ranks: global ranks of the group, in its order.
        record: int32 ``[FAULT_WORDS]``, pinned where there are GPUs: whether a wait was given up, its code, peer, call wanted, call seen.
        stop: int32 ``[STOP_WORDS]`` on the device, what kernels are given: the abort word, and the address of ``record``.
        told: whether the program knows that results of the group are not valid: ``check`` has raised, or the program called ``abort``.
    """

    group_name: str
    ranks: Sequence[int]
    record: torch.Tensor
    stop: torch.Tensor
    sites: list[str] = field(default_factory=list)
    told: bool = False

    def __post_init__(self) -> None:
        # (Looked at before every call: an element of a tensor takes the host microseconds.)
        self._given_up = ctypes.c_int32.from_address(self.record.data_ptr())

    @classmethod
    def of(cls, group_name: str, ranks: Sequence[int], device: torch.device) -> FaultRecord:
        # (Written to outside inference mode, too.)
        with torch.inference_mode(False):
            record = torch.zeros(layout.FAULT_WORDS, dtype=torch.int32)
            if device.type != "cpu":
                record = record.pin_memory()
        return cls(group_name, ranks, record, symmetric.lasting(stop_words(record), device))

    def number(self, site: str) -> int:
        """The number under which kernels record ``site``."""
        if site not in self.sites:
            self.sites.append(site)
        return self.sites.index(site)

    def abort(self) -> None:
        """Every wait of the group on this rank returns at once from now on; what its kernels return is not valid."""
        self.told = True
        self.record[0] = 1
        if self.stop.is_cuda:
            # (Streams come from a pool of 32, in turn: of those of high priority none is likely to be the one that the kernel holds up.)
            with torch.cuda.stream(torch.cuda.Stream(self.stop.device, priority=-1)):
                self.stop[:1].copy_(self.record[:1], non_blocking=True)
        else:
            self.stop[0] = 1

    def error(self) -> str | None:
        """What has happened where a kernel of the group has given up, or the group was aborted. Any thread may ask; nothing of CUDA is called."""
        if not self._given_up.value:
            return None
        _, code, peer, wanted, seen, *_ = self.record.tolist()
        if not code:
            return f"group {self.group_name!r} was aborted; its workspace holds no valid data. Destroy the group, or end the process."
        site = f"site {self.sites[code // layout.WAIT_KINDS]} of group {self.group_name!r}"
        if code % layout.WAIT_KINDS == layout.WAIT_TILES:
            return (
                f"{site} waited in vain for tiles of its own matmul: {wanted} were wanted, {seen} had come. Something else held this rank's GPU for longer "
                "than the group's timeout. No result of this group is valid any more: destroy the group, or end the process."
            )
        what = _WAITED_FOR.get(code % layout.WAIT_KINDS, "a signal from")
        return (
            f"{site} waited in vain for {what} rank {self.ranks[peer]}: call {wanted} was wanted, "
            f"{seen} had come. That rank has died, has skipped the call, or is later than the group's timeout allows. "
            "No result of this group is valid any more: destroy the group, or end the process."
        )

    def check(self) -> None:
        """Raises ``TransferError`` where there is an ``error``."""
        error = self.error()
        if error is not None:
            self.told = True
            raise TransferError(error)
