# SPDX-License-Identifier: Apache-2.0
"""Runs Inductor's compile of a graph up to and including its post-grad passes. ``explain`` needs no more."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch

from overlap_inductor.inductor import compile_scope
from overlap_inductor.inductor.compile_scope import CompileScope


def run_post_grad_passes(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], scope: CompileScope) -> None:
    """Run the steps of ``compile_fx_inner`` that precede lowering: propagate shapes, then run the post-grad passes.

    Args:
        gm: the graph that AOTAutograd made; changed in place.
        scope: the compile scope that is current while the passes run. It collects their reports.

    Raises:
        Exception: what a pass raises.
    """
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(gm)
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(gm, example_inputs)
    compile_fx._recursive_record_original_output_strides(gm)
    with compile_scope.entered(scope), V.set_fake_mode(fake_mode):
        compile_fx._recursive_post_grad_passes(gm, is_inference=scope.is_inference)


def zeros_like_outputs(gm: torch.fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """A function that returns zeros with the shapes, strides, dtypes and devices of the outputs of ``gm``.

    It takes the inputs of ``gm`` as one list and clears the list (the boxed calling convention). Symbolic sizes come
    from the inputs; sizes that depend on data become 1. Outputs that are no tensors are returned as they are, or as the
    value of their symbol.
    """
    from torch.fx.experimental.symbolic_shapes import SymTypes

    inputs = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    (outputs,) = gm.graph.output_node().args
    assert isinstance(outputs, (list, tuple))
    values = [n.meta.get("val") if isinstance(n, torch.fx.Node) else n for n in outputs]

    def number(size: Any, known: dict[Any, Any]) -> Any:
        if not isinstance(size, SymTypes):
            return size
        value = size.node.expr.xreplace(known)
        # If a symbol is left, the size depends on data (``nonzero``, ...). Then any size will do.
        return 1 if getattr(value, "free_symbols", None) else int(value)

    def run(args: list[Any]) -> list[Any]:
        known: dict[Any, Any] = {}
        for fake, real in zip(inputs, args, strict=True):
            pairs = [(fake, real)]
            if isinstance(fake, torch.Tensor):
                pairs = [*zip(fake.shape, real.shape, strict=True), *zip(fake.stride(), real.stride(), strict=True)]
            known.update((f.node.expr, r) for f, r in pairs if isinstance(f, SymTypes) and f.node.expr.is_Symbol)
        args.clear()

        def zero(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return number(value, known)
            size, stride = ([number(s, known) for s in sizes] for sizes in (value.shape, value.stride()))
            return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device).zero_()

        return [zero(value) for value in values]

    setattr(run, "_boxed_call", True)
    return run


_stops = False


@contextmanager
def stopped_before_code() -> Iterator[None]:
    """In this context, compiles stop after the post-grad passes, if our hooks are installed. The compiled function
    returns zeros."""
    global _stops
    outer, _stops = _stops, True
    try:
        with every_graph_compiled_now():
            yield
    finally:
        _stops = outer


def stops() -> bool:
    return _stops


@contextmanager
def every_graph_compiled_now() -> Iterator[None]:
    """In this context, the first call of a compiled function compiles all of the function's graphs. AOTAutograd's cache
    is off, and a backward is compiled with its forward."""
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        yield


def without_compile_wrappers(fn: Any) -> Any:
    """The function or module that was passed to ``torch.compile``; ``fn`` itself if it is not compiled."""
    from torch._dynamo.eval_frame import innermost_fn

    return innermost_fn(getattr(fn, "_orig_mod", fn))


@contextmanager
def in_place_compile_undone(fn: Any) -> Iterator[None]:
    """In this context, earlier calls of ``module.compile()`` on modules of ``fn`` have no effect. Without this
    context, a module that is compiled in place would run Inductor's code generation."""
    modules = list(fn.modules()) if hasattr(fn, "modules") else []
    calls = [(m, m._compiled_call_impl) for m in modules if getattr(m, "_compiled_call_impl", None) is not None]
    for module, _ in calls:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in calls:
            module._compiled_call_impl = call
