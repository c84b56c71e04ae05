# SPDX-License-Identifier: Apache-2.0
"""The ops of ``wave_groups`` have the same arguments and results as those of ``fused``."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import overlap_inductor.lowerings.fused.ops
import overlap_inductor.lowerings.wave_groups.ops  # noqa: F401
from tests.support.fake_group import fake_group


@pytest.mark.parametrize(("pattern", "rows"), [("matmul_all_reduce", 48), ("matmul_reduce_scatter", 12)])
def test_schema_and_shapes(pattern: str, rows: int) -> None:
    ours, theirs = (
        getattr(torch.ops.overlap_inductor, f"{schedule}_{pattern}").default for schedule in ("wave_groups", "fused")
    )
    assert str(ours._schema).replace("wave_groups_", "fused_") == str(theirs._schema) and ours.tags == theirs.tags
    with fake_group(4) as group, FakeTensorMode():
        result, token = ours(
            torch.zeros(1),
            torch.zeros(48, 16).half(),
            torch.zeros(16, 24).half(),
            None,
            "{}",
            "sum",
            group.group_name,
            "site",
        )
        assert result.shape == (rows, 24) and result.dtype == torch.float16 and token.shape == (1,)
