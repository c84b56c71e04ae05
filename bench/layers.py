# SPDX-License-Identifier: Apache-2.0
"""Time whole layers under plain ``torch.compile`` and with overlap: forward, decode and training.

The models are an unchanged Hugging Face Llama, and MLP blocks of DTensor with and without ``SequenceParallel``.

    sudo .venv/bin/python -m bench.layers                    # gloo ranks on a slow link: 2, then 4
    torchrun --nproc-per-node 8 -m bench.layers --device cuda

Each variant of a program (``bench.layer_variants``), except ``no collectives``, is compared with the eager program in
fp32 on random data. The variants are then timed in rounds, and each round takes one sample of every variant. Times are
milliseconds of a step: median, 20th and 80th percentile, each the maximum over ranks.

Variant ``no collectives`` has local ops in place of collectives. It shows the time without transfers; its results are
wrong. Variants with overlap may be even faster, because the sequence-parallel rewrite divides token-wise work among the
ranks.

Rows are added to ``bench/results/layers_slow_link.jsonl`` (slow link) or ``bench/results/layers.jsonl`` (GPUs).
``python -m bench.report`` draws ``docs/assets/layers.png`` from the slow link's rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import cpu_rates
from bench import rows
from bench import tables
from bench.layer_programs import PHASES
from bench.layer_programs import Sizes
from bench.layers_worker import Settings
from bench.layers_worker import run
from overlap_inductor.cli import slow_link as link
from overlap_inductor.cli.local_ranks import RankError
from overlap_inductor.cli.local_ranks import rank_environment
from overlap_inductor.cli.local_ranks import run_ranks

ROOT = rows.RESULTS.parent.parent
# With the sizes for 2 ranks, the matmuls of 4 ranks would be small.
CPU = Sizes(layers=4, hidden=1024, ffn=2816, heads=16, kv_heads=16, vocabulary=1024, prompt=128)
CPU_FROM_3_RANKS = dataclasses.replace(CPU, hidden=2048, ffn=5632)
CUDA = Sizes(layers=4, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocabulary=32000)
CPU_CASES = [
    (phase, 1, 1024)
    for phase in (
        "forward",
        "training",
        "blocks_forward",
        "blocks_training",
        "reduced_forward",
        "reduced_training",
    )
]
CUDA_CASES = [
    *(("forward", 1, tokens) for tokens in (1024, 4096, 8192, 16384)),
    *(("decode", batch, 1) for batch in (1, 16)),
    ("training", 1, 4096),
    ("blocks_forward", 1, 8192),
    ("blocks_training", 1, 8192),
]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.layers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="numbers of CPU ranks (on GPUs, torchrun sets the number)"
    )
    parser.add_argument(
        "--megabits",
        type=int,
        nargs="+",
        help="link rate for each entry of --ranks; default: a layer's all-reduces take as long as its matmuls",
    )
    parser.add_argument(
        "--phases", nargs="+", choices=list(PHASES), help="default: all phases; on a CPU, all but decode"
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="token counts of the phases other than decode")
    parser.add_argument(
        "--dynamic",
        type=int,
        default=0,
        metavar="TOKENS",
        help="compile with dynamic=True, first with this number of tokens, so that one graph may serve all counts",
    )
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="on GPUs, run the steps of all programs as CUDA graphs"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="numbers of sequences of a decode step")
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int)
    parser.add_argument("--schedule", help="a schedule to time besides auto; default: ring on a CPU, none on GPUs")
    parser.add_argument(
        "--machine",
        default="",
        help="value of the switch 'machine'; default on a CPU: measured rates",
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="SWITCH=VALUE", help="other switches of overlap")
    parser.add_argument(
        "--variants", nargs="+", default=[], help="variants to run besides plain; default: all but 'plain again'"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long each program may be timed")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that each program may take")
    parser.add_argument("--trace", default="", help="folder for traces of where a step's time goes (bench.layer_trace)")
    parser.add_argument("--trace-steps", type=int, default=3, help="number of steps of a variant to profile")
    parser.add_argument("--out", type=Path, help="the file to which rows are added")
    options = parser.parse_args(arguments)
    default = CPU_CASES if options.device == "cpu" else CUDA_CASES
    if options.dynamic and "decode" in [phase for phase, *_ in cases_of(options, default)]:
        parser.error("--dynamic needs --phases without decode, which always has one new token")
    if options.repeats < 2:
        parser.error("--repeats must be at least 2, because rows hold percentiles")
    if not all("=" in word for word in options.set):
        parser.error("--set takes SWITCH=VALUE")
    if options.device == "cpu" and options.megabits and len(options.ranks) != len(options.megabits):
        parser.error("--ranks and --megabits need the same number of values")
    return options


def sizes_of(options: argparse.Namespace, ranks: int) -> Sizes:
    told = {f.name: getattr(options, f.name) for f in dataclasses.fields(Sizes)}
    usual = CUDA if options.device == "cuda" else CPU if ranks < 3 else CPU_FROM_3_RANKS
    return dataclasses.replace(usual, **{k: v for k, v in told.items() if v is not None})


def on_link(options: argparse.Namespace, number: int, flops: float, packing: float) -> tuple[int, Settings]:
    """``(rate of the link in Mbit/s, settings of each rank)`` for entry ``number`` of ``--ranks``. ``flops``,
    ``packing``: the rates of a rank's matmuls and of their repeated reads (``Machine``)."""
    ranks = options.ranks[number]
    sizes = sizes_of(options, ranks)
    megabits = options.megabits[number] if options.megabits else equal_megabits(sizes, ranks, flops)
    machine = json.dumps({"link_bytes": megabits * 1e6 / 8, "matmul_flops": {"4": flops}, "packing_bytes": packing})
    return megabits, settings_of(options, sizes, f"{megabits} Mbit/s", machine)


def settings_of(options: argparse.Namespace, sizes: Sizes, link: str, machine: str) -> Settings:
    """The settings of each rank. ``machine``: see ``Settings``; option ``--machine`` overrides it."""
    cpu = options.device == "cpu"
    return Settings(
        device=options.device,
        sizes=sizes,
        cases=tuple(cases_of(options, CPU_CASES if cpu else CUDA_CASES)),
        schedule=options.schedule or ("ring" if cpu else "auto"),
        machine=options.machine or machine,
        switches=dict(word.split("=", 1) for word in options.set),
        only=tuple(options.variants),
        link=link,
        repeats=options.repeats,
        seconds=options.seconds,
        dynamic=options.dynamic,
        cuda_graphs=options.cuda_graphs,
        trace=options.trace,
        trace_steps=options.trace_steps,
    )


def equal_megabits(sizes: Sizes, ranks: int, flops: float) -> int:
    """The rate of the link at which the two all-reduces of a decoder layer's forward take as long as its matmuls. The
    rate does not depend on the number of tokens. Returns Mbit/s, a multiple of 50."""
    heads = (2 + 2 * sizes.kv_heads / sizes.heads) * sizes.hidden**2
    multiplied = 2 * (heads + 3 * sizes.hidden * sizes.ffn) / ranks
    sent = 2 * 2 * (ranks - 1) / ranks * sizes.hidden * 4
    return max(round(sent * 8 * flops / multiplied / 50e6), 1) * 50


def cases_of(options: argparse.Namespace, default: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """``(phase, sequences, tokens)`` of each program that the options request."""
    found = []
    for phase in options.phases or dict.fromkeys(phase for phase, _, _ in default):
        usual = [case for case in default if case[0] == phase] or [(phase, 1, 1 if phase == "decode" else 1024)]
        asked = options.batches if phase == "decode" else options.tokens
        if asked:
            usual = [(phase, count, 1) if phase == "decode" else (phase, 1, count) for count in asked]
        found += usual
    return found


def on_slow_link(options: argparse.Namespace) -> None:
    if (reason := link.why_not()) is not None:
        raise SystemExit(reason)
    out, cores = options.out or rows.RESULTS / "layers_slow_link.jsonl", len(os.sched_getaffinity(0))
    for number, ranks in enumerate(options.ranks):
        flops, packing = (cpu_rates.of_a_rank(measure, ranks, cores) for measure in cpu_rates.TOLD)
        megabits, settings = on_link(options, number, flops, packing)
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as name, link.slow_hosts(ranks, megabits) as hosts:
            folder, found = Path(name), []

            def keep(line: str, found: list[dict[str, Any]] = found) -> None:
                if line.startswith("{"):
                    found.append(json.loads(line))
                    rows.append(out, found[-1:])

            # Unless this process's environment names a cache, the ranks use a new one, so that compiling is measured.
            environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), **rank_environment("cpu")}
            environment["PYTHONPATH"] = str(ROOT)
            try:
                run_ranks(
                    ["-m", "bench.layers_worker", json.dumps(dataclasses.asdict(settings)), str(folder / "model")],
                    ranks,
                    folder,
                    environment=environment,
                    hosts=hosts,
                    timeout=options.timeout * len(settings.cases),
                    on_line=keep,
                    on_wait=lambda: None,
                )
            except RankError as error:
                raise SystemExit(str(error)) from None
        print(tables.layers(found), f"\n{ranks} ranks took {time.monotonic() - begin:.0f} s", flush=True)


def on_gpus(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from bench.support.gpu_ranks import finish_rank
    from bench.support.gpu_ranks import start_rank

    rank, _ = start_rank()
    out = options.out or rows.RESULTS / "layers.jsonl"
    settings = settings_of(options, sizes_of(options, dist.get_world_size()), "GPUs of one host", "")
    with tempfile.TemporaryDirectory() as name:
        names = [name]
        dist.broadcast_object_list(names)
        for row in run(settings, Path(names[0]), {}):
            if rank == 0:
                print(json.dumps(row), flush=True)
                rows.append(out, [row])
        dist.barrier()
    # NCCL destroys a communicator only when no CUDA graph holds one of its calls, so the graphs are dropped first.
    torch._dynamo.reset()
    torch.cuda.synchronize()
    finish_rank()


def main() -> None:
    options = parsed()
    # SIGTERM must raise ``SystemExit``, so that the ranks are stopped and the link is removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    on_gpus(options) if options.device == "cuda" else on_slow_link(options)


if __name__ == "__main__":
    main()
