# SPDX-License-Identifier: Apache-2.0
"""A rewritten graph assumes that some inputs are equal on all ranks. The ranks of a group compare
digests of these inputs."""

from __future__ import annotations

import torch

from overlap_inductor.runtime.same_inputs import difference
from overlap_inductor.runtime.same_inputs import digest
from tests.support.fake_group import fake_group


def test_a_fake_group_compares_nothing() -> None:
    with fake_group(2) as group:
        assert difference(group, {"primals_1": torch.ones(2)}) == ""


def test_a_digest_tells_values_shape_and_dtype() -> None:
    x = torch.arange(6.0)
    others = [x + 1, x.view(2, 3), x.double(), x[:5], torch.empty(0), x.to(torch.bfloat16), -x * 0]
    assert len({digest(t) for t in [x, *others]}) == len(others) + 1
    assert digest(x) == digest(x.clone()) == digest(torch.stack([x, x], 1)[:, 0]) == digest(x.requires_grad_())
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))
    narrow = x.detach().to(torch.float8_e4m3fn)
    assert digest(narrow) == digest(narrow.clone()) != digest(narrow.view(torch.uint8))


def test_the_storage_can_be_resized_afterwards() -> None:
    """FSDP2 frees a gathered parameter by resizing its storage, also after ``digest`` has read it."""
    x = torch.arange(6.0)
    digest(x)
    x.untyped_storage().resize_(0)
