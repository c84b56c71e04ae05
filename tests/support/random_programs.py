# SPDX-License-Identifier: Apache-2.0
"""Draws random programs of matmuls, collectives of one group, and ops between them. A program is the source text of a
function.

A step makes one tensor from earlier ones, or none if the drawn op does not fit. After a gather or a matmul, steps that
complete a site are drawn more often. All ranks draw the same program.
"""

from __future__ import annotations

import linecache
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter

Shape = tuple[int, ...]
ANYTHING = (
    "gather gather scatter scatter reduce mm mm mm sum turned pair add add times act scale row view transpose slice cat"
    " chunk norm softmax share batch total side".split()
)
BEHIND = {
    "all_gather": "mm mm sum turned pair norm share batch side".split(),
    "@": "scatter scatter reduce gather total share".split(),
}


@dataclass
class Program:
    """A random program. Most sizes are multiples of ``unit``. ``most_elements`` limits a tensor's elements. With
    ``trains``, the program has no all-reduces and no averages over ranks: eager PyTorch gives these no gradient."""

    seed: int
    world_size: int
    unit: int = 1
    trains: bool = False
    most_elements: int = 40_000
    lines: list[str] = field(default_factory=list)
    inputs: list[Shape] = field(default_factory=list)
    made: list[tuple[str, Shape]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """Names of results that the program returns and that no step may read."""
    anything: ClassVar[list[str]] = ANYTHING
    """Names of the steps to draw from by default."""
    behind: ClassVar[dict[str, list[str]]] = BEHIND
    """``{text: names of steps}``. After a line with the text, most steps are drawn from these names. If a line
    contains several of the texts, the first of them in this dictionary counts."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        rows = self.unit * self.chance.choice([1, 2, 3, 4, 6]) * self.chance.choice([1, self.world_size])
        for shape in ((rows, self._width()), (self.chance.choice([1, 2]), rows, self._width())):
            self.made.append((self._input(*shape), shape))
        steps = self.chance.randint(4, 14)
        for _ in range(20 * steps):
            if len(self.lines) < steps:
                self._step()
        text = "\n".join(self.lines)
        results = [
            name
            for name, _ in self.made[2:]
            if len(re.findall(rf"\b{name}\b", text)) == 1 or self.chance.random() < 0.1
        ]
        arguments = ", ".join(f"i{i}" for i in range(len(self.inputs)))
        self.text = f"def program({arguments}):\n{text}\n    return {', '.join(results + self.ends)},\n"

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The program as a function that uses this process's default group."""
        gathers, scatters = (
            (_trained("all_gather"), _trained("reduce_scatter")) if self.trains else (all_gather, reduce_scatter)
        )
        names: dict[str, Any] = {"torch": torch, "g": dist.group.WORLD}
        # Eager PyTorch does not reduce strided tensors correctly. So the collectives get contiguous tensors only.
        names["all_gather"] = lambda x, dim, group: _Contiguous.apply(gathers(x.contiguous(), dim, group))
        names["reduce_scatter"] = lambda x, op, dim, group: _Contiguous.apply(scatters(x.contiguous(), op, dim, group))
        names["all_reduce"] = lambda x, op, group: funcol.all_reduce(x.contiguous(), op, group)
        exchange = _trained("all_to_all") if self.trains else funcol.all_to_all_single
        names["all_to_all"] = lambda x, group: _Contiguous.apply(exchange(x.contiguous(), None, None, group))
        place = f"<program {self.seed}>"
        linecache.cache[place] = (len(self.text), None, self.text.splitlines(True), place)
        exec(compile(self.text, place, "exec"), names)
        return names["program"]  # type: ignore[return-value]

    def _width(self) -> int:
        return self.chance.choice([self.unit * self.world_size, 2 * self.unit, 3 * self.unit])

    def _columns(self) -> int:
        """Draw a weight's number of columns. It may be 1 if ``unit`` is 1."""
        return self.chance.choice(
            [self._width(), 2 * self.unit * self.world_size, 5 if self.unit == 1 else 2 * self.unit, self.unit]
        )

    def _input(self, *shape: int) -> str:
        self.inputs.append(shape)
        return f"i{len(self.inputs) - 1}"

    def _make(self, expression: str, *shape: int) -> None:
        if 0 < math.prod(shape) <= self.most_elements:
            name = f"t{len(self.lines)}"
            self.lines.append(f"    {name} = {expression}")
            self.made.append((name, shape))

    def _recent(self) -> tuple[str, Shape]:
        return self.made[-1 - min(len(self.made) - 1, int(self.chance.expovariate(0.6)))]

    def _step(self) -> None:
        (x, shape), kinds = self._recent(), self.anything
        if self.lines and self.chance.random() < 0.65:
            after = [kinds for mark, kinds in self.behind.items() if mark in self.lines[-1]]
            if after:
                (x, shape), kinds = self.made[-1], after[0]
        dim = self.chance.randrange(len(shape))
        getattr(self, f"_{self.chance.choice(kinds)}")(x, shape, dim)

    def _changed(self, shape: Shape, dim: int, size: int) -> Shape:
        return (*shape[:dim], size, *shape[dim + 1 :])

    def _gather(self, x: str, shape: Shape, dim: int) -> None:
        self._make(f"all_gather({x}, {dim}, g)", *self._changed(shape, dim, shape[dim] * self.world_size))

    def _scatter(self, x: str, shape: Shape, dim: int) -> None:
        dims = [d for d in (dim, *range(len(shape))) if shape[d] % self.world_size == 0]
        op = "sum" if self.trains else self.chance.choice(["sum", "sum", "avg"])
        if dims:
            self._make(
                f"reduce_scatter({x}, {op!r}, {dims[0]}, g)",
                *self._changed(shape, dims[0], shape[dims[0]] // self.world_size),
            )

    def _reduce(self, x: str, shape: Shape, dim: int) -> None:
        if not self.trains:
            self._make(f"all_reduce({x}, {self.chance.choice(['sum', 'sum', 'avg', 'max'])!r}, g)", *shape)

    def _mm(self, x: str, shape: Shape, dim: int) -> None:
        columns = self._columns()
        weight = (
            self._input(shape[-1], columns) if self.chance.random() < 0.5 else f"{self._input(columns, shape[-1])}.t()"
        )
        bias = f" + {self._input(columns)}" if self.chance.random() < 0.2 else ""
        self._make(f"{x} @ {weight}{bias}", *shape[:-1], columns)

    def _sum(self, x: str, shape: Shape, dim: int) -> None:
        columns, inner = self._columns(), self._width()
        other = self.chance.choice(
            [
                f"{self._input(*shape[:-1], inner)} @ {self._input(inner, columns)}",
                f"({x} * 2) @ {self._input(shape[-1], columns)}",
            ]
        )
        self._make(f"{x} @ {self._input(shape[-1], columns)} + {other}", *shape[:-1], columns)

    def _turned(self, x: str, shape: Shape, dim: int) -> None:
        if len(shape) == 2:
            rows = self._columns()
            self._make(f"{self._input(rows, shape[0])} @ {x}", rows, shape[1])

    def _pair(self, x: str, shape: Shape, dim: int) -> None:
        y, other = self._recent()
        if len(shape) == len(other) and shape[:-2] == other[:-2]:
            if shape[-1] == other[-2]:
                self._make(f"{x} @ {y}", *shape[:-1], other[-1])
            elif shape[-2] == other[-2]:
                self._make(f"{x}.mT @ {y}", *shape[:-2], shape[-1], other[-1])
            elif shape[-1] == other[-1]:
                self._make(f"{x} @ {y}.mT", *shape[:-1], other[-2])

    def _add(self, x: str, shape: Shape, dim: int) -> None:
        y = self.chance.choice([name for name, other in self.made if other == shape])
        self._make(f"{x} {self.chance.choice('++-')} {y}", *shape)

    def _times(self, x: str, shape: Shape, dim: int) -> None:
        self._make(f"{x} * {self.chance.choice([name for name, other in self.made if other == shape])}.tanh()", *shape)

    def _act(self, x: str, shape: Shape, dim: int) -> None:
        self._make(f"torch.{self.chance.choice(['relu', 'tanh', 'sigmoid', 'nn.functional.silu'])}({x})", *shape)

    def _scale(self, x: str, shape: Shape, dim: int) -> None:
        self._make(self.chance.choice(["{} * 2", "{} + 1", "{} / 3", "-{}", "1 - {}"]).format(x), *shape)

    def _row(self, x: str, shape: Shape, dim: int) -> None:
        self._make(
            f"{x} {self.chance.choice('+*')} {self._input(*(n if d == dim else 1 for d, n in enumerate(shape)))}",
            *shape,
        )

    def _norm(self, x: str, shape: Shape, dim: int) -> None:
        self._make(f"torch.nn.functional.layer_norm({x}, ({shape[-1]},), {self._input(shape[-1])})", *shape)

    def _softmax(self, x: str, shape: Shape, dim: int) -> None:
        self._make(f"{x}.softmax({dim})", *shape)

    def _share(self, x: str, shape: Shape, dim: int) -> None:
        self._make(f"{x} * {self._input(*shape[:-1], 1)}", *shape)

    def _batch(self, x: str, shape: Shape, dim: int) -> None:
        if len(shape) == 3:
            columns = self._columns()
            weighted = f" * {self._input(*shape[:-1], 1)}" if self.chance.random() < 0.3 else ""
            self._make(f"{x} @ {self._input(shape[0], shape[2], columns)}{weighted}", *shape[:-1], columns)

    def _total(self, x: str, shape: Shape, dim: int) -> None:
        if len(shape) == 3:
            self._make(f"{x}.{self.chance.choice(['sum', 'mean', 'amax'])}({dim})", *shape[:dim], *shape[dim + 1 :])

    def _side(self, x: str, shape: Shape, dim: int) -> None:
        first, second = self._columns(), self._columns()
        self._make(
            f"torch.cat([{x} @ {self._input(shape[-1], first)}, {x} @ {self._input(shape[-1], second)}], -1)",
            *shape[:-1],
            first + second,
        )

    def _transpose(self, x: str, shape: Shape, dim: int) -> None:
        self._make(f"{x}.mT", *shape[:-2], shape[-1], shape[-2])

    def _view(self, x: str, shape: Shape, dim: int) -> None:
        batch = self.chance.choice([n for n in (1, 2, self.world_size) if shape[0] % n == 0])
        now = (shape[0] * shape[1], shape[2]) if len(shape) == 3 else (batch, shape[0] // batch, shape[1])
        self._make(f"{x}.reshape({', '.join(map(str, now))})", *now)

    def _slice(self, x: str, shape: Shape, dim: int) -> None:
        start = self.chance.randrange(shape[dim])
        stop = self.chance.randint(start + 1, shape[dim])
        self._make(f"{x}.narrow({dim}, {start}, {stop - start})", *self._changed(shape, dim, stop - start))

    def _cat(self, x: str, shape: Shape, dim: int) -> None:
        y, other = self.chance.choice(
            [
                (name, s)
                for name, s in self.made
                if len(s) == len(shape) and self._changed(s, dim, 0) == self._changed(shape, dim, 0)
            ]
        )
        self._make(f"torch.cat([{x}, {y}], {dim})", *self._changed(shape, dim, shape[dim] + other[dim]))

    def _chunk(self, x: str, shape: Shape, dim: int) -> None:
        pieces = self.chance.choice([2, self.world_size])
        if shape[dim] % pieces == 0:
            half = f"{x}.chunk({pieces}, {dim})[{self.chance.randrange(pieces)}]"
            joined = f"torch.cat({x}.chunk({pieces}, {dim}), {(dim + 1) % len(shape)})"
            small = self._changed(shape, dim, shape[dim] // pieces)
            if self.chance.random() < 0.5:
                self._make(half, *small)
            else:
                self._make(
                    joined, *self._changed(small, (dim + 1) % len(shape), shape[(dim + 1) % len(shape)] * pieces)
                )


class _Contiguous(torch.autograd.Function):
    """The identity, with a contiguous gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.contiguous()


def _trained(kind: str) -> Any:
    """The variant of the collective ``kind`` that has a gradient. Before torch 2.13, a gather or reduce-scatter has
    another name."""
    return getattr(funcol, f"{kind}_single_autograd", None) or getattr(funcol, f"{kind}_tensor_autograd")


def outcome(
    function: Callable[..., tuple[torch.Tensor, ...]], inputs: list[torch.Tensor], trains: bool
) -> list[torch.Tensor]:
    """The results and, if ``trains``, the gradients of the inputs. An input without a gradient gives a zero."""
    inputs = [tensor.clone().requires_grad_(trains) for tensor in inputs]
    results = function(*inputs)
    if not trains:
        return list(results)
    weighted = [
        (r * torch.linspace(-1, 1, r.numel(), dtype=r.dtype, device=r.device).view(r.shape)).sum()
        for r in results
        if r.requires_grad
    ]
    torch.stack(weighted).sum().backward()
    return [r.detach() for r in results] + [torch.zeros(()) if t.grad is None else t.grad for t in inputs]
