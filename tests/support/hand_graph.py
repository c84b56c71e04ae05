# SPDX-License-Identifier: Apache-2.0
"""Builds post-grad graphs node by node, in milliseconds. Tests can also build graphs that tracing would not produce."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.experimental.symbolic_shapes import StatelessSymbolicContext

from overlap_inductor.config import OverlapConfig
from overlap_inductor.facts.stretch import StretchFacts
from overlap_inductor.passes.find import SiteFinder
from overlap_inductor.passes.overlap_pass import readable
from overlap_inductor.passes.overlap_pass import run_overlap_pass
from overlap_inductor.passes.sequence_parallel import run_sequence_parallel
from overlap_inductor.report.report import OverlapReport

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class HandGraph:
    """Builds one graph. ``group`` is the name of the default process group, ``world_size`` the number of its ranks."""

    def __init__(self) -> None:
        group = torch.distributed.group.WORLD
        self.group, self.world_size = group.group_name, group.size()
        self.graph = fx.Graph()
        self.shapes = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shapes)

    def input(
        self, *shape: int, dtype: torch.dtype = torch.float32, name: str = "x", dynamic: Sequence[int] = ()
    ) -> fx.Node:
        """A placeholder. Each dim in ``dynamic`` gets its own symbol."""
        node = self.graph.placeholder(name)
        context = StatelessSymbolicContext(
            [DimDynamic.DYNAMIC if d in dynamic else DimDynamic.STATIC for d in range(len(shape))]
        )
        example = torch.empty(shape, dtype=dtype)
        node.meta["val"] = self.mode.from_tensor(example, symbolic_context=context, source=ConstantSource(node.name))
        return node

    def on(self, device: str, *shape: int, dtype: torch.dtype = torch.float32, name: str = "x") -> fx.Node:
        """A placeholder on ``device``, even if this machine has no such device."""
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        return node

    def unbacked_input(self, *shape: int, name: str = "x") -> fx.Node:
        """A placeholder whose first dim is known at run time only."""
        node = self.graph.placeholder(name)
        size = self.shapes.create_unbacked_symint()
        torch._check(size >= 0)
        with self.mode:
            node.meta["val"] = torch.empty(size, *shape)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def wait(self, node: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor.default, node)

    def gather(self, x: fx.Node) -> fx.Node:
        return self.wait(self.call(c10d.all_gather_into_tensor.default, x, self.world_size, self.group))

    def gather_on(self, x: fx.Node, dim: int) -> fx.Node:
        """All-gather on ``dim`` in the spelling of functional collectives: gathered on dim 0, split, concatenated."""
        return self.join(self.gather(x), x.meta["val"].shape[0], dim, range(self.world_size))

    def join(self, gathered: fx.Node, rows: Any, dim: int, order: Sequence[int]) -> fx.Node:
        pieces = self.call(aten.split.Tensor, gathered, rows)
        return self.call(aten.cat.default, [self.call(getitem, pieces, i) for i in order], dim)

    def scatter(self, x: fx.Node, op: str = "sum") -> fx.Node:
        return self.wait(self.call(c10d.reduce_scatter_tensor.default, x, op, self.world_size, self.group))

    def scatter_on(self, x: fx.Node, dim: int, op: str = "sum") -> fx.Node:
        pieces = self.call(aten.split.Tensor, x, x.meta["val"].shape[dim] // self.world_size, dim)
        return self.scatter(
            self.call(aten.cat.default, [self.call(getitem, pieces, i) for i in range(self.world_size)]), op
        )

    def reduce(self, x: fx.Node, op: str = "sum") -> fx.Node:
        return self.wait(self.call(c10d.all_reduce.default, x, op, self.group))

    def mm(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(aten.mm.default, a, b)

    def view(self, x: fx.Node, *shape: Any) -> fx.Node:
        return self.call(aten.reshape.default, x, list(shape))

    def output(self, *values: fx.Node) -> HandGraph:
        self.graph.output(values)
        # The pass stores the subgraphs of its ``control_deps`` nodes in the module that owns the graph.
        self.module = fx.GraphModule(torch.nn.Module(), self.graph)
        return self

    def text(self) -> str:
        return readable(self.graph)

    def found(self, phase: str = "inference") -> SiteFinder:
        return SiteFinder(self.graph, phase).run()

    def divide(self, refusal: str | None = None, **fields: Any) -> list[StretchFacts]:
        """Run the sequence-parallel rewrite on the graph."""
        config = OverlapConfig(**{"schedule": "ring", "sequence_parallel": "on", **fields})
        return run_sequence_parallel(self.graph, config, refusal)

    def run(self, refusal: str | None = None, is_inference: bool = True, **fields: Any) -> OverlapReport:
        config = OverlapConfig(**{"schedule": "ring", **fields})
        return run_overlap_pass(self.graph, config, is_inference=is_inference, refusal=refusal)
