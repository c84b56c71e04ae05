# SPDX-License-Identifier: Apache-2.0
"""Inductor lowerings of ops of the ring, and of ``agree``.

====================================  =================================================
``take``, ``narrow``, ``window``      a view
``assemble``                          a buffer into which its pieces are written
``after``                             a scheduling edge
``gather_step``, ``exchange_wait``    a call with scheduling edges
``packed``                            a copy
``agree``                             a call
====================================  =================================================

``take`` and ``assemble`` see a dim of a tensor as one slice for each rank. ``take`` reads, and ``assemble``
writes, a part of the slice of rank ``r + shift``, where ``r`` is this rank. Such a part is a ``ReinterpretView``, whose
offset contains the rank as a symbol (``rank_symbol``). Inductor's matmuls and pointwise kernels read such a view in
place, and write their results straight into such a view::

    a = take(x, 0, 1, 4, 0, 4, "tp")               u0 = torch.ops.overlap_inductor.group_rank.default('tp')
    b = mm(a, w)                                   buf = empty_strided(...)
    y = assemble([b, ...], ...)                    extern_kernels.mm(reinterpret_tensor(x, ..., offset(u0)), w,
                                                                     out=reinterpret_tensor(buf, ..., offset(u0)))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor import lowering
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from overlap_inductor.errors import OverlapError
from overlap_inductor.inductor.rank_symbol import rank_symbol
from overlap_inductor.inductor.window import window
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.operators import argument
from overlap_inductor.torch_compat.ordering import moved
from overlap_inductor.torch_compat.ordering import starts_transfer


def _expression(size: Any) -> Any:
    """A sympy expression or an int, as Inductor's layouts expect."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _slot(group_name: str, shift: int) -> sympy.Expr:
    """``(rank + shift) % world_size`` as an expression of the rank's symbol."""
    world_size = resolve_group(group_name).size()
    rank = rank_symbol(group_name)
    shift %= world_size
    return sympy.Mod(rank + shift, world_size) if shift else rank


def _strided_view(box: Any, sizes: Sequence[Any], offsets: Sequence[Any]) -> Any:
    """A view of a block of ``sizes`` in the realized buffer ``box``. ``offsets``: the indices of its first element."""
    storage, layout = ir.as_storage_and_layout(box)
    offset = layout.offset + sum(o * s for o, s in zip(offsets, layout.stride, strict=True))
    fixed = ir.FixedLayout(layout.device, layout.dtype, list(sizes), list(layout.stride), offset)
    return ir.ReinterpretView(data=storage, layout=fixed)


def _agree(group_name: str, *args: Any) -> Any:
    """Call the op. If the graph has a transfer of the group, define the rank's symbol first. If the symbol were defined
    later, its host code could split a CUDA graph between steps of the transfer.

    Raises:
        OverlapError: another pass has moved a step of a ring past a write to its buffer.
    """
    if (node := moved(V.graph.graph)) is not None:
        raise OverlapError(
            f"{node} reads or writes a buffer of a ring's steps. A pass that runs after the pass of overlap_inductor"
            " has moved this node past a write to the buffer. Put the pass of overlap_inductor last, or set"
            " OVERLAP_INDUCTOR_STEP_NODE_BUDGET=1, so that no ring is unrolled."
        )
    ops = torch.ops.overlap_inductor
    if any(starts_transfer(n) and argument(n, "group_name") == group_name for n in V.graph.graph.nodes):
        rank_symbol(group_name)
    return lowering.fallback_handler(ops.agree.default, add_to_fallback_set=False)(group_name, *args)


def _take(x: Any, dim: int, shift: int, chunk: Any, start: Any, length: Any, group_name: str) -> Any:
    chunk, start, length = map(_expression, (chunk, start, length))
    sizes = list(x.get_size())
    # If ``x`` is a view of a tensor that is not stored yet, ``realize_input`` stores the tensor once, and returns a
    # view. Without ``realize_input``, each piece would copy all of ``x``.
    x = ir.ExternKernel.realize_input(x)
    offsets: list[Any] = [0] * len(sizes)
    offsets[dim] = _slot(group_name, shift) * sympy.sympify(chunk) + start
    sizes[dim] = length
    return ir.TensorBox(_strided_view(x, sizes, offsets))


def _narrow(x: Any, dim: int, start: Any, length: Any) -> Any:
    start, length = _expression(start), _expression(length)
    data = x.data if isinstance(x, ir.TensorBox) else x
    return ir.TensorBox(ir.SliceView.create(data, dim, start, start + length, clamp=False))


def _window(x: Any, dim: int, start: Any, length: Any) -> Any:
    """The op returns ``length`` rows of ``x``, beginning at row ``start``. On a CPU, Inductor treats these rows as a
    separate buffer (a window). This saves time of the C++ compiler (module ``window``). If ``window`` returns ``None``,
    the op is lowered as ``narrow``. On other devices, a window would only add a node, so the op is always lowered as
    ``narrow``."""
    rows = None
    if x.get_device().type == "cpu":
        rows = window(x, dim, _expression(start), _expression(length))
    return _narrow(x, dim, start, length) if rows is None else rows


def _packed(x: Any) -> Any:
    return ir.ExternKernel.copy_input(x)


def _after(piece: Any, token: Any) -> Any:
    """Return ``piece``, and schedule its kernel after the kernel of ``token``.

    Inductor's op ``control_deps`` is not used here, because it would lower ``piece`` as a subgraph's output. Inductor
    compares the strides of such outputs, which adds guards for symbolic sizes.
    """
    piece.realize()
    token.realize()
    kernel = V.graph.get_buffer(piece.get_name()).get_defining_op()
    if isinstance(kernel, ir.MultiOutput):
        kernel = kernel.inputs[0]
    V.graph.additional_buffer_deps[kernel.get_operation_name()].add(_remaining(token.get_name()))
    return piece


def _remaining(name: str) -> str:
    """The name of a buffer that the kernel of buffer ``name`` writes and that Inductor keeps.

    No kernel reads a step's token, so Inductor removes the token with its scheduling edges. So edges start at an
    argument that the step writes in place.
    """
    buffer = V.graph.get_buffer(name)
    if isinstance(buffer, ir.MultiOutput):
        written = getattr(buffer.inputs[0], "mutation_outputs", ())
        return written[0].get_name() if written else name
    return name


def _with_remaining_edges(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``lower``, Inductor's lowering of ``control_deps``, so that edges start at buffers that remain
    (``_remaining``)."""

    @functools.wraps(lower)
    def lower_and_move_edges(*args: Any) -> Any:
        first = len(V.graph.operations)
        result = lower(*args)
        edges = V.graph.additional_buffer_deps
        for operation in V.graph.operations[first:]:
            if names := edges.get(operation.get_operation_name()):
                edges[operation.get_operation_name()] = OrderedSet(map(_remaining, names))
        return result

    lower_and_move_edges.overlap_inductor = True  # type: ignore[attr-defined]
    return lower_and_move_edges


def _gather_step(*args: Any) -> Any:
    return _after_computed(torch.ops.overlap_inductor.gather_step.default, args, 7)


def _exchange_wait(*args: Any) -> Any:
    return _after_computed(torch.ops.overlap_inductor.exchange_wait.default, args, 8)


def _after_computed(op: Any, args: tuple[Any, ...], plain: int) -> Any:
    """Call ``op`` with its first ``plain`` arguments, after the kernels that compute its last argument, ``computed``.

    The tensors of ``computed`` are no inputs of the generated call. So their layouts stay flexible for ``assemble``.
    """
    computed = args[plain] if len(args) > plain else ()
    token = lowering.fallback_handler(op, add_to_fallback_set=False)(*args[:plain])
    kernel = V.graph.get_buffer(token.get_name())
    if isinstance(kernel, ir.MultiOutput):
        kernel = kernel.inputs[0]
    for piece in computed:
        piece.realize()
        V.graph.additional_buffer_deps[kernel.get_operation_name()].add(_remaining(piece.get_name()))
    return token


def _adopt(source: Any, view: Any, node: torch.fx.Node) -> Any:
    """Make the kernel of ``source`` write into ``view``, which has the sizes of ``source``. If the kernel cannot, copy
    its result into ``view``. Returns the written buffer. ``node`` is the FX node of ``source``.

    ``ConcatKernel.realize_into`` does this for pointwise kernels, and for templates with a flexible layout. An extern
    matmul has a fixed layout but takes ``out=``. It can write into the view if the strides are equal.
    """
    data = source.data if isinstance(source, ir.TensorBox) else source
    buffer = data.data if isinstance(data, ir.StorageBox) else None
    if isinstance(buffer, ir.ExternKernelOut) and type(buffer.layout) is ir.FixedLayout:
        known = V.graph.sizevars.statically_known_equals
        same = len(buffer.get_stride()) == len(view.get_stride()) and all(
            known(a, b) for a, b in zip(buffer.get_stride(), view.get_stride(), strict=True)
        )
        # The assembled tensor's memory may be freed after the tensor's last reader. Other readers of the matmul's
        # result could then read freed memory. So the matmul may write into this memory only in two cases:
        # - only ``assemble`` reads the matmul's result;
        # - an ``after`` delays readers of the assembled tensor until the other readers of the matmul's result have run.
        if same and (
            sum(u.target is not torch.ops.overlap_inductor.exchange_wait.default for u in node.users) == 1
            or any(u.target is torch.ops.overlap_inductor.after.default for u in V.graph.current_node.users)
        ):
            buffer.layout = ir.NonOwningLayout(view)
            return buffer
    written = ir.ConcatKernel.realize_into(source, view)
    # ``written`` is a part of the assembled tensor, so Inductor would not fuse its kernel into a template. With this
    # mark, ``inductor.hooks`` allows the fusion.
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
    dims = len(shape)
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
        offsets = list(starts[i * dims : (i + 1) * dims])
        offsets[dim] = offsets[dim] + _slot(group_name, shift) * sympy.sympify(chunk)
        written.append(_adopt(piece, _strided_view(box, piece.get_size(), offsets), nodes[i]))
    kernel.name = V.graph.register_buffer(kernel)
    kernel.inputs = ir.ConcatKernel.unwrap_storage(written)
    V.graph.register_operation(kernel)
    return ir.TensorBox(box)


def register_lowerings() -> None:
    """Register the lowerings with Inductor, once."""
    from overlap_inductor.lowerings.registry import define_ops

    define_ops()

    ops = torch.ops.overlap_inductor
    for op, function in (
        (ops.agree.default, _agree),
        (ops.take.default, _take),
        (ops.narrow.default, _narrow),
        (ops.window.default, _window),
        (ops.packed.default, _packed),
        (ops.after.default, _after),
        (ops.gather_step.default, _gather_step),
        (ops.exchange_wait.default, _exchange_wait),
        (ops.assemble.default, _assemble),
    ):
        if op not in lowering.lowerings:
            lowering.register_lowering(op, type_promotion_kind=None)(function)
    theirs = lowering.lowerings[control_deps]
    if not hasattr(theirs, "overlap_inductor"):
        lowering.lowerings[control_deps] = _with_remaining_edges(theirs)
