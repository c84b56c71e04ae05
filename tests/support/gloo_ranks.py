# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several gloo ranks, one process each, and collects what they return or raise."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.free_ports import free_port

PRELOADED = [
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.post_grad",
    "torch.distributed.tensor",
    "torch.testing",
    "hypothesis",
    "tests.support.warm_ranks",
]
"""Modules that the fork server imports before it forks ranks, if they are installed."""
PRELOADED_MODELS = [
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.integrations.tensor_parallel",
    "accelerate",
]
"""If the process that starts ranks has imported ``transformers``, some ranks probably run models. The fork server then
imports these modules, too."""


def compile_anew(kernels: bool = True) -> None:
    """Switch off the caches of graphs, so that every compile runs the passes. (``force_disable_caches`` would also make
    each rank build its kernels again, and probe the C++ compiler again.)

    Without ``kernels``, generated code calls ATen for each op, so that no C++ kernel is built. This serves tests that
    do not depend on what Inductor fuses.
    """
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.fallback_by_default = not kernels


def preloaded() -> list[str]:
    return (PRELOADED_MODELS if "transformers" in sys.modules else []) + PRELOADED


def _main(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    environment: dict[str, str],
    call: tuple[Any, ...],
    grouped: bool,
    alive: bool,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank)
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # If a signal ends this rank, the stacks of its threads are written to this file.
    faulthandler.enable(open(os.path.join(folder, f"{rank}.stacks"), "w"))  # noqa: SIM115
    result: tuple[bool, Any]
    try:
        if grouped:
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
        function, *args = call
        result = True, function(rank, world_size, *args)
        if grouped and alive:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  (the parent reports it)
        result = False, traceback.format_exc()
    torch.save(result, os.path.join(folder, f"{rank}.pt"))


def _how_it_ended(rank: int, exit_code: int | None, folder: str) -> str:
    stacks = Path(folder, f"{rank}.stacks")
    written = stacks.read_text() if stacks.exists() else ""
    return f"exit code {exit_code}" + (f"\n{written}" if written else "")


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 300.0,
    expect_failure: bool = False,
    warm: bool = True,
    grouped: bool = True,
) -> list[Any]:
    """Run ``function(rank, world_size, *args)`` on every rank and return the results by rank.

    Args:
        expect_failure: ranks may raise or die. The result of such a rank is a traceback, or says that the rank left no
            result.
        warm: if ``False``, each rank is a new process, in which this package was never used.
        grouped: if ``False``, there is no process group at first, as in a script under ``torchrun``.

    Raises:
        AssertionError: a rank did not end in time. Ranks are waited for one after the other, up to ``timeout``
            seconds each. Without ``expect_failure`` also: a rank raised or died. The message holds the tracebacks.
    """
    # With ``warm``, ranks are forked from a fork server, which has done the imports. This saves each rank six seconds.
    # In a run of pytest, the fork server is a fork of the process that has collected the tests (``rank_server``).
    context = mp.get_context("forkserver" if warm else "spawn")
    if warm:
        context.set_forkserver_preload(preloaded())
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [
            context.Process(
                target=_main,
                args=(r, world_size, port, folder, dict(os.environ), (function, *args), grouped, not expect_failure),
            )
            for r in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        hung = [r for r, p in enumerate(processes) if p.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        results, died = [], list[str]()
        for rank, process in enumerate(processes):
            path = os.path.join(folder, f"{rank}.pt")
            nothing = False, f"rank {rank} left no result; {_how_it_ended(rank, process.exitcode, folder)}"
            results.append(torch.load(path, weights_only=False) if os.path.exists(path) else nothing)
            if results[-1][0] and process.exitcode:
                died.append(f"rank {rank} left a result; {_how_it_ended(rank, process.exitcode, folder)}")
    problems = [f"rank {r}: {text}" for r, (ok, text) in enumerate(results) if not ok] + died
    assert not hung, f"ranks {hung} did not end within {timeout} s\n" + "\n".join(problems)
    assert expect_failure or not problems, "\n".join(problems)
    return [value for _, value in results]
