# SPDX-License-Identifier: Apache-2.0
"""Settings that decide which kernel the vendor's library takes for a matmul, besides its operands."""

from __future__ import annotations

import torch

_GETTERS = tuple(
    getattr(torch._C, name)
    for name in (
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_blas_preferred_backend",
        "_get_deterministic_algorithms",
        "_get_sm_carveout_experimental",
    )
    # A later torch may have fewer of them.
    if hasattr(torch._C, name)
)


def switches() -> tuple[object, ...]:
    """The process-wide settings of ``torch.backends.cuda`` that a program may change between two calls. They are read
    at every call, so not by their slow public names."""
    return tuple(getter() for getter in _GETTERS)
