# SPDX-License-Identifier: Apache-2.0
"""Read the settings by which PyTorch and the vendor's BLAS library choose a kernel for a matmul."""

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
    # A later torch may have removed some of these functions.
    if hasattr(torch._C, name)
)


def switches() -> tuple[object, ...]:
    """The current values of the settings that ``_GETTERS`` read, for example ``preferred_blas_library()``.

    A program may change these process-wide settings between two calls of an op. So a call is replayed as a CUDA graph
    only if the settings are those of the captured call (``runtime.replay``). The getters of ``_GETTERS`` are used,
    because torch's public functions are slower and this function runs at every call.
    """
    return tuple(getter() for getter in _GETTERS)
