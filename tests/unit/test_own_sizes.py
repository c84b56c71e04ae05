# SPDX-License-Identifier: Apache-2.0
"""Before a time is estimated, sizes that may differ between ranks are rounded. So each class of site nodes must name
all these sizes (``MatmulSizes.own``)."""

from __future__ import annotations

import pytest

from overlap_inductor.sites.nodes import MatmulSizes
from overlap_inductor.sites.reduce_nodes import ReduceNodes
from overlap_inductor.sites.uneven_nodes import UnevenSentNodes


@pytest.mark.parametrize("own", ["K", "NK"], ids=["the last matmul", "an earlier matmul"])
def test_rows_of_an_uneven_exchange_are_added_to_the_own_sizes(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReduceNodes, "matmul_sizes", lambda self: [MatmulSizes([], 4, 8, 16, own)])
    (sizes,) = object.__new__(UnevenSentNodes).matmul_sizes()
    assert set(sizes.own) == {"M", *own}
