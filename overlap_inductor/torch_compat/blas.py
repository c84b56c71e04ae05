"""What decides which kernel the vendor's library takes for a matmul, beside its operands."""

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
    # (Later versions may know fewer.)
    if hasattr(torch._C, name)
)


def switches() -> tuple[object, ...]:
    """The process-wide settings of ``torch.backends.cuda`` that a program may change between two calls. Read at every
    call, so past their slow public names."""
    return tuple(getter() for getter in _GETTERS)
