# SPDX-License-Identifier: Apache-2.0
"""A rewritten graph assumes that some inputs are the same on all ranks. The ranks of a group compare these inputs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlap_inductor.runtime.same_inputs import difference
from overlap_inductor.runtime.same_inputs import digest
from tests.support.fake_group import fake_group
from tests.support.gloo_ranks import run_ranks

HERE = "run a graph that was rewritten to divide tokens among the ranks"


def _texts(rank: int, world_size: int) -> list[str]:
    group = dist.group.WORLD
    norm, other = torch.arange(6.0), torch.arange(6.0)
    found = [difference(group, {"primals_1": norm, "primals_2": other})]
    if rank == 2:
        other[3] += 1e-6
    found.append(difference(group, {"primals_1": norm, "primals_2": other}))
    found.append(difference(group, {"primals_1": norm}))
    found.append(difference(group, {f"primals_{i}": torch.full((2,), float(rank == 1)) for i in range(5)}))
    pair = dist.new_group([1, 2])
    if rank:
        found.append(difference(pair, {"primals_2": other}))
    return found


def test_all_ranks_get_one_text() -> None:
    """If an input differs on any rank, all ranks of the group get the same text. Each comparison uses a new key in the
    group's store."""
    first, second, third = run_ranks(3, _texts)
    assert first == second[:4] == third[:4]
    same, one, again, many = first
    assert same == again == ""
    assert HERE in one and "rank 2" in one and "its values of primals_2 are not those of the first rank" in one
    assert "rank 1" in many and "primals_0, primals_1, primals_2 and 2 more" in many
    assert second[4] == third[4] and "rank 2" in second[4]


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
    """FSDP2 frees a gathered parameter by resizing its storage."""
    x = torch.arange(6.0)
    digest(x)
    x.untyped_storage().resize_(0)
