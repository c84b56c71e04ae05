# SPDX-License-Identifier: Apache-2.0
"""Wraps functions of Inductor, mainly to store a graph's report with the compiled graph.

On a cache hit, Inductor runs no pass, so the report must come with the graph::

    pass -> scope.reports -> attribute of CompiledFxGraph -> pickled into the FX graph cache, the AOTAutograd cache and
                                                             torch.compiler.save_cache_artifacts()
    CompiledFxGraph.post_compile (after a compile and after a load) -> activates the report, and wraps the graph's
                                                             callable: a call compares plans, then runs the graph

To *activate* a report is to log, count and dump it.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from overlap_inductor.config import OverlapConfig
from overlap_inductor.errors import StrictError
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.inductor import compile_scope
from overlap_inductor.inductor import graph_breaks
from overlap_inductor.inductor import partitions
from overlap_inductor.inductor import plain_program
from overlap_inductor.inductor import post_grad
from overlap_inductor.inductor.compile_scope import CompileScope
from overlap_inductor.inductor.padding import beside_collective
from overlap_inductor.passes.sequence_parallel import rewritten
from overlap_inductor.report import publish as reporting
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.runtime import call_board
from overlap_inductor.torch_compat import step_values
from overlap_inductor.torch_compat.guards import without_guards
from overlap_inductor.torch_compat.plain_errors import shown_plainly
from overlap_inductor.torch_compat.target import target
from overlap_inductor.version import __version__

log = logging.getLogger("overlap_inductor")

ATTRIBUTE = "_overlap_inductor_reports"
PLAIN = "_overlap_inductor_plain"
"""Attribute of a compiled graph with overlap: its plain program (``plain_program.Captured``)."""
OFF = "_overlap_inductor_off"
"""Attribute of a compiled graph that has collectives but that our pass did not see: the names of its process groups."""


def _nothing() -> OverlapConfig | None:
    return None


_expected: Callable[[], OverlapConfig | None] = _nothing
_lock = threading.RLock()
_wrapped: list[tuple[Any, str, Any, Any]] = []
_shared_pass: Any = None
_forward_configs: dict[int, OverlapConfig | None] = {}
_warned: set[str] = set()


class _Local(threading.local):
    deferred: list[StrictError] | None = None


_local = _Local()


class _Attached(str):
    """The reports of a compiled graph, as JSON. An ``_Attached`` is pickled as a plain ``str``. So the type of the
    reports of a graph tells two cases apart:

    - a plain ``str`` if the graph was loaded from a cache and its reports are not activated yet;
    - an ``_Attached`` if this process has compiled the graph or has activated its reports. ``known`` is true once the
      reports are activated.
    """

    known = False

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def install(expected: Callable[[], OverlapConfig | None], shared_pass: Any) -> None:
    """Wrap Inductor's functions, once.

    Args:
        expected: returns the configuration that is switched on, or ``None``.
        shared_pass: the pass for a backward that is compiled while Inductor's setting for custom passes
            (``pass_slot.SLOT``) does not hold our pass (``_follow_forward``).
    """
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor import compile_fx
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.fx_utils import FakeTensorUpdater
    from torch._inductor.ir import ComputedBuffer
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.scheduler import BaseSchedulerNode
    from torch._inductor.scheduler import Scheduler

    from overlap_inductor.inductor import rank_symbol

    global _expected, _shared_pass
    with _lock:
        _expected, _shared_pass = expected, shared_pass
        if _wrapped:
            return
        _wrap(compile_fx, "_compile_fx_inner", _compile_fx_inner)
        _wrap(compile_fx, "fx_codegen_and_compile", _fx_codegen_and_compile)
        _wrap(CompiledFxGraph, "post_compile", _post_compile)
        _wrap(AOTAutogradCache, "try_load", _try_load)
        _wrap(FakeTensorUpdater, "incremental_update", _incremental_update)
        _wrap(pad_mm, "should_pad", _should_pad)
        _wrap(BaseSchedulerNode, "has_aliasing_or_mutation", _has_aliasing_or_mutation)
        _wrap(Scheduler, "compute_dependencies", rank_symbol.compute_dependencies)
        _wrap(ComputedBuffer, "get_read_writes", rank_symbol.read_writes)
        _wrap(scheduler, "get_scheduler_node_symbol_uses", rank_symbol.symbol_uses)
        _wrap(Scheduler, "graph_partition", partitions.graph_partition)
        _wrap(Scheduler, "should_partition", partitions.should_partition)


def uninstall() -> None:
    """Restore Inductor's functions. A wrapper that other code has wrapped stays, and only calls the original."""
    global _expected, _shared_pass
    with _lock:
        for owner, name, original, replacement in _wrapped:
            if vars(owner)[name] is replacement:
                setattr(owner, name, original)
        _wrapped.clear()
        _forward_configs.clear()
        _warned.clear()
        _expected, _shared_pass = _nothing, None


def installed() -> bool:
    return bool(_wrapped)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = vars(owner)[name]
    function = original.__func__ if isinstance(original, staticmethod) else original

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _wrapped:
            return function(*args, **kwargs)
        with shown_plainly():
            return around(function, *args, **kwargs)

    replacement: Any = staticmethod(call) if isinstance(original, staticmethod) else call
    setattr(owner, name, replacement)
    _wrapped.append((owner, name, original, replacement))


def config_in_effect() -> OverlapConfig | None:
    """The configuration for the graph that this thread compiles or loads. If overlap is off: ``None``, or mode ``off``.

    Raises:
        ConfigError: a switch in the environment has a value that is not allowed.
    """
    from overlap_inductor.inductor import pass_slot

    scope = compile_scope.current()
    if scope is not None and scope.pinned:
        return scope.config
    ours = pass_slot.find(pass_slot.read())
    return ours.config() if ours is not None else _expected()


def _compile_fx_inner(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    forced = compile_scope.forced()
    scope = forced or CompileScope.of(kwargs)
    with ExitStack() as stack:
        if scope.is_backward and scope.graph_id in _forward_configs:
            _follow_forward(scope, stack)
        stack.enter_context(compile_scope.entered(scope))
        # A bad value in the environment must fail the compile even on a cache hit.
        config = config_in_effect()
        if config is not None and config.mode in ("on", "strict"):
            call_board.announce()
        result = _stopped(scope, *args[:2]) if post_grad.stops() else original(*args, **kwargs)
    if not forced and not scope.is_backward and not scope.is_inference and scope.graph_id is not None:
        _forward_configs[scope.graph_id] = None if scope.without_us else config
    return result


def _stopped(scope: CompileScope, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Run only the post-grad passes of ``gm`` and activate its reports. Returns a function that returns zeros."""
    post_grad.run_post_grad_passes(gm, example_inputs, scope)
    if not scope.seen:
        _warn_overwritten()
    reports = scope.take_reports()
    if (box := target()) is not None:
        for report in reports:
            report.notices.append(
                f"planned for {box.name} ({box.title}), not for the machine that this graph was seen on"
            )
    _make_known(reports, from_cache=False)
    return post_grad.zeros_like_outputs(gm)


def _follow_forward(scope: CompileScope, stack: ExitStack) -> None:
    """Pin a backward to its forward's configuration. The backward may be compiled outside the forward's ``with
    overlap()``, or on another thread."""
    from overlap_inductor.inductor import pass_slot

    assert scope.graph_id is not None
    scope.pinned, scope.config = True, _forward_configs[scope.graph_id]
    value = pass_slot.read()
    if scope.config is not None and pass_slot.find(value) is None:
        stack.enter_context(pass_slot.patched(pass_slot.with_pass(value, _shared_pass)))


def _fx_codegen_and_compile(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    scope = compile_scope.current()
    if scope is None:
        return original(*args, **kwargs)
    groups, plain = _groups_of(args[0]), None
    config = config_in_effect()
    if groups and config is not None and config.mode in ("on", "strict"):
        try:
            plain = _plain_program(args[0], args[1])
        # The graph may hold an object that cannot be pickled. Then nothing is overlapped.
        except Exception as error:  # noqa: BLE001
            scope.refusal = (
                "the graph cannot be kept for a run without overlap, which is needed if the ranks differ"
                f" ({type(error).__name__}: {error})"
            )
    try:
        output = original(*args, **kwargs)
    except Exception:
        # The report may explain why the compile failed.
        _make_known(scope.take_reports(), from_cache=False, strict=False)
        raise
    if not scope.seen:
        _warn_overwritten()
    reports = scope.take_reports()
    from torch._inductor.output_code import CompiledFxGraph

    if isinstance(output, CompiledFxGraph):
        if reports:
            setattr(output, ATTRIBUTE, _Attached(json.dumps([r.to_json(graphs=True) for r in reports])))
            if any(r.plan_hash for r in reports):
                setattr(output, PLAIN, plain)
        elif groups:
            setattr(output, OFF, groups)
    else:
        _make_known(reports, from_cache=False)
    return output


def _plain_program(gm: Any, example_inputs: Any) -> plain_program.Captured | None:
    """The plain program of ``gm``. ``None`` for a training graph that a pass on the joint graph has rewritten, because
    the rewrite has changed what the forward saves."""
    if not rewritten(gm.graph):
        return plain_program.capture(gm, example_inputs)
    written = compile_scope.as_written(gm)
    return plain_program.capture(written, example_inputs) if written is not None else None


def _groups_of(gm: Any) -> list[str]:
    """The process groups of the collectives in ``gm`` and its subgraphs."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    from overlap_inductor.sites.collectives import group_of

    modules = [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]
    names = (group_of(n) for m in modules for n in m.graph.nodes if n.op == "call_function")
    return list(dict.fromkeys(n for n in names if n is not None))


def _post_compile(original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(graph, *args, **kwargs)
    text = getattr(graph, ATTRIBUTE, None)
    scope = compile_scope.current()
    if text is None and scope is not None:
        scope.without_us = True
    if compile_scope.forced() is not None:
        return result
    if text is None:
        if groups := getattr(graph, OFF, None):
            _compare_calls(graph, [_switched_off(groups)], *args, **kwargs)
        return result
    try:
        reports = [OverlapReport.from_json(one) for one in json.loads(text)]
    except ValueError as error:
        log.warning("the overlap report stored with a compiled graph cannot be read: %s", error)
        return result
    if not getattr(text, "known", False):
        from_cache = not isinstance(text, _Attached)
        known = _Attached(text)
        known.known = True
        setattr(graph, ATTRIBUTE, known)
        _make_known(reports, from_cache)
    _compare_calls(graph, reports, *args, **kwargs)
    return result


def _compare_calls(
    graph: Any, reports: list[OverlapReport], example_inputs: Any, constants: Any, graph_kwargs: Any
) -> None:
    if not any(r.groups for r in reports) or graph.current_callable is None:
        return
    from overlap_inductor.inductor.compared_call import ComparedCall
    from overlap_inductor.inductor.compared_call import PlainProgram

    config, kept = config_in_effect(), getattr(graph, PLAIN, None)
    plain = None
    if kept is not None:
        gm = getattr(constants, "gm", None)
        kept = plain_program.of_this_process(kept, gm, example_inputs)
    if kept is not None:
        large = plain_program.left_out(gm, kept.left_out)
        # After a load from AOTAutograd's cache, ``graph_kwargs`` has only some of the compile's arguments. The others
        # are in ``graph.fx_kwargs``.
        keywords = plain_program.known_keywords({**graph.fx_kwargs, **graph_kwargs})
        plain = PlainProgram(kept.data, large, keywords, plain_program.inductor_settings(), graph.output_strides)
    on_accelerator = bool(set(graph.device_types) - {"cpu", "meta"})
    graph.current_callable = ComparedCall(
        graph.current_callable, reports, plain, on_accelerator, config.dump if config else None
    )


def _switched_off(groups: list[str]) -> OverlapReport:
    """The report of a graph that our pass did not see. Its calls compare plans, because other ranks may have
    overlap on."""
    plan = ExchangePlan(__version__, "off", groups=(tuple(groups),))
    return OverlapReport(
        __version__, torch.__version__, "off", "", "", 1, exchange=plan.to_json(), groups={name: [] for name in groups}
    )


def _incremental_update(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``FakeTensorUpdater.incremental_update``, which evaluates the shapes of nodes that a pass has added.

    In a graph with an overlapped site, this function lets Inductor skip nodes whose values are up to date, and keeps it
    from adding guards.
    """
    scope = compile_scope.current()
    if scope is None or not any(s.decision.status == "overlapped" for r in scope.reports for s in r.sites):
        return original(updater, *args, **kwargs)
    from torch._inductor.virtualized import V

    # In torch 2.11, the updater has ``graph`` and no ``gm``.
    graph = updater.gm.graph if hasattr(updater, "gm") else updater.graph
    updater.processed_hashes.update(updater.hash_node(n) for n in graph.nodes if step_values.up_to_date(n))
    with without_guards(V.fake_mode.shape_env):
        return original(updater, *args, **kwargs)


def _should_pad(original: Callable[..., bool], match: Any, *args: Any, **kwargs: Any) -> bool:
    """Around ``pad_mm.should_pad``: with overlap on, do not pad a matmul next to a collective (``padding``).

    Inductor's check runs first, because it is cheap and refuses most matmuls. Our check may visit many nodes.
    """
    if not original(match, *args, **kwargs):
        return False
    config = config_in_effect()
    on = config is not None and config.mode in ("on", "strict")
    return not (on and any(beside_collective(n) for n in match.output_nodes() if n is not None))


def _has_aliasing_or_mutation(original: Callable[..., bool], node: Any) -> bool:
    """Around ``BaseSchedulerNode.has_aliasing_or_mutation``, which Inductor calls only before it fuses nodes.

    Inductor fuses no node into a template if the node's output aliases a buffer. This function allows the fusion of a
    node that writes a piece straight to its place in a whole tensor. The fusion is safe: readers of the whole tensor
    wait for all pieces, and no other node writes to that place.
    """
    outputs = node.get_outputs()
    if (
        compile_scope.current() is None
        or not outputs
        or not all(getattr(o.node, "overlap_piece", False) for o in outputs)
    ):
        return original(node)
    return any(o.get_mutations() for o in outputs)


def _try_load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``AOTAutogradCache.try_load``: raise a ``StrictError`` after the load. During the load, AOTAutograd would
    take the error for a cache miss."""
    if (config := config_in_effect()) is not None and config.mode in ("on", "strict"):
        call_board.announce()
    outer, _local.deferred = _local.deferred, []
    try:
        result = original(*args, **kwargs)
        errors = _local.deferred
    finally:
        _local.deferred = outer
    if errors:
        raise errors[0]
    return result


def _make_known(reports: list[OverlapReport], from_cache: bool, strict: bool = True) -> None:
    """Log, count and dump the reports. Without ``strict``, each ``StrictError`` of a report is dropped. With
    ``strict``, the error is raised here, but during a load from AOTAutograd's cache it is left to ``_try_load``."""
    config = config_in_effect()
    for report in reports:
        report.graph = compile_scope.current_graph_name() or report.graph
        report.notices += graph_breaks.new_notices()
        try:
            reporting.activate(report, config, from_cache=from_cache)
        except StrictError as error:
            if not strict:
                continue
            if _local.deferred is None:
                raise
            _local.deferred.append(error)


def _warn_overwritten() -> None:
    """Warn that overlap is on, but Inductor's setting for custom passes (``pass_slot.SLOT``) does not hold our pass.
    Warn once for each value of the setting."""
    from overlap_inductor.inductor import pass_slot

    scope = compile_scope.current()
    config = config_in_effect()
    if config is None or config.mode == "off" or (scope is not None and scope.pinned):
        return
    found = pass_slot.describe(pass_slot.read())
    if found not in _warned:
        _warned.add(found)
        log.warning(
            "overlap_inductor is switched on, but torch._inductor.config.%s was changed afterwards and now holds %s: "
            "nothing is overlapped in graphs compiled since. Call overlap_inductor.enable() after this setting is "
            "assigned, or add to what it holds instead of replacing it.",
            pass_slot.SLOT,
            found,
        )
