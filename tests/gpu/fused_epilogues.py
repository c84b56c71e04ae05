# SPDX-License-Identifier: Apache-2.0
"""The part of ``check_fused`` for epilogues and for several weights in one launch: results, times and kernels."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

import overlap_inductor
from bench.timing import timed
from overlap_inductor.lowerings.fused import parameters as fused_plan
from overlap_inductor.lowerings.fused import tails
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter

Compile = Callable[..., Callable[..., Any]]
Function = Callable[..., torch.Tensor]


def half(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def _sites(
    w: int, tokens: int, hidden: int, wide: int
) -> dict[str, tuple[Function, Function, list[torch.Tensor], str]]:
    """``{name: (function with a collective, the function on one GPU, inputs, name of the kernel)}``."""
    g, rows = dist.group.WORLD, tokens // w
    x, y = half(rows, hidden), half(tokens, wide)
    up, down, bias = half(hidden, wide, scale=hidden**-0.5), half(wide, hidden, scale=wide**-0.5), half(wide)
    row, own, whole = half(hidden), half(rows, hidden), half(tokens, hidden)
    acts = {"silu": F.silu, "sigmoid": torch.sigmoid, "squared relu": lambda t: torch.relu(t) ** 2}
    found: dict[str, tuple[Function, Function, list[torch.Tensor], str]] = {}
    for name, act in acts.items():
        found[f"gather, bias, {name}"] = (
            lambda x, a, b, act=act: act(torch.addmm(b, all_gather(x, 0, g), a)),
            lambda x, a, b, act=act: act(torch.addmm(b, x, a)),
            [x, up, bias],
            "all_gather_matmul",
        )
    found["scatter, scaled, residual"] = (
        lambda y, a, r, s: r + reduce_scatter(y @ a, "sum", 0, g) * s,
        lambda y, a, r, s: r + (y @ a) * s,
        [y, down, own, row],
        "matmul_reduce_scatter",
    )
    found["all-reduce, residual"] = (
        lambda y, a, r: r + funcol.all_reduce(y @ a, "sum", g),
        lambda y, a, r: r + y @ a,
        [y, down, whole],
        "matmul_all_reduce",
    )
    return found


def epilogues(compiled_as: Compile, rank: int, world_size: int) -> list[str]:
    """Run all sites, in sizes that are not multiples of a tile. Returns the problems: a result that differs from fp64,
    no planned epilogue, not exactly one fused kernel, or a Triton kernel of Inductor."""
    problems = []
    for name, (function, _, inputs, kernel) in _sites(world_size, 120 * world_size, 520, 1000).items():
        torch._dynamo.reset()
        compiled = compiled_as("fused", function)
        exact = function(*(i.double() for i in inputs))
        for call in range(3):
            off = (compiled(*inputs).double() - exact).abs().max() / exact.abs().max()
            if not off < 2e-2:
                problems.append(f"{name} call {call}: off by {off:.3g}")
        report = overlap_inductor.last_report()
        if report is None or not all(
            any(p.parameters.get("epilogue", [])) for s in report.sites for p in s.decision.plan
        ):
            problems.append(f"{name}: no epilogue was planned")
        names = kernels(functools.partial(compiled, *inputs))
        if len([n for n in names if kernel in n]) != 1 or any(n.startswith("triton_") for n in names):
            problems.append(f"{name}: kernels {names}")
    return problems


def kernels(call: Callable[[], Any]) -> list[str]:
    """Names of the kernels of one call, without fills of memory and this package's profiler ranges."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        call()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [n for n in names if "FillFunctor" not in n and not n.startswith(("Memset", "overlap_inductor"))]


def kernel_counts(compiled_as: Compile, rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """The names of the kernels that a fused site runs. Rank 0 also returns the kernels of max-autotune's Triton
    templates for the same matmul and pointwise ops."""
    found = {}
    for name, (function, plain, inputs, _) in _sites(world_size, 1024, 1024, 1024).items():
        if name not in ("gather, bias, silu", "scatter, scaled, residual"):
            continue
        torch._dynamo.reset()
        compiled = compiled_as("fused", function)
        found[name] = {"fused": kernels(functools.partial(compiled, *inputs))}
        if rank == 0:
            alone = [half(1024, 1024) if t.dim() == 2 else t for t in inputs]
            with (
                overlap_inductor.overlap(mode="off"),
                torch._inductor.config.patch(max_autotune_gemm_backends="TRITON", autotune_in_subproc=False),
            ):
                template = torch.compile(plain, mode="max-autotune-no-cudagraphs")
                found[name]["max_autotune"] = kernels(functools.partial(template, *alone))
            assert len(found[name]["fused"]) <= len(found[name]["max_autotune"]), (
                f"{name}: more kernels than max-autotune's: {found[name]}"
            )
        dist.barrier()
    return found


def epilogue_times(compiled_as: Compile, world_size: int) -> dict[str, dict[str, float]]:
    """Microseconds of sites with the sizes of llama3-70b's MLP. In ``fused``, the epilogue is part of the fused kernel.
    In ``behind``, a kernel of Inductor computes it after the fused kernel."""
    found = {}
    for tokens in (2048, 8192):
        for name, (function, _, inputs, _) in _sites(world_size, tokens, 8192, 28672 // world_size).items():
            torch._dynamo.reset()
            calls = {"fused": compiled_as("fused", function)}
            calls["fused"](*inputs)
            find, tails.find_tail = tails.find_tail, lambda *arguments, **keywords: None
            try:
                # Both graphs are equal, so a cache would return the code of the first.
                with torch._inductor.config.patch(force_disable_caches=True):
                    calls["behind"] = compiled_as("fused", lambda *arguments, f=function: f(*arguments))
                    calls["behind"](*inputs)
            finally:
                tails.find_tail = find
            found[f"{name} {tokens}"] = medians({n: functools.partial(c, *inputs) for n, c in calls.items()})
    return found


def weight_times(compiled_as: Compile, world_size: int) -> dict[str, dict[str, float]]:
    """Microseconds of one launch for several weights, and of a launch for the widest weight plus vendor matmuls. The
    weights are llama3-70b's gate and up, and its q, k and v."""
    found, g = {}, dist.group.WORLD
    for tokens in (1024, 4096):
        for name, widths in {"gate and up": (28672, 28672), "q, k, v": (8192, 1024, 1024)}.items():
            torch._dynamo.reset()
            x, weights = half(tokens // world_size, 8192), [half(n // world_size, 8192, scale=0.01) for n in widths]

            def function(x: torch.Tensor, *rhs: torch.Tensor) -> list[torch.Tensor]:
                gathered = all_gather(x, 0, g)
                return [gathered @ b.t() for b in rhs]

            one_launch = functools.partial(compiled_as("fused", function), x, *weights)
            one, other = one_launch(), _widest_alone(one_launch)
            assert all(
                (a.float() - b.float()).abs().max() < 2e-2 * b.float().abs().max()
                for a, b in zip(one, other, strict=True)
            ), name
            found[f"{name} {tokens}"] = medians(
                {"one launch": one_launch, "widest, then vendor": functools.partial(_widest_alone, one_launch)}
            )
    return found


def _widest_alone(call: Callable[[], Any]) -> Any:
    """Run ``call`` so that the fused kernel multiplies the widest weight only, and vendor matmuls the others. Each call
    asks ``in_one_launch`` which weights share the launch."""
    together = fused_plan.in_one_launch
    fused_plan.in_one_launch = lambda rhs: [max(range(len(rhs)), key=lambda i: rhs[i].shape[1])]
    try:
        return call()
    finally:
        fused_plan.in_one_launch = together


def medians(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    return {name: round(statistics.median(samples), 1) for name, samples in timed(calls, 11).items()}
