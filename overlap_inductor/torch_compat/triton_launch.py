"""Launching one Triton kernel again and again with little of the host's time. What is private of Triton is touched here
only.

``kernel[grid](...)`` looks at every argument anew and encodes every tensor map anew: 75 us for 50 arguments with four
tensor maps (Triton 3.6). A ``PreparedKernel`` is compiled and loaded once, for arguments of which only addresses change
from launch to launch, and remembers a tensor map by its address: 8 us. It goes past Triton's launcher for that, whose
inside differs from version to version, so other versions than those of ``_DIRECT`` are launched by the documented way,
``compiled[grid](...)``: 32 us.

Compiling and loading happen before the first launch, not in it: loading a module waits for the device, and a kernel of
the same op may already be waiting there for what is to be loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from overlap_inductor.torch_compat.symmetric import lasting_bytes

_DIRECT = ("3.6.",)
_REMEMBERED = 256
"""Tensor maps remembered for an argument. (They own no memory, and an address says all that differs.)"""


class PreparedKernel:
    """``kernel[(grid,)](*varying, *fixed, **options)``, compiled and loaded.

    Args:
        varying: examples of the arguments that a launch is given anew: tensors, or tensor descriptors. Shapes, strides,
            dtypes and the alignment to 16 bytes stay.
        fixed: all other arguments in order, constants too; kept alive.
        scratch: device on which the kernel needs memory for tensor maps of its own, or ``None``.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        varying: Sequence[Any],
        fixed: Sequence[Any],
        scratch: torch.device | None = None,
        **options: Any,
    ) -> None:
        self._descriptors = [
            (v.shape, v.strides, v.block_shape) if isinstance(v, TensorDescriptor) else None for v in varying
        ]
        self._fixed = list(fixed)
        arguments = [*varying, *fixed]
        if triton.knobs.runtime.interpret:
            self._run: Callable[..., Any] = lambda *a: kernel[(grid,)](*a, **options)
            self._launch = self._by_triton
            return
        compiled = kernel.warmup(*arguments, grid=(grid,), **options)
        # (This loads it.)
        self._run = compiled[(grid, 1, 1)]
        self._launch = self._by_triton
        if scratch is not None:
            self._run = _with_scratch(self._run, scratch)
        if triton.__version__.startswith(_DIRECT):
            self._launch = _Direct(compiled, grid, arguments, len(varying), scratch, self._by_triton)

    def __call__(self, *varying: torch.Tensor | None) -> None:
        """Launch on the current stream. ``varying``: tensors, also for tensor descriptors."""
        self._launch(*varying)

    def _by_triton(self, *varying: torch.Tensor | None) -> None:
        described = [
            v if d is None else TensorDescriptor(v, *d) for v, d in zip(varying, self._descriptors, strict=True)
        ]
        self._run(*described, *self._fixed)


def _with_scratch(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``run`` with an allocator for the kernel's own memory, which leaves the caller's as it is."""
    import contextvars

    def launch(*arguments: Any) -> None:
        def inside() -> None:
            triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
            run(*arguments)

        contextvars.copy_context().run(inside)

    return launch


_SCRATCH: dict[torch.device, list[torch.Tensor]] = {}
_SMALLEST_SCRATCH = 1 << 20
"""Bytes; what the kernels of up to 8 ranks need."""


def _scratch(size: int, device: torch.device) -> torch.Tensor:
    """Memory of a device that all kernels share, which run one after the other there. It is never given back: CUDA
    graphs hold its address."""
    known = _SCRATCH.setdefault(device, [])
    if not known or known[-1].numel() < size:
        known.append(lasting_bytes(max(size, _SMALLEST_SCRATCH), device))
    return known[-1]


class _Direct:
    """Triton 3.6: the C launcher below ``CudaLauncher``, with tensor maps that are already encoded."""

    def __init__(
        self,
        compiled: Any,
        grid: int,
        arguments: Sequence[Any],
        varying: int,
        scratch: torch.device | None,
        documented: Callable[..., None],
    ) -> None:
        from triton.backends.nvidia import driver

        run = compiled.run
        # (Around the C launcher stands a function that encodes tensor maps, where a kernel has such arguments.)
        closure = inspect.getclosurevars(run.launch).nonlocals if inspect.isfunction(run.launch) else {}
        self._launcher = closure.get("launcher", run.launch)
        self._encode = triton.runtime.driver.active.utils.fill_tma_descriptor
        self._documented = documented
        self._device = next(a.device.index for a in arguments if isinstance(a, torch.Tensor) and a.is_cuda)
        size = run.global_scratch_size * run.num_ctas * grid
        scratch_memory = _scratch(size, scratch) if size and scratch is not None else None
        self._grid = (grid, 1, 1)
        self._head = (
            compiled.function,
            run.launch_cooperative_grid,
            run.launch_pdl,
            scratch_memory,
            None,
            compiled.packed_metadata,
            None,
            None,
            None,
        )
        maps = iter(compiled.metadata.tensordesc_meta or ())
        self._varying: list[_Maps | None] = []
        self._tail: list[Any] = []
        for i, argument in enumerate(arguments):
            known = (
                _Maps(argument, next(maps), self._encode, driver.TMA_DTYPE_DEVICE_TO_HOST)
                if isinstance(argument, TensorDescriptor)
                else None
            )
            if i < varying:
                self._varying.append(known)
            else:
                self._tail += [argument] if known is None else known.flat(argument.base)
        # (Kept alive: the launcher is given addresses, and the function is its module's.)
        self._alive = compiled, arguments[varying:]

    def __call__(self, *varying: torch.Tensor | None) -> None:
        hooks = triton.knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            # A profiler looks on, and wants what only Triton's launcher tells it.
            self._documented(*varying)
            return
        flat: list[Any] = []
        for known, tensor in zip(self._varying, varying, strict=True):
            if known is not None:
                flat += known.flat(tensor)  # type: ignore[arg-type]
            else:
                flat.append(tensor if tensor is None else tensor.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._launcher(*self._grid, stream, *self._head, *flat, *self._tail)


class _Maps:
    """Tensor maps of one descriptor argument, by the address of its tensor, flattened as the C launcher wants them."""

    def __init__(
        self, example: TensorDescriptor, meta: dict[str, Any], encode: Callable[..., Any], dtypes: dict[int, int]
    ) -> None:
        self._shape, self._strides = list(example.shape), list(example.strides)
        self._meta = (
            meta["swizzle"],
            meta["elem_size"],
            dtypes[meta["elem_type"]],
            meta["block_size"],
            self._shape,
            self._strides,
            0,
        )
        self._encode = encode
        self._known: dict[int, list[Any]] = {}

    def flat(self, tensor: torch.Tensor) -> list[Any]:
        address = tensor.data_ptr()
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = [self._encode(address, *self._meta), *self._shape, *self._strides]
            self._known[address] = found
        return found
