"""Inductor lowerings of ``take``, ``assemble``, ``narrow`` and ``after``: views and scheduling edges, without copies; and of ``packed``, which is one.

The rank is a symbol of the generated code (``u0 = torch.ops.overlap_inductor.group_rank.default('tp')``), made at lowering time. A
rank-rotated slice is then a ``ReinterpretView`` with a symbolic offset, which Inductor's own matmuls and pointwise kernels read in place,
and the pieces of a result are written straight into their rank-rotated places, as ``aten.cat`` does with constant offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor import lowering
from torch._inductor.virtualized import V

from overlap_inductor.torch_compat.distributed import resolve_group


class GroupRank(ir.ExternKernel):
    """Defines the symbol of this process's rank in a group; generated code asks the group once a call."""

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
        wrapper.writeline(f"{self.get_name()} = None")


def _expression(size: Any) -> Any:
    """A size as Inductor's layouts want it: a sympy expression or an int."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _rank_symbol(group_name: str) -> sympy.Symbol:
    """One symbol a group and graph, range-checked to ``[0, world_size)``."""
    known = V.graph.__dict__.setdefault("_overlap_inductor_ranks", {})
    if group_name not in known:
        shape_env = V.graph.sizevars.shape_env
        with shape_env.ignore_fresh_unbacked_symbols():
            symbol = shape_env.create_unbacked_symint().node.expr
        world_size = resolve_group(group_name).size()
        shape_env.constrain_symbol_range(symbol, 0, world_size - 1)
        GroupRank(symbol, group_name)
        known[group_name] = symbol
    return known[group_name]


def _slot(group_name: str, shift: int) -> sympy.Expr:
    world_size = resolve_group(group_name).size()
    rank = _rank_symbol(group_name)
    shift %= world_size
    return sympy.Mod(rank + shift, world_size) if shift else rank


def _strided_view(box: Any, sizes: Sequence[Any], offsets: Sequence[Any]) -> Any:
    """The block of a realized buffer that begins at ``offsets`` and has ``sizes``, as a view."""
    storage, layout = ir.as_storage_and_layout(box)
    offset = layout.offset + sum(o * s for o, s in zip(offsets, layout.stride, strict=True))
    fixed = ir.FixedLayout(layout.device, layout.dtype, list(sizes), list(layout.stride), offset)
    return ir.ReinterpretView(data=storage, layout=fixed)


def _take(x: Any, dim: int, shift: int, chunk: Any, start: Any, length: Any, group_name: str) -> Any:
    x.realize()
    chunk, start, length = map(_expression, (chunk, start, length))
    sizes = list(x.get_size())
    if not ir.is_storage_and_layout(x):
        x = ir.ExternKernel.copy_input(x)
    offsets: list[Any] = [0] * len(sizes)
    offsets[dim] = _slot(group_name, shift) * sympy.sympify(chunk) + start
    sizes[dim] = length
    return ir.TensorBox(_strided_view(x, sizes, offsets))


def _narrow(x: Any, dim: int, start: Any, length: Any) -> Any:
    start, length = _expression(start), _expression(length)
    data = x.data if isinstance(x, ir.TensorBox) else x
    return ir.TensorBox(ir.SliceView.create(data, dim, start, start + length, clamp=False))


def _packed(x: Any) -> Any:
    return ir.ExternKernel.copy_input(x)


def _after(piece: Any, token: Any) -> Any:
    """``piece`` itself; the kernel that computes it is scheduled after the one that computes ``token``.

    Why not ``control_deps``: it lowers the matmul as the output of a subgraph, whose strides Inductor then compares, and each comparison of
    a symbolic size is a guard.
    """
    piece.realize()
    token.realize()
    kernel = V.graph.get_buffer(piece.get_name()).get_defining_op()
    V.graph.additional_buffer_deps[kernel.get_operation_name()].add(token.get_name())
    return piece


def _gather_step(*args: Any) -> Any:
    """The op itself, scheduled after the kernels of ``computed``: those keep a flexible layout, so that ``assemble`` can place them."""
    op = torch.ops.overlap_inductor.gather_step.default
    plain, computed = args[:7], args[7] if len(args) > 7 else ()
    token = lowering.fallback_handler(op, add_to_fallback_set=False)(*plain)
    kernel = V.graph.get_buffer(token.get_name())
    if isinstance(kernel, ir.MultiOutput):
        kernel = kernel.inputs[0]
    for piece in computed:
        piece.realize()
        V.graph.additional_buffer_deps[kernel.get_operation_name()].add(piece.get_name())
    return token


def _adopt(source: Any, view: Any, node: torch.fx.Node) -> Any:
    """Make the kernel that computes ``source`` write into ``view``; a copy only where that kernel cannot.

    ``ConcatKernel.realize_into`` does so for pointwise kernels and templates with a flexible layout. An extern matmul has a fixed
    layout, but takes ``out=``: where sizes and strides agree, its output can be the view as well.
    """
    data = source.data if isinstance(source, ir.TensorBox) else source
    buffer = data.data if isinstance(data, ir.StorageBox) else None
    if isinstance(buffer, ir.ExternKernelOut) and type(buffer.layout) is ir.FixedLayout:
        known = V.graph.sizevars.statically_known_equals
        same = len(buffer.get_stride()) == len(view.get_stride()) and all(
            known(a, b) for a, b in zip(buffer.get_stride(), view.get_stride(), strict=True)
        )
        # Others may read the matmul's own buffer only before the whole is complete, which ``after`` sees to: then the whole may be freed.
        if same and (len(node.users) == 1 or any(u.target is torch.ops.overlap_inductor.after.default for u in V.graph.current_node.users)):
            buffer.layout = ir.NonOwningLayout(view)
            return buffer
    written = ir.ConcatKernel.realize_into(source, view)
    # For ``hooks``: an alias that Inductor may fuse into a template all the same.
    written.overlap_piece = True
    return written


def _assemble(
    pieces: Sequence[Any],
    shape: Sequence[Any],
    dim: int,
    chunk: Any,
    shifts: Sequence[int],
    starts: Sequence[Any],
    group_name: str,
) -> Any:
    shape, starts, chunk = [*map(_expression, shape)], [*map(_expression, starts)], _expression(chunk)
    rank_count = len(shape)
    layout = ir.FixedLayout(
        pieces[0].get_device(),
        pieces[0].get_dtype(),
        list(shape),
        ir.FlexibleLayout.contiguous_strides(list(shape)),
    )
    kernel = ir.ConcatKernel(name=None, layout=layout, inputs=[])
    box = ir.StorageBox(kernel)
    written = []
    nodes = V.graph.current_node.args[0]
    for i, (piece, shift) in enumerate(zip(pieces, shifts, strict=True)):
        offsets = list(starts[i * rank_count : (i + 1) * rank_count])
        offsets[dim] = offsets[dim] + _slot(group_name, shift) * sympy.sympify(chunk)
        written.append(_adopt(piece, _strided_view(box, piece.get_size(), offsets), nodes[i]))
    kernel.name = V.graph.register_buffer(kernel)
    kernel.inputs = ir.ConcatKernel.unwrap_storage(written)
    V.graph.register_operation(kernel)
    return ir.TensorBox(box)


def register_lowerings() -> None:
    """Register the lowerings with Inductor; harmless when called again."""
    import overlap_inductor.lowerings.all_ops  # noqa: F401

    ops = torch.ops.overlap_inductor
    for op, function in (
        (ops.take.default, _take),
        (ops.narrow.default, _narrow),
        (ops.packed.default, _packed),
        (ops.after.default, _after),
        (ops.gather_step.default, _gather_step),
        (ops.assemble.default, _assemble),
    ):
        if op not in lowering.lowerings:
            lowering.register_lowering(op, type_promotion_kind=None)(function)
