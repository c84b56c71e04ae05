# SPDX-License-Identifier: Apache-2.0
"""This process's rank as a symbol of Inductor's generated code, so that no rank number is in the graph.

::

    u0 = torch.ops.overlap_inductor.group_rank.default('tp')      # once per call, before any kernel that uses u0
    buf0 = 0                                                      # the name of this definition; no kernel reads the 0
    extern_kernels.mm(reinterpret_tensor(x, (4, 8), (8, 1), 32*u0), w, out=buf1)

A kernel that uses the symbol must run after the symbol's definition, and the kernel's CUDA graph partition needs the
symbol as an input. Inductor ensures this for kernels that report the symbol. This module ensures it for two other
kinds:

- a template (Triton's, from max-autotune) that reads a view whose offset holds the symbol;
- any kernel that writes into such a view.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from overlap_inductor.torch_compat.distributed import resolve_group

_KNOWN = "_overlap_inductor_ranks"
_ACCESSES = "_overlap_inductor_accesses"
"""The attribute of ``V.graph`` that holds what each buffer's kernel reads and writes, by the buffer's ``id``. It has
entries only inside ``_noted_accesses``."""


class GroupRank(ir.ExternKernel):
    """Defines the symbol of this process's rank in a group."""

    def __init__(self, symbol: sympy.Symbol, group_name: str) -> None:
        super().__init__(None, ir.NoneLayout(device=torch.device("cpu")), [])
        self.symbol = symbol
        self.group_name = group_name
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)

    def get_reads(self) -> Any:
        return ir.OrderedSet()

    def should_allocate(self) -> bool:
        return False

    def has_side_effects(self) -> bool:
        return False

    def get_unbacked_symbol_defs(self) -> Any:
        return ir.OrderedSet([self.symbol])

    def codegen(self, wrapper: Any) -> None:
        wrapper.writeline(f"{self.symbol} = torch.ops.overlap_inductor.group_rank.default({self.group_name!r})")
        # CUDA graph partitions get this buffer's name as an input, because their kernels are ordered after this
        # definition. CUDA graph trees take only tensors and numbers, so the name gets a number.
        wrapper.writeline(f"{self.get_name()} = 0")


def rank_symbol(group_name: str) -> sympy.Symbol:
    """The symbol of this process's rank in the group, in ``[0, world_size)``. A graph has one symbol for each group.
    Raises ``OverlapError`` if there is no such group."""
    known: dict[str, GroupRank] = V.graph.__dict__.setdefault(_KNOWN, {})
    if group_name not in known:
        shape_env = V.graph.sizevars.shape_env
        with shape_env.ignore_fresh_unbacked_symbols():
            symbol = shape_env.create_unbacked_symint().node.expr
        world_size = resolve_group(group_name).size()
        shape_env.constrain_symbol_range(symbol, 0, world_size - 1)
        known[group_name] = GroupRank(symbol, group_name)
    return known[group_name].symbol


def compute_dependencies(original: Callable[..., Any], scheduler: Any) -> Any:
    """Around ``Scheduler.compute_dependencies``: if the offset of a kernel's view holds a rank's symbol, order the
    kernel after the symbol's definition.

    To find symbols, Inductor would trace the loads and stores of every pointwise kernel again. The scheduler's nodes
    already hold these loads and stores, and ``read_writes`` returns them.
    """
    for node in scheduler.nodes:
        for rank in _needed(node.node):
            V.graph.additional_buffer_deps[node.get_name()].add(rank.get_name())
    with _noted_accesses(scheduler.nodes):
        return original(scheduler)


@contextmanager
def _noted_accesses(nodes: Iterable[Any]) -> Iterator[None]:
    """In this context, ``read_writes`` returns what the scheduler's ``nodes`` hold. If the graph has no rank's symbol,
    ``read_writes`` returns what Inductor computes."""
    attributes = V.graph.__dict__
    outer = attributes.get(_ACCESSES, {})
    buffers = [n for n in nodes if isinstance(n.node, ir.ComputedBuffer)] if attributes.get(_KNOWN) else []
    attributes[_ACCESSES] = {id(n.node): n.read_writes for n in buffers}
    try:
        yield
    finally:
        attributes[_ACCESSES] = outer


def read_writes(original: Callable[..., Any], buffer: Any) -> Any:
    """Around ``ComputedBuffer.get_read_writes``: return what ``_noted_accesses`` noted for the buffer. For a buffer
    without a note, return what Inductor computes."""
    found = V.graph.__dict__.get(_ACCESSES, {}).get(id(buffer))
    return original(buffer) if found is None else found


def symbol_uses(original: Callable[..., Any], node: Any) -> Any:
    """Around ``get_scheduler_node_symbol_uses``: add the symbols of the views of ``node`` to its partition's inputs."""
    # A fused node has no buffer. Inductor calls this function again for each node in it.
    with _noted_accesses([node]):
        found = original(node)
    return found | ir.OrderedSet(rank.symbol for rank in _needed(node.node))


def _needed(kernel: Any) -> Iterator[GroupRank]:
    """The ``GroupRank`` of each symbol in a view of ``kernel``."""
    known: dict[str, GroupRank] = V.graph.__dict__.get(_KNOWN, {})
    if known and kernel is not None:
        symbols = {s for view in _views(kernel) for s in sympy.sympify(view.get_layout().offset).free_symbols}
        yield from (rank for rank in known.values() if rank.symbol in symbols)


def _views(kernel: Any) -> Iterator[Any]:
    """The views that ``kernel`` reads as inputs or writes into. Reads of generated pointwise kernels are left out,
    because Inductor finds their symbols."""
    yield from (i for i in getattr(kernel, "inputs", ()) if isinstance(i, ir.ReinterpretView))
    layouts = [output.maybe_get_layout() for output in kernel.get_outputs()]
    yield from (layout.view for layout in layouts if isinstance(layout, ir.NonOwningLayout))
