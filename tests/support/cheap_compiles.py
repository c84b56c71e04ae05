# SPDX-License-Identifier: Apache-2.0
"""Makes compiles in a test process faster: leaves out or reduces work that the tests do not need."""

from __future__ import annotations

import functools
import gc
import os
from typing import Any

ENVIRONMENT = {
    "TORCH_WARM_POOL": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "TORCH_DYNAMO_RUN_GC_AFTER_COMPILE": "0",
}
"""The variables save time as follows:

- Inductor starts no pool of processes that compile Triton kernels. Each such process would import torch once more.
- Inductor builds C++ kernels without vector instructions, in a quarter less time.
- Inductor does not probe the C++ compiler for vector instructions. A probe takes a second or more in each process.
- Dynamo does not collect garbage after each compile.
"""


def set_environment() -> None:
    """Set the variables of ``ENVIRONMENT`` that are not set yet, for this process and its children. Call this before
    torch is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def compile_cheaply() -> None:
    """Leave out or reduce work in this process and its forks:

    - Dynamo does not time a graph's guards. To time them, it would write 256 MB to empty the processor's caches.
    - Dynamo does not parse the files of traced functions. Only a log needs the result.
    - Garbage collections do not visit the objects of torch's import. Higher thresholds also
      make them rarer. This costs little memory, because few objects of a compile are in cycles.
    - The C++ compiler optimizes kernels less. This halves the time to build a kernel.
    """
    import torch._dynamo.guards
    import torch._dynamo.symbolic_convert
    import torch._inductor.cpp_builder

    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0
    torch._dynamo.symbolic_convert.get_funcname = lambda filename, line: None
    flags = torch._inductor.cpp_builder._get_optimization_cflags
    if flags.__module__ != __name__:

        @functools.wraps(flags, assigned=())
        def with_less(*args: Any, **keywords: Any) -> tuple[list[str], list[str]]:
            compiler, linker = flags(*args, **keywords)
            return ["O1" if flag == "O3" else flag for flag in compiler], linker

        torch._inductor.cpp_builder._get_optimization_cflags = with_less
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
