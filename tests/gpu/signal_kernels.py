# SPDX-License-Identifier: Apache-2.0
"""Two small kernels: one waits for a flag, and one sets a flag."""

from __future__ import annotations

import triton

from overlap_inductor.kernels.signals import set_flag
from overlap_inductor.kernels.signals import wait_at_least


@triton.jit
def wait_for(flag, value, stop, patience):
    wait_at_least(flag, value, stop, patience, 3, 0)


@triton.jit
def give(flag, value):
    set_flag(flag, value)
