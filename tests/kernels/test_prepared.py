# SPDX-License-Identifier: Apache-2.0
"""``PreparedKernel`` gets the names of a launch's tensors in some order, and then takes the tensors in this order. It
must pass each tensor to the parameter with the tensor's name."""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from overlap_inductor.torch_compat.triton_launch import PreparedKernel


@triton.jit
def _scaled_difference(x, factor, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, (tl.load(x + at) - tl.load(y + at)) * factor)


def test_a_launch_takes_tensors_in_the_order_of_the_names() -> None:
    x, y = torch.full((16,), 7.0), torch.full((16,), 2.0)
    for names in itertools.permutations(("x", "y", "out")):
        out = torch.zeros(16)
        tensors = {"x": x, "y": y, "out": out}
        example = {name: torch.zeros(16) for name in names}
        kernel = PreparedKernel(_scaled_difference, 1, example, {"BLOCK": 16, "factor": 3})
        kernel(*(tensors[name] for name in names))
        assert (out == 15).all(), names
