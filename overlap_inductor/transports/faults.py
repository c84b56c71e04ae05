"""What a kernel that gave up waiting left behind, and how a waiting kernel is told to stop.

The record lies in memory that the host and all kernels of the group on this rank share (pinned), so that it can be read and set while a kernel
runs, without a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch

from overlap_inductor.errors import TransferError
from overlap_inductor.kernels import layout

_WAITED_FOR = {
    layout.WAIT_CREDIT: "leave to write into the workspace of",
    layout.WAIT_PART: "rows from",
    layout.WAIT_PARTIALS: "partial sums from",
    layout.WAIT_RESULT: "finished rows from",
}


@dataclass
class FaultRecord:
    """The fault record of one group on this rank.

    Attributes:
        words: int32 ``[FAULT_WORDS]``, pinned where there are GPUs: abort word, code of the wait, peer, call wanted, call seen.
        ranks: global ranks of the group, in its order.
    """

    group_name: str
    ranks: Sequence[int]
    words: torch.Tensor
    sites: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, group_name: str, ranks: Sequence[int]) -> FaultRecord:
        words = torch.zeros(layout.FAULT_WORDS, dtype=torch.int32)
        return cls(group_name, ranks, words.pin_memory() if torch.cuda.is_available() else words)

    def number(self, site: str) -> int:
        """The number under which kernels record ``site``."""
        if site not in self.sites:
            self.sites.append(site)
        return self.sites.index(site)

    def abort(self) -> None:
        """Every wait of the group on this rank returns at once from now on; what its kernels return is not valid."""
        self.words[0] = 1

    def check(self) -> None:
        """Raises ``TransferError`` where a kernel of the group has given up, or the group was aborted."""
        if not int(self.words[0]):
            return
        _, code, peer, wanted, seen, *_ = self.words.tolist()
        if not code:
            raise TransferError(f"group {self.group_name!r} was aborted; its workspace holds no valid data. Destroy the group, or end the process.")
        what = _WAITED_FOR.get(code % layout.WAIT_KINDS, "a signal from")
        raise TransferError(
            f"site {self.sites[code // layout.WAIT_KINDS]} of group {self.group_name!r} waited in vain for {what} rank {self.ranks[peer]}: call {wanted} was wanted, "
            f"{seen} had come. That rank has died, has skipped the call, or is later than the group's timeout allows. "
            "No result of this group is valid any more: destroy the group, or end the process."
        )
