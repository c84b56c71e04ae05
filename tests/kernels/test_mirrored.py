# SPDX-License-Identifier: Apache-2.0
"""Tests ``bench.mirrored`` in one process, with two buffers in place of two GPUs. Each GPU acts as one rank, and as all
peers of the other GPU's rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import mirrored
from overlap_inductor.kernels.layout import FLAG_WORDS
from overlap_inductor.kernels.layout import QUEUE_WORDS
from overlap_inductor.runtime.arena import Slot
from overlap_inductor.runtime.faults import FaultRecord
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.transports.copy_engine import CopyEngine
from overlap_inductor.transports.credits import announced
from overlap_inductor.transports.credits import end_kernel
from overlap_inductor.transports.transfer import Transfer
from overlap_inductor.transports.transport import Share

ROWS, WIDTH, PARTS = 4, 8, 2


class OneOfMany:
    """The first of two GPUs, as rank 0 of ``world_size`` ranks. The second GPU plays the other ranks."""

    def __init__(self, world_size: int, gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        self.world_size, self.gathers = world_size, gathers
        margin = mirrored.margin_words(world_size)
        self.flags = [
            torch.zeros(margin + 2 * world_size * (1 + mirrored.SIGNALS) * FLAG_WORDS, dtype=torch.int32)
            for _ in range(2)
        ]
        self.data = [torch.zeros(2 * world_size * ROWS * WIDTH * 2, dtype=torch.uint8) for _ in range(2)]
        self.margin, words = margin, torch.zeros(1 + QUEUE_WORDS + world_size * mirrored.SIGNALS, dtype=torch.int32)
        buffers: list[Any] = [SimpleNamespace(local=pair[0], peers=pair) for pair in (self.data, self.flags)]
        slot = Slot(
            self.data[0].numel(), mirrored.SIGNALS, mirrored.mirrored(buffers[0], world_size, ROWS * WIDTH * 2),
            mirrored.mirrored(buffers[1], world_size, mirrored.SIGNALS * FLAG_WORDS, margin, gathers),
            words[:1], words[1:], torch.zeros(1, dtype=torch.int32),
        )  # fmt: skip
        self.faults = FaultRecord.of("mirrored", range(world_size), torch.device("cpu"))
        self.launch = Launch(0, world_size, slot, self.faults, self.faults.number("site"), 10_000)

    def send(self) -> None:
        rows = ROWS if self.gathers else ROWS * self.world_size
        source = torch.arange(rows * WIDTH).reshape(rows, WIDTH).half()
        transfer = Transfer(ROWS, WIDTH, ROWS // PARTS, scattered=not self.gathers)
        announced(self.launch).fill_(1)
        CopyEngine().prepare(self.launch, transfer, range((self.world_size - 1) * PARTS), source, Share(0, 0))(source)

    def signalled(self) -> list[list[int]]:
        """The signals at the second GPU: for each rank that sends to it, one signal for each part. The second GPU, too,
        counts itself as rank 0, so ranks 1 to ``world_size - 1`` send to it."""
        flags = self.flags[1][self.margin :: FLAG_WORDS].tolist()
        first = [self.world_size + source * mirrored.SIGNALS for source in range(self.world_size)]
        return [flags[at : at + PARTS] for at in first[1:]]


@pytest.mark.parametrize("gathers", [True, False], ids=["gather", "scatter"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_flag_that_a_turn_waits_for_is_set(
    world_size: int, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlap_inductor.torch_compat.symmetric.hardware_queues", lambda: 8)
    one = OneOfMany(world_size, gathers, monkeypatch)
    one.send()
    assert one.faults.error() is None
    assert one.signalled() == [[1] * PARTS] * (world_size - 1), "the other GPU has not got every part"


@pytest.mark.parametrize("gathers", [True, False], ids=["gather", "scatter"])
def test_the_end_of_a_call_sets_no_flag_that_a_call_waits_for(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one = OneOfMany(4, gathers, monkeypatch)
    end_kernel(one.launch)()
    assert not any(map(any, one.signalled()))
    assert int(one.flags[1].count_nonzero()) == 3, "the credits were not written into the buffer"


def test_a_margin_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    pair = [torch.zeros(4096, dtype=torch.int32) for _ in range(2)]
    buffer: Any = SimpleNamespace(local=pair[0], peers=pair)
    with pytest.raises(ValueError, match=r"a margin of 4 \* 32 elements .* has only 16 elements"):
        mirrored.mirrored(buffer, 4, 32, 16, turned=True)
