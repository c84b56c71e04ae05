# SPDX-License-Identifier: Apache-2.0
"""Makes compiles in a test process faster: leaves out work that serves only logs or later compiles. No test needs this
work."""

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
"""For Inductor: no pool of processes that compile Triton kernels for a GPU. Each pool imports torch once more. C++
kernels use no vector instructions, so each takes a quarter less time to build. (The package reads and writes no C++, so
no test needs vector instructions.) Inductor does not ask which vector instructions the C++ compiler knows. Asking would
take a second in each process. With an empty cache folder, the process would also build a library for each kind of
vector instructions, which would take some seconds.
For Dynamo: no garbage collection after each compile.
"""


def set_environment() -> None:
    """Set the variables of ``ENVIRONMENT`` that are not set yet. Call this function before torch is imported. Child
    processes inherit the variables."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def compile_cheaply() -> None:
    """Leave out some work in this process and its forks. Dynamo would measure how long a graph's guards take. For that,
    it would write 256 MB to empty the processor's caches. Dynamo would parse each file of traced functions, to show in
    a log which function holds a line. A garbage collection would visit every object that torch's import made.
    Collections also become rarer, because a compile makes many objects, few of them in cycles.

    The C++ compiler optimizes kernels less, which halves the time to build a kernel."""
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
