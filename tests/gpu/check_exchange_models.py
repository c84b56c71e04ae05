# SPDX-License-Identifier: Apache-2.0
"""Checks unchanged models with all-to-alls, and Mixtral by its expert-parallel plan, on GPUs with several schedules.

    torchrun --nproc-per-node N -m tests.gpu.check_exchange_models [--schedules fused chunked ring auto]
        [--models ulysses dlrm mixtral]

- ``ulysses``: attention blocks as in diffusers, forward and backward, in bf16, with norms and rotary embeddings.
- ``dlrm``: losses and gradients of three training steps, in fp32.
- ``mixtral``: logits, in bf16.

Results are compared with fp64 (``ulysses``, ``mixtral``) or eager mode (``dlrm``). Prints one JSON row for each model
and schedule, with the overlapped sites. A row with problems ends the script with status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import overlap_inductor
from bench.support.gpu_ranks import device
from bench.support.gpu_ranks import finish_rank
from bench.support.gpu_ranks import start_rank
from overlap_inductor.report import publish as reporting
from tests.support import hugging_face
from tests.support.dlrm import DLRM
from tests.support.dlrm import batch_of
from tests.support.ulysses import UlyssesAttention
from tests.support.ulysses import whole

SCHEDULES = ("fused", "chunked", "ring", "auto")
WITHOUT_SITES = {
    ("ulysses", "auto"),
    ("dlrm", "chunked"),
    ("mixtral", "chunked"),
    ("mixtral", "fused"),
    ("mixtral", "auto"),
}
"""Models of which no site need be overlapped. ``auto`` keeps sites this small, ``chunked`` looks up no tables, and the
sums of experts are overlapped by ``ring`` only."""
BLOCKS: tuple[dict[str, Any], ...] = ({}, {"norm": "heads", "rotary": "pairs"}, {"norm": "rows", "rotary": "halves"})
OWN_TOKENS, HIDDEN = 512, 1024
SLACK = 0.02
"""A difference relative to the largest element of the exact tensor. In bf16, a result may be this much farther from the
exact one than 1.5 times the uncompiled result's difference."""
MOVED_TOKENS = 0.02
"""The part of Mixtral's tokens that may be off. If two experts have nearly equal scores, bf16 may select either."""


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def _trained_block(
    block: UlyssesAttention, call: Callable[..., torch.Tensor], x: torch.Tensor, places: torch.Tensor, mine: slice
) -> dict[str, torch.Tensor]:
    """The rows of ``mine`` of the output and of the input's gradient, and the gradients of the parameters, summed over
    the ranks."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x, places)
    out.float().square().sum().backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {"output": out.detach()[:, mine], "input": x.grad[:, mine], **gradients}


def ulysses(rank: int, world_size: int, folder: str) -> list[str]:
    """Returns the problems."""
    problems = []
    for number, options in enumerate(BLOCKS):
        torch._dynamo.reset()
        torch.manual_seed(number)
        block = UlyssesAttention(HIDDEN, 2 * world_size, dist.group.WORLD, **options).to(device(), torch.bfloat16)
        exact = UlyssesAttention(HIDDEN, 2 * world_size, dist.group.WORLD, **options).to(device(), torch.float64)
        exact.load_state_dict(block.state_dict())
        tokens = torch.randn(2, OWN_TOKENS * world_size, HIDDEN, device=device(), dtype=torch.bfloat16)
        places = torch.arange(tokens.shape[1], device=device())
        mine, every = slice(rank * OWN_TOKENS, (rank + 1) * OWN_TOKENS), slice(None)
        wanted = _trained_block(
            exact, lambda x, places, exact=exact: whole(exact, x, places), tokens.double(), places, mine
        )
        errors = {}
        for how, call in (("uncompiled", block), ("compiled", torch.compile(block, fullgraph=True))):
            found = _trained_block(block, call, tokens[:, mine], places[mine], every)
            for name, _ in block.named_parameters():
                # Each rank's gradient is a sum over its own tokens.
                dist.all_reduce(found[name])
            errors[how] = {name: _off(found[name], value) for name, value in wanted.items()}
        for name, off in errors["compiled"].items():
            if not off <= 1.5 * errors["uncompiled"][name] + SLACK:
                problems.append(f"{options}: {name} off by {off:.3g}, uncompiled by {errors['uncompiled'][name]:.3g}")
    return problems


def _trained_tables(model: DLRM, call: Any, batches: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    """The loss and the parameters' gradients of each of a few steps."""
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.01), []
    for batch in batches:
        optimizer.zero_grad()
        loss = call(*batch).square().mean()
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return results


def dlrm(rank: int, world_size: int, folder: str) -> list[str]:
    """Returns the problems."""
    problems = []
    for kind, joined in (("sum", "cat"), ("mean", "tables first"), ("embedding", "stack")):
        torch._dynamo.reset()
        results = []
        for compiled in (False, True):
            torch.manual_seed(rank)
            model = DLRM(6, 5000, 64, 8, kind, joined).to(device())
            for table in model.tables:
                torch.nn.init.normal_(table.weight, std=0.1)
            generator = torch.Generator().manual_seed(rank)
            batches = [
                tree_map(
                    lambda t: t.to(device()) if isinstance(t, torch.Tensor) else t,
                    batch_of(model, 128, 9, generator).arguments(),
                )
                for _ in range(3)
            ]
            call = torch.compile(model, fullgraph=True) if compiled else model
            results.append(_trained_tables(model, call, batches))
        for i, (eager, found) in enumerate(zip(*results, strict=True)):
            if not eager.isfinite().all():
                problems.append(f"{kind} {joined}, result {i}: not finite in eager mode")
            elif not torch.allclose(eager, found, rtol=1e-3, atol=1e-4 * float(eager.abs().max())):
                problems.append(f"{kind} {joined}, result {i}: differs by {(eager - found).abs().max():.3g}")
    return problems


def mixtral(rank: int, world_size: int, folder: str) -> list[str]:
    """Returns the problems."""
    torch._dynamo.reset()
    family = "mixtral, wide"
    model = hugging_face.load(family, folder, "cuda", experts=world_size).to(torch.bfloat16)
    exact = hugging_face.whole(family, folder, "cuda", experts_implementation="eager")
    ids = torch.randint(0, hugging_face.VOCABULARY, (2, 512), generator=torch.Generator().manual_seed(1)).cuda()
    with torch.no_grad():
        wanted = exact(ids).logits
        off = {}
        for how, call in (("uncompiled", model), ("compiled", torch.compile(model, fullgraph=True))):
            differences = (call(ids).logits.double() - wanted).abs().amax(-1) / wanted.abs().max()
            off[how] = float((differences > 2 * SLACK).double().mean())
    allowed = off["uncompiled"] + MOVED_TOKENS
    return [f"{off['compiled']:.3g} of the tokens are off, uncompiled {off['uncompiled']:.3g}"] * (
        not off["compiled"] <= allowed
    )


MODELS: dict[str, Callable[[int, int, str], list[str]]] = {"ulysses": ulysses, "dlrm": dlrm, "mixtral": mixtral}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.gpu.check_exchange_models", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    rank, world_size = start_rank()
    folder, failed = [tempfile.mkdtemp()], 0
    dist.broadcast_object_list(folder)
    for name in options.models:
        for schedule in options.schedules:
            begin = time.monotonic()
            reporting.forget_reports()
            with overlap_inductor.overlap(schedule=schedule, sequence_parallel="off"):
                problems = MODELS[name](rank, world_size, str(folder[0]))
            reports = reporting.all_reports()
            problems += [notice[:600] for report in reports for notice in report.notices]
            sites = Counter(
                f"{s.facts.pattern} {s.decision.moving.schedule}"
                for report in reports
                for s in report.sites
                if s.decision.status == "overlapped"
            )
            if (name, schedule) not in WITHOUT_SITES and not sites:
                problems.append("no site is overlapped")
            failed += bool(problems)
            if rank == 0 or problems:
                row = {"model": name, "schedule": schedule, "rank": rank, "world_size": world_size}
                seconds = round(time.monotonic() - begin, 1)
                print(json.dumps({**row, "overlapped": dict(sites), "problems": problems, "s": seconds}), flush=True)
    finish_rank()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
