# SPDX-License-Identifier: Apache-2.0
"""Lower the op ``window``, which returns rows of a tensor. Kernels read these rows from a pointer to the first row.

If a C++ kernel of Inductor reads a slice, the slice's offset is in the kernel's text. Kernels that differ only in
the rows that they read then have different texts, and the compiler compiles each of them. A window is a view of the
slice. Inductor treats this view as a separate buffer. Kernels read it from offset 0, and their caller adds the offset::

    kernel_a(x, buf1)                             kernel_a(x, buf1)
    kernel_b(x, buf2)     # reads x + 32    ->    buf3 = reinterpret_tensor(x, (4, 8), (8, 1), 32)
                                                  kernel_a(buf3, buf2)

A window has no memory of its own. Inductor keeps the memory of ``x`` until the last kernel that reads a window of ``x``
has run. It orders a write to ``x`` after the earlier kernels that read a window of ``x``. It never reuses a window's
buffer for another result, because it reuses no output of a ``NopKernel``.
"""

from __future__ import annotations

from typing import Any

import sympy
from torch._inductor import ir
from torch._inductor.virtualized import V

_KNOWN = "_overlap_inductor_windows"


class Window(ir.NopKernel):
    """A view of a buffer, as a buffer with a name of its own. ``view`` has the window's sizes, strides and offset."""

    def __init__(self, view: Any) -> None:
        super().__init__(name=None, layout=ir.NonOwningLayout(view), inputs=[view.data.data])
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)

    def should_allocate(self) -> bool:
        return True  # "Allocating" writes the line that makes the view.


def window(x: Any, dim: int, start: Any, length: Any) -> Any | None:
    """The window of ``length`` rows of ``x`` along ``dim``, from row ``start`` on. Returns ``None`` in these cases:

    - ``_place`` finds no buffer for ``x``.
    - The rows begin at offset 0, or at an offset that only the running program knows.
    """
    storage, layout = _place(x)
    if storage is None:
        return None
    offset = sympy.sympify(layout.offset + start * layout.stride[dim])
    if V.graph.sizevars.statically_known_equals(offset, 0) or ir.get_free_symbols(offset, unbacked_only=True):
        return None
    sizes = list(layout.size)
    sizes[dim] = length
    known: dict[Any, Window] = V.graph.__dict__.setdefault(_KNOWN, {})
    key = (storage.get_name(), layout.dtype, offset, *sizes, *layout.stride)
    if key not in known:
        rows = ir.FixedLayout(layout.device, layout.dtype, sizes, list(layout.stride), offset)
        known[key] = Window(ir.ReinterpretView(data=storage, layout=rows))
    return ir.TensorBox(ir.StorageBox(known[key]))


def _place(x: Any) -> tuple[Any, Any]:
    """``(buffer, layout in the buffer)`` of ``x``. If ``x`` is ``_better_stored``, it is stored first. ``(None, None)``
    if ``x`` is still not in memory, or if ``x`` is a view of a buffer but no layout describes the view."""
    view = x.data if isinstance(x, ir.TensorBox) else x
    base = view.unwrap_view() if isinstance(view, ir.BaseView) else view
    if isinstance(base, ir.StorageBox) and _better_stored(base.data):
        base.realize()
    if not ir.is_storage_and_layout(base):
        return None, None
    if isinstance(view, ir.BaseView):
        try:
            return base, ir.ExternKernel.convert_to_reinterpret_view(view).get_layout()
        except NotImplementedError:
            return None, None
    return ir.as_storage_and_layout(base)


def _better_stored(data: Any) -> bool:
    """Whether an elementwise result is better stored once than computed by the kernel of each window.

    True if the result is computed from several buffers, and one of them is not an input of the graph. If the result
    is stored, the windows' kernels do not read that buffer, so they do not keep its memory alive.
    """
    if not isinstance(data, ir.Pointwise):
        return False
    reads = data.inner_fn_opcount().read_buffers
    return len(reads) > 1 and any(name not in V.graph.graph_inputs for name in reads)
