# SPDX-License-Identifier: Apache-2.0
"""Makes compiles in a test process faster: leaves out work that serves only logs or later compiles."""

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
"""For Inductor:

- no pool of processes that compile Triton kernels, each of which imports torch once more;
- C++ kernels without vector instructions, which take a quarter less time to build;
- no probe of the C++ compiler for vector instructions, which takes a second or more in each process.

For Dynamo: no garbage collection after each compile.
"""


def set_environment() -> None:
    """Set the variables of ``ENVIRONMENT`` that are not set yet, for this process and its children. Call this before
    torch is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def compile_cheaply() -> None:
    """Leave out or reduce work in this process and its forks:

    - no measurement of a graph's guards, for which Dynamo writes 256 MB to empty the processor's caches;
    - no parse of each file of traced functions, which serves only a log;
    - garbage collections do not visit the objects of torch's import. They are also rarer, because few objects of a
      compile are in cycles;
    - the C++ compiler optimizes kernels less, which halves the time to build one.
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
