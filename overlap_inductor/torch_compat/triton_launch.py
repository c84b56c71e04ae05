# SPDX-License-Identifier: Apache-2.0
"""``PreparedKernel``: launches one Triton kernel again and again with little host time.

Host time of a launch, for a kernel with 50 arguments and four tensor maps:

- ``kernel[grid](...)``: 75 us. It examines every argument and encodes every tensor map.
- ``compiled[grid](...)``: 32 us. The documented way, for versions of Triton that ``_DIRECT`` does not list.
- The C launcher: 8 us. Used only for the versions in ``_DIRECT``, because its interface differs between versions.

From launch to launch, arguments may change only in their addresses; the tensors of some descriptors may also change in
their number of rows. The tensor map of each address and number of rows is remembered.

The kernel is loaded before the first launch, to avoid a deadlock. Loading waits until the device is idle. The
device never becomes idle if a running kernel waits for a kernel that is not loaded yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeAlias

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.torch_compat.symmetric import lasting_bytes
from overlap_inductor.torch_compat.versions import release

_DIRECT = ((3, 6),)
_REMEMBERED = 256
"""The most tensor maps that are remembered for one argument. (A tensor map keeps no tensor alive.)"""
_STREAM = 3
"""Index of the stream among the arguments of the C launcher: it follows the three sizes of the grid."""


Varying: TypeAlias = torch.Tensor | int | None
"""An argument that a launch passes."""


def bound(kernel: Any, varying: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``kernel`` by name, with defaults, in the order of its parameters.

    Raises:
        TypeError: a parameter has no argument and no default, is both varying and fixed, or does not exist.
    """
    parameters = inspect.signature(kernel.fn).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    given = {**defaults, **fixed, **varying}
    wrong = {
        "is missing": [name for name in parameters if name not in given],
        "is not a parameter": [name for name in given if name not in parameters],
        "is both varying and fixed": [name for name in varying if name in fixed],
    }
    problems = [f"{name} {problem}" for problem, names in wrong.items() for name in names]
    if problems:
        raise TypeError(f"arguments of kernel {kernel.fn.__name__}: {'; '.join(problems)}")
    return {name: given[name] for name in parameters}


class PreparedKernel:
    """``kernel[(grid,)](**varying, **fixed, **options)``, compiled and loaded.

    Args:
        varying: ``{parameter: example}`` for the arguments that every launch passes anew, in the order in which it
            passes them. An example is a tensor, a tensor descriptor, ``None``, or an int of 32 bits that the kernel
            does not specialize. Shapes, strides, dtypes and alignment to 16 bytes must stay the same.
        fixed: ``{parameter: argument}`` for all other arguments, including constants. They are kept alive.
        scratch: the device for tensor maps that the kernel makes itself; ``None`` if it makes none.
        any_rows: names of varying descriptors whose first dim is that of the tensor that a launch passes. The kernel
            must not read the descriptor's shape.

    Raises:
        TypeError: the names do not match the kernel's parameters (``bound``).
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        varying: Mapping[str, Any],
        fixed: Mapping[str, Any],
        scratch: torch.device | None = None,
        any_rows: Collection[str] = (),
        **options: Any,
    ) -> None:
        arguments = bound(kernel, varying, fixed)
        order, values = list(arguments), list(arguments.values())
        places = [order.index(name) for name in varying]
        open_places = {order.index(name) for name in any_rows}
        self._varying = [
            (place, (v.shape, v.strides, v.block_shape) if isinstance(v := values[place], TensorDescriptor) else None)
            for place in places
        ]
        self._open_places = open_places
        self._arguments = [None if name in varying else value for name, value in arguments.items()]
        if triton.knobs.runtime.interpret:
            self._run: Callable[..., Any] = lambda *a: kernel[(grid,)](*a, **options)
            self._launch = self._by_triton
            return
        compiled = kernel.warmup(*values, grid=(grid,), **options)
        # Indexing loads the kernel.
        self._run = compiled[(grid, 1, 1)]
        self._launch = self._by_triton
        if scratch is not None:
            self._run = _with_scratch(self._run, scratch)
        if release(triton.__version__) in _DIRECT:
            self._launch = _Direct(compiled, grid, values, places, open_places, scratch, self._by_triton)

    def __call__(self, *varying: Varying) -> None:
        """Launch on the current stream, with a tensor, ``None`` or an int for each varying argument. For a tensor
        descriptor, pass the tensor that it describes."""
        self._launch(*varying)

    def _by_triton(self, *varying: Varying) -> None:
        arguments = self._arguments.copy()
        for (place, described), tensor in zip(self._varying, varying, strict=True):
            arguments[place] = tensor
            if described is not None:
                shape, strides, block = described
                if place in self._open_places:
                    assert isinstance(tensor, torch.Tensor)
                    shape = [tensor.shape[0], *shape[1:]]
                arguments[place] = TensorDescriptor(tensor, shape, strides, block)
        self._run(*arguments)


def _with_scratch(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``run`` with an allocator for the memory in which the kernel makes tensor maps. After a launch, the caller's
    allocator is in force again."""
    import contextvars

    def launch(*arguments: Any) -> None:
        def inside() -> None:
            triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
            run(*arguments)

        contextvars.copy_context().run(inside)

    return launch


_SCRATCH: dict[torch.device, list[torch.Tensor]] = {}
_SMALLEST_SCRATCH = 1 << 20
"""In bytes. Enough for the kernels of groups of up to 8 ranks."""


def _scratch(size: int, device: torch.device) -> torch.Tensor:
    """At least ``size`` bytes of the device's memory. Kernels share it, because they run one after the other. It is
    never freed, because CUDA graphs hold its address."""
    known = _SCRATCH.setdefault(device, [])
    if not known or known[-1].numel() < size:
        known.append(lasting_bytes(max(size, _SMALLEST_SCRATCH), device))
    return known[-1]


class _Direct:
    """Calls the C launcher that Triton 3.6's ``CudaLauncher`` wraps. It passes tensor maps that are already encoded.

    Args:
        arguments: examples of all arguments, in the kernel's order.
        places: indices of the varying arguments, in a launch's order.
        open_places: those whose number of rows varies, too (``any_rows``).
        documented: the function that launches the kernel in the documented way (see the module's docstring).
    """

    def __init__(
        self,
        compiled: Any,
        grid: int,
        arguments: Sequence[Any],
        places: Sequence[int],
        open_places: Collection[int],
        scratch: torch.device | None,
        documented: Callable[..., None],
    ) -> None:
        from triton.backends.nvidia import driver

        run = compiled.run
        # For a kernel with descriptors, Triton wraps the C launcher in a function that encodes tensor maps.
        closure = inspect.getclosurevars(run.launch).nonlocals if inspect.isfunction(run.launch) else {}
        self._launcher = closure.get("launcher", run.launch)
        self._documented = documented
        self._device = next(a.device.index for a in arguments if isinstance(a, torch.Tensor) and a.is_cuda)
        size = run.global_scratch_size * run.num_ctas * grid
        scratch_memory = _scratch(size, scratch) if size and scratch is not None else None
        launch = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, scratch_memory, None)
        # The launcher's values: grid, stream, facts of the launch, kernel arguments. A descriptor takes several values.
        values: list[Any] = [grid, 1, 1, None, *launch, compiled.packed_metadata, None, None, None]
        encode = triton.runtime.driver.active.utils.fill_tma_descriptor
        maps = iter(compiled.metadata.tensordesc_meta or ())
        # Where each argument is in these values: an index, or a slice for a descriptor.
        found: list[tuple[Any, _Maps | None]] = []
        for place, argument in enumerate(arguments):
            begin = len(values)
            if isinstance(argument, TensorDescriptor):
                types = driver.TMA_DTYPE_DEVICE_TO_HOST
                known = _Maps(argument, next(maps), encode, types, place in open_places)
                values += known.flat(argument.base)
                found.append((slice(begin, len(values)), known))
            else:
                values.append(argument)
                found.append((begin, None))
        self._varying = [found[place] for place in places]
        for at, _ in self._varying:
            values[at] = [None] * (at.stop - at.start) if isinstance(at, slice) else None
        self._values = values
        # ``values`` does not keep the tensors of descriptors alive. ``compiled`` keeps ``compiled.function`` loaded.
        self._alive = compiled, [a for number, a in enumerate(arguments) if number not in places]

    def __call__(self, *varying: Varying) -> None:
        hooks = triton.knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            # A profiler's hooks need what only Triton's own launcher gives them.
            self._documented(*varying)
            return
        values = self._values.copy()
        values[_STREAM] = torch._C._cuda_getCurrentRawStream(self._device)
        for (at, known), tensor in zip(self._varying, varying, strict=True):
            if known is not None:
                values[at] = known.flat(tensor)
            else:
                values[at] = tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor
        self._launcher(*values)


class _Maps:
    """What the C launcher gets for one descriptor argument, by the address of the tensor, and by its number of rows if
    ``any_rows``."""

    def __init__(
        self,
        example: TensorDescriptor,
        meta: dict[str, Any],
        encode: Callable[..., Any],
        dtypes: dict[int, int],
        any_rows: bool,
    ) -> None:
        self._shape, self._strides, self._any_rows = list(example.shape), list(example.strides), any_rows
        self._meta = meta["swizzle"], meta["elem_size"], dtypes[meta["elem_type"]], meta["block_size"]
        self._encode = encode
        self._known: dict[tuple[int, int], list[Any]] = {}

    def flat(self, tensor: torch.Tensor) -> list[Any]:
        """The tensor map, shape and strides of ``tensor``: always the same number of values."""
        key = address, rows = tensor.data_ptr(), tensor.shape[0] if self._any_rows else self._shape[0]
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            shape = [rows, *self._shape[1:]]
            found = [self._encode(address, *self._meta, shape, self._strides, 0), *shape, *self._strides]
            self._known[key] = found
        return found
