# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from overlap_inductor.torch_compat.storages import ByStorage


def test_a_value_is_found_by_memory() -> None:
    x, y = torch.randn(4), torch.randn(4)
    found: ByStorage[str] = ByStorage()
    found.put([x, y], "both")
    assert found.get([x, y]) == found.get([x.detach(), y.view(2, 2)]) == "both"
    assert found.get([x]) is found.get([y, x]) is found.get([x, y[1:]]) is found.get([x, y.clone()]) is None
    x += 1
    assert found.get([x, y]) == "both"
    place = x.data_ptr()
    x.untyped_storage().resize_(0)
    others = [torch.randn(4) for _ in range(100)]
    x.untyped_storage().resize_(16)
    assert others and x.data_ptr() != place and found.get([x, y]) == "both"


def test_memory_that_is_used_again_is_not_taken_for_the_old_one() -> None:
    found: ByStorage[int] = ByStorage()
    places = set()
    for number in range(200):
        x = torch.randn(4)
        places.add(x.data_ptr())
        assert found.get([x]) is None
        found.put([x], number)
        assert found.get([x]) == number and len(found) <= 2
    assert len(places) < 200, "no address came twice, so this test showed nothing"
