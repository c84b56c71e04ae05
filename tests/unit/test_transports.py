# SPDX-License-Identifier: Apache-2.0
"""What transport ``p2p`` does before an exchange in which a rank may have no message."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overlap_inductor.errors import TransferError
from overlap_inductor.transports import exchange
from overlap_inductor.transports import p2p
from tests.support.fake_group import fake_group


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices of the all-reduces that were started."""
    seen: list[torch.device] = []
    monkeypatch.setattr(p2p.dist, "all_reduce", lambda tensor, group: seen.append(tensor.device))
    return seen


def _open_without_rows(device: str) -> None:
    buffer = torch.empty(0, device=device)
    exchange.open_uneven(buffer, [[0, 0], [0, 0]], "direct", dist.group.WORLD, "site")
    exchange.close_exchange(buffer, dist.group.WORLD, "site")


def test_all_ranks_make_the_communicator_before_the_first_uneven_exchange(joined: list[torch.device]) -> None:
    """NCCL waits for all ranks at a group's first operation. A rank without rows starts no message, so the other ranks
    would wait until they time out. So all ranks first join an all-reduce. (Device ``meta`` stands for a GPU.)"""
    for _ in range(2):
        with fake_group(2):
            _open_without_rows("meta")
            _open_without_rows("meta")
    assert [device.type for device in joined] == ["meta"] * 2  # once for each of two groups


def test_gloo_needs_no_communicator(joined: list[torch.device]) -> None:
    with fake_group(2):
        _open_without_rows("cpu")
    assert joined == []


def test_an_error_of_the_communicator_names_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        raise RuntimeError("timed out")

    monkeypatch.setattr(p2p.dist, "all_reduce", fails)
    with fake_group(2), pytest.raises(TransferError, match="site site: the ranks .* did not all join .*timed out"):
        _open_without_rows("meta")
