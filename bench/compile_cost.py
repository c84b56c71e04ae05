# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU time of a compile with the pass on, against plain ``torch.compile``, in one process.

    python -m bench.compile_cost [--layers 32] [--repeats 3] [--out bench/results/compile_cost.jsonl]
    python -m bench.compile_cost --layers 2 4 --settings plain told rewritten [--out ...]
    python -m bench.compile_cost --profile ring --repeats 1 [--phases training] [--sort tottime]

The model is a Hugging Face Llama of the sizes of ``bench.layers`` for 2 ranks, sharded by ``tp_plan="auto"`` over
torch's fake process group. Rank 0's graphs are compiled, and no compiled code runs. Programs: the forward without
gradients (``inference``), and forward and backward (``training``). Settings::

    plain      the package's hooks are not installed
    auto       the pass chooses the schedules; it keeps all sites, because the model is small for the shipped rates
    told       as auto, but the pass is told the rates at which a layer's all-reduces take as long as its matmuls
    ring       schedule ring is forced; the default budget limits how many sites are unrolled
    rewritten  as ring, with the sequence-parallel rewrite wherever it is legal
    looping    schedule ring is forced; every ring is one looping op

A compile goes from Dynamo to the generated code, with no cache and one thread. Settings take turns. The row of a
program in a setting is the repeat with the least CPU time. ``median_seconds`` and ``median_compiler_seconds`` are the
medians of all repeats::

    seconds             CPU time of this process
    compiler_seconds    CPU time of the C++ compiler that this process starts
    pass_seconds        the part of seconds in run_overlap_pass
    sequence_seconds    the part of seconds in run_sequence_parallel
    lowering_seconds    the part of seconds in the lowerings that instrument() names
    hook_seconds        the part of seconds in the package's wrappers of Inductor's functions, without these functions
    gc_seconds          the part of seconds in the garbage collector; the parts above leave it out
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import platform
import pstats
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import rows
from bench.layers import CPU
from bench.layers import equal_megabits
from overlap_inductor.cli.demo_models import load_llama
from overlap_inductor.config import OverlapConfig
from overlap_inductor.inductor import compile_graph as inductor
from overlap_inductor.inductor import hooks
from overlap_inductor.inductor import lowerings as lowering
from overlap_inductor.inductor import post_grad
from overlap_inductor.passes import overlap_pass
from overlap_inductor.passes import sequence_parallel
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.switch import backend
from overlap_inductor.switch import install

TOKENS, MATMUL_FLOPS = 1024, 1.3e11
RATES = {"link_bytes": equal_megabits(CPU, 2, MATMUL_FLOPS) * 1e6 / 8, "matmul_flops": {"4": MATMUL_FLOPS}}
SETTINGS: dict[str, OverlapConfig | None] = {
    "plain": None,
    "auto": OverlapConfig(),
    "told": OverlapConfig(machine=json.dumps(RATES)),
    "ring": OverlapConfig(schedule="ring"),
    "rewritten": OverlapConfig(schedule="ring", sequence_parallel="on"),
    "looping": OverlapConfig(schedule="ring", step_node_budget=1),
}
PHASES = ("inference", "training")


class Clock:
    """CPU seconds spent in named functions. The time of an inner named function counts only for the inner function."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._running: list[str] = []
        self._since = 0.0

    def _switch(self) -> None:
        now = time.process_time()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def enter(self, name: str) -> None:
        self._switch()
        self._running.append(name)

    def leave(self) -> None:
        self._switch()
        self._running.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return call


def instrument(clock: Clock) -> list[OverlapReport]:
    """Let ``clock`` measure the passes, the lowerings that are named below, the package's hooks, and the garbage
    collector. Returns a list to which each run of the pass appends its report."""
    reports: list[OverlapReport] = []
    run_pass, wrap = clock.timed("pass", overlap_pass.run_overlap_pass), hooks._wrap

    def noted(*args: Any, **kwargs: Any) -> OverlapReport:
        reports.append(run_pass(*args, **kwargs))
        return reports[-1]

    def timed_wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return clock.timed("hook", around)(clock.timed("inductor", original), *args, **kwargs)

        wrap(owner, name, call)

    def collecting(phase: str, info: object) -> None:
        clock.enter("gc") if phase == "start" else clock.leave()

    gc.callbacks.append(collecting)
    overlap_pass.run_overlap_pass = noted  # type: ignore[assignment]
    sequence_parallel.run_sequence_parallel = clock.timed("sequence", sequence_parallel.run_sequence_parallel)
    hooks._wrap = timed_wrap
    for name in ("_agree", "_take", "_narrow", "_packed", "_after", "_gather_step", "_assemble"):
        setattr(lowering, name, clock.timed("lowering", getattr(lowering, name)))
    return reports


def save_llama(folder: str, layers: int) -> None:
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=CPU.vocabulary, hidden_size=CPU.hidden, intermediate_size=CPU.ffn, num_hidden_layers=layers,
        num_attention_heads=CPU.heads, num_key_value_heads=CPU.kv_heads, max_position_embeddings=TOKENS,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


@contextmanager
def sharded_llama(layers: int, world_size: int) -> Iterator[Any]:
    """Yields the model with rank 0's shards of the weights. The default group is a fake one."""
    rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in rank.items()})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_llama(folder, layers)
            yield load_llama(Path(folder), torch.float32)
    finally:
        dist.destroy_process_group()


def compile_once(model: Any, config: OverlapConfig | None, trains: bool) -> None:
    """Compile the model's forward, and its backward if ``trains``. No compiled code runs."""
    from torch._inductor.compile_fx import compile_fx_inner

    def compile_one(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Any:
        nothing = post_grad.zeros_like_outputs(gm)
        compile_fx_inner(gm, example_inputs, **keywords)
        return nothing

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if config is None:
            patches = inductor.option_patches(None, {})
            return inductor.compile_graph(gm, example_inputs, patches, inner_compile=compile_one)
        return backend.compile_with(config, gm, example_inputs, None, {}, inner_compile=compile_one)

    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    if config is None:
        hooks.uninstall()
    else:
        install.install_hooks()
    torch.compiler.reset()
    with post_grad.every_graph_compiled_now(), torch.set_grad_enabled(trains):
        torch.compile(model, backend=compile_graph, fullgraph=True)(ids)


def measured(
    model: Any,
    setting: str,
    phase: str,
    clock: Clock,
    reports: list[OverlapReport],
    profile: cProfile.Profile | None = None,
) -> dict[str, Any]:
    reports.clear()
    gc.collect()
    clock.seconds.clear()
    with fresh_cache(), torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        before, compiler = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
        if profile is not None:
            profile.enable()
        compile_once(model, SETTINGS[setting], phase == "training")
        if profile is not None:
            profile.disable()
        seconds, after = time.process_time() - before, resource.getrusage(resource.RUSAGE_CHILDREN)
    decisions = [s.decision for r in reports for s in r.sites]
    moving = [d.moving for d in decisions if d.status == "overlapped"]
    return {
        "setting": setting,
        "phase": phase,
        "sites": dict(Counter(d.status for d in decisions)),
        "unrolled": sum(piece.parameters.get("unrolled") is True for piece in moving),
        "seconds": round(seconds, 2),
        "compiler_seconds": round(after.ru_utime + after.ru_stime - compiler.ru_utime - compiler.ru_stime, 2),
        **{f"{name}_seconds": round(clock.seconds[name], 3) for name in ("pass", "sequence", "lowering", "hook", "gc")},
    }


def row_of(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """The repeat with the least CPU time, with the medians of all."""
    best = min(repeats, key=lambda r: r["seconds"])
    names = ("seconds", "compiler_seconds")
    return best | {f"median_{name}": round(statistics.median(r[name] for r in repeats), 2) for name in names}


def with_ratios(found: dict[tuple[str, str], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, with ``ratio``: a row's CPU time divided by that of the plain compile of its phase. If no plain compile
    of a phase was measured, the phase's rows have no ``ratio``."""
    for (_, phase), row in found.items():
        plain = found.get(("plain", phase))
        yield row if plain is None else row | {"ratio": round(row["seconds"] / plain["seconds"], 3)}


def compiled_in_turn(
    model: Any,
    settings: Sequence[str],
    arguments: argparse.Namespace,
    clock: Clock,
    reports: list[OverlapReport],
    profile: cProfile.Profile | None,
) -> list[dict[str, Any]]:
    """The rows of one model, without the facts about where they were measured."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(arguments.repeats):
        for phase in arguments.phases:
            for setting in settings:
                row = measured(model, setting, phase, clock, reports, profile)
                print(json.dumps(row), file=sys.stderr, flush=True)
                found.setdefault((setting, phase), []).append(row)
    return list(with_ratios({key: row_of(repeats) for key, repeats in found.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[32])
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--phases", nargs="*", choices=PHASES, default=list(PHASES))
    parser.add_argument("--profile", choices=SETTINGS, help="print this setting's profile instead of rows")
    parser.add_argument("--sort", choices=("cumulative", "tottime"), default="cumulative")
    parser.add_argument("--save-profile", default=None, help="also write the profile to this file, for pstats")
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    clock = Clock()
    reports = instrument(clock)
    settings = [arguments.profile] if arguments.profile else arguments.settings
    with sharded_llama(2, arguments.world_size) as model:
        # These compiles are not counted. They do one-time work of the process, such as imports.
        for setting in settings:
            for phase in arguments.phases:
                measured(model, setting, phase, clock, reports)
    profile = cProfile.Profile() if arguments.profile else None
    for layers in arguments.layers:
        where = {
            **rows.environment(torch.device("cpu")), "python": platform.python_version(), "cpu": cpu_name(),
            "layers": layers, "hidden": CPU.hidden, "world_size": arguments.world_size, "tokens": TOKENS,
            "repeats": arguments.repeats, "step_node_budget": OverlapConfig().step_node_budget,
        }  # fmt: skip
        with sharded_llama(layers, arguments.world_size) as model:
            found = [row | where for row in compiled_in_turn(model, settings, arguments, clock, reports, profile)]
        if profile is None:
            for row in found:
                print(json.dumps(row))
            if arguments.out:
                rows.append(Path(arguments.out), found)
    if profile is not None:
        if arguments.save_profile:
            profile.dump_stats(arguments.save_profile)
        pstats.Stats(profile).sort_stats(arguments.sort).print_stats(80)


def cpu_name() -> str:
    """The processor's name in ``/proc/cpuinfo``, or else its architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
