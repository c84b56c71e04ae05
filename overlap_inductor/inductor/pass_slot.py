# SPDX-License-Identifier: Apache-2.0
"""The settings of Inductor that hold custom passes, and our passes in the form that these settings expect. A *slot* is
one of these settings. Its name here is a key of ``SETTINGS``.

``post_grad_custom_post_pass`` and ``joint_custom_post_pass`` differ between versions of torch:

- Up to 2.12, a setting holds one callable. From 2.13 on, it holds a callable or a list.
- Up to 2.11, all threads see an assigned value. From 2.12 on, only the assigning thread does.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass

from overlap_inductor.config import OverlapConfig
from overlap_inductor.inductor import compile_scope
from overlap_inductor.inductor import import_hook
from overlap_inductor.passes.pipeline import JOINT
from overlap_inductor.passes.pipeline import POST_GRAD
from overlap_inductor.passes.pipeline import GraphContext
from overlap_inductor.passes.pipeline import passes_in
from overlap_inductor.passes.sequence_parallel import rewritten
from overlap_inductor.passes.snapshot import copy_into
from overlap_inductor.report.report import OverlapReport
from overlap_inductor.sites.collectives import find_collectives
from overlap_inductor.torch_compat.graph_inputs import nested_region
from overlap_inductor.torch_compat.plain_errors import shown_plainly

SETTINGS = {POST_GRAD: "post_grad_custom_post_pass", JOINT: "joint_custom_post_pass"}
SLOT = SETTINGS[POST_GRAD]
TAKES_LIST = hasattr(custom_graph_pass, "get_custom_graph_passes")
MICRO_PIPELINE_NOTICE = (
    "torch._inductor.config._micro_pipeline_tp is on: PyTorch's own pass runs first and takes the all-gather and "
    "reduce-scatter sites that it knows. Switch it off to let overlap_inductor decide about them."
)

_Base: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)


class OverlapPass(_Base):
    """The pipeline's passes of one ``slot``, as Inductor calls them. ``source`` returns the configuration. If the
    configuration is ``None`` or has mode ``off``, the passes do nothing."""

    def __init__(self, source: Callable[[], OverlapConfig | None], slot: str = POST_GRAD) -> None:
        self._source, self.slot = source, slot

    def config(self) -> OverlapConfig | None:
        """The configuration for the graph being compiled. A compile scope (``CompileScope``) has facts about this
        graph. A pinned scope, such as a backward's, also has the configuration that the graph must use. If the current
        scope is not pinned, or if there is no scope, the graph uses what ``source`` returns now."""
        scope = compile_scope.current()
        return scope.config if scope is not None and scope.pinned else self._source()

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        scope = compile_scope.current()
        if scope is not None:
            # The pass may be installed twice, for example also in another author's chain. It runs once for each graph.
            if id(graph) in scope.seen:
                return
            scope.seen[id(graph)] = graph
        with shown_plainly():
            config = self.config()
        if config is None or config.mode == "off":
            return
        if (
            is_inference is None and self.slot == POST_GRAD
        ):  # torch 2.11, or a chain that calls its passes with the graph alone
            is_inference = scope is not None and scope.is_inference
        refusal = compile_scope.refusal_context()
        if self.slot == JOINT:
            refusal = refusal or nested_region(graph)
        context = GraphContext(config, is_inference, compile_scope.current_graph_name() or "graph", refusal)
        if self.slot == JOINT:
            from torch._inductor.pattern_matcher import stable_topological_sort

            # Inductor sorts the joint graph only after this slot, so nodes may stand before their inputs.
            stable_topological_sort(graph)
        written = _copy_of_inference(graph) if self.slot == JOINT else None
        for one in passes_in(self.slot):
            report = one.run(graph, context)
            if report is not None:
                self._take(report, config)
        if written is not None and rewritten(graph):
            compile_scope.keep_as_written(graph.owning_module, written)
        _register_lowerings_of(graph)

    def _take(self, report: OverlapReport, config: OverlapConfig) -> None:
        """Leave the report in the compile scope. If there is no scope, publish the report now."""
        scope = compile_scope.current()
        if inductor_config._micro_pipeline_tp:
            report.notices.append(MICRO_PIPELINE_NOTICE)
        if scope is not None:
            report.phase = scope.phase
            scope.reports.append(report)
            return
        from overlap_inductor.report import publish as reporting

        reporting.activate(report, config)

    def uuid(self) -> str:
        # A graph that Inductor loads from a cache calls our ops. Inductor asks for the uuid before it reads the cache,
        # so this method defines the ops.
        from overlap_inductor.inductor.fingerprint import fingerprint
        from overlap_inductor.lowerings.registry import define_ops

        define_ops()
        versions = "".join(f" {one.name}={one.version}" for one in passes_in(self.slot) if one.version)
        return fingerprint(self.config()) + versions

    def __deepcopy__(self, memo: dict[int, Any]) -> OverlapPass:
        # Inductor may deep-copy its configuration. ``switch.install`` recognises the pass by identity, so a copy must
        # be the pass itself.
        return self


def _copy_of_inference(graph: torch.fx.Graph) -> torch.fx.GraphModule | None:
    """A copy of ``graph`` if it is an inference graph with a collective; else ``None``. Ranks run the copy if their
    plans differ."""
    trains = any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder"))
    if trains or graph.owning_module is None or not any(True for _ in find_collectives(graph)):
        return None
    copied = torch.fx.Graph()
    copy_into(graph, copied)
    return torch.fx.GraphModule(graph.owning_module, copied)


def _register_lowerings_of(graph: torch.fx.Graph) -> None:
    from overlap_inductor.lowerings.library import NAMESPACE
    from overlap_inductor.torch_compat.operators import qualified_name

    if any(qualified_name(node)[0] == NAMESPACE for node in graph.nodes):
        from overlap_inductor.inductor.lowerings import register_lowerings

        register_lowerings()


class PassChain(_Base):
    """Several passes as one, for a slot that holds only one pass. Inductor caches the graphs of a chain only if each
    pass of the chain has a uuid."""

    def __init__(self, passes: tuple[Callable[..., None], ...]) -> None:
        self.passes = passes

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        aware = _Base is not custom_graph_pass.CustomGraphPass
        for one in self.passes:
            if aware and isinstance(one, _Base):
                one(graph, is_inference=is_inference)
            else:
                one(graph)

    def uuid(self) -> Any:
        uuids = [p.uuid() if isinstance(p, custom_graph_pass.CustomGraphPass) else None for p in self.passes]
        return ("overlap_inductor.PassChain", *uuids) if all(uuids) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> PassChain:
        return self


def members(value: Any) -> tuple[Any, ...]:
    """The passes in a slot's value. A chain counts as its members."""
    if value is None:
        return ()
    if isinstance(value, PassChain):
        return tuple(m for p in value.passes for m in members(p))
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def find(value: Any) -> OverlapPass | None:
    """Our pass in a slot's value, or ``None``. A pass inside another callable is not found."""
    return next((p for p in members(value) if isinstance(p, OverlapPass)), None)


def with_pass(value: Any, ours: OverlapPass) -> Any:
    """A slot's value with ``ours`` in place of an earlier pass of ours, else as the last pass."""
    passes = members(value)
    old = find(value)
    together = tuple(ours if p is old else p for p in passes) if old else (*passes, ours)
    return _packed(together, value, ours.slot)


def without_pass(value: Any) -> Any:
    """A slot's value without our pass. ``value`` itself if our pass is not in it."""
    ours = find(value)
    if ours is None:
        return value
    return _packed(tuple(p for p in members(value) if not isinstance(p, OverlapPass)), value, ours.slot)


def _packed(passes: tuple[Any, ...], like: Any, slot: str) -> Any:
    if len(passes) < 2:
        return passes[0] if passes else None
    # The joint slot gets a list only if it already holds one.
    takes_list = TAKES_LIST and (slot == POST_GRAD or isinstance(like, (list, tuple)))
    if not takes_list:
        return PassChain(passes)
    return passes if isinstance(like, tuple) else list(passes)


def read(slot: str = POST_GRAD) -> Any:
    return getattr(inductor_config, SETTINGS[slot])


def write(value: Any, slot: str = POST_GRAD) -> None:
    if value is not read(slot):
        setattr(inductor_config, SETTINGS[slot], value)


def set_for_other_threads(ours: OverlapPass | None, slot: str = POST_GRAD) -> None:
    """Set the slot's default, for threads that have not assigned the slot, such as a server's workers.

    A thread that has read a pass keeps it, because torch copies the default at the first read. Before torch 2.12, this
    does nothing: all threads see what ``write`` assigned.
    """
    entry = inductor_config._config[SETTINGS[slot]]
    if isinstance(entry.user_override, ContextVar):
        entry.default = ours


@contextmanager
def patched(value: Any) -> Iterator[None]:
    with inductor_config.patch({SLOT: value}):
        yield


def describe(value: Any) -> str:
    passes = members(value)
    if not passes:
        return "nothing"
    return ", ".join(f"{_name(p)} (module {getattr(p, '__module__', '?')})" for p in passes)


def _name(one: Any) -> str:
    return getattr(one, "__qualname__", None) or type(one).__qualname__


import_hook.resume()
