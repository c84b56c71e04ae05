# SPDX-License-Identifier: Apache-2.0
"""Switches Inductor's padding of matmuls to aligned sizes on or off. By default, Inductor pads only on GPUs, and only
if it has measured that padding is faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch._inductor.fx_passes import pad_mm


@contextmanager
def padded_matmuls(wanted: bool = True) -> Iterator[None]:
    patched = {name: mock.patch.object(pad_mm, name, lambda *args: wanted) for name in ("check_device", "has_triton")}
    with patched["check_device"], patched["has_triton"], torch._inductor.config.patch(force_shape_pad=wanted):
        yield
