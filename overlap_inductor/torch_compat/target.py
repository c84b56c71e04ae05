# SPDX-License-Identifier: Apache-2.0
"""The machine for which plans are made: the machine of this process, or the one that ``planning_for`` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from overlap_inductor.facts.machine import Box

_target: Box | None = None


@contextmanager
def planning_for(box: Box | None) -> Iterator[None]:
    """In this context, plan graphs as if their ranks ran on the GPUs of ``box``, whatever their tensors' device. Such a
    plan cannot be run here. ``None``: plan for this machine."""
    global _target
    outer, _target = _target, box
    try:
        yield
    finally:
        _target = outer


def target() -> Box | None:
    """The machine for which plans are made; ``None`` if it is this machine."""
    return _target


def on_gpu(device: torch.device) -> bool:
    """Whether plans treat a tensor on ``device`` as a GPU tensor. Always true while plans are made for another
    machine."""
    return device.type == "cuda" or target() is not None
