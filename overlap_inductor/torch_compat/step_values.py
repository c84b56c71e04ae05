# SPDX-License-Identifier: Apache-2.0
"""Evaluates the values (``meta["val"]``) of the nodes that a rewrite creates. Equal nodes are evaluated once.

The layers of a model have equal steps: the same operators on tensors of the same sizes. Evaluating all 2750 steps of 32
layers took most of the pass's time. Nodes with a symbolic size are evaluated each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.guards import without_guards

_MARK = "overlap_inductor_valued"
NOT_COPIED = ("val", "tensor_meta", "eager_input_vals", "unbacked_bindings", "from_node", "original_aten")
"""Metadata that a rewrite does not copy to a new node: it describes the old node's value or operator."""


class StepValues:
    """Evaluates the steps of one graph. ``evaluated`` counts the nodes whose fake functions ran."""

    def __init__(self) -> None:
        self.evaluated = 0
        self._mode: Any = None
        self._known: dict[Any, _Result] = {}

    def evaluate(self, node: fx.Node, site: str) -> Any:
        """Returns the result of ``node`` for the fake tensors of its arguments. Marks the node as up to date
        (``up_to_date``).

        Args:
            site: the site's id. The node may take this id as an argument, but the result does not depend on the id.
        """
        mark(node)
        return self._value(node, site, self._called)

    def result(self, node: fx.Node) -> Any:
        """The result of ``node`` for the values of its arguments, without a new guard. Does not mark the node."""
        return self._value(node, "", computed)

    def _value(self, node: fx.Node, site: str, compute: Callable[..., Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        try:
            key: Any = (node.target, _key(args, site), _key(kwargs, site))
        except _NotAKey:
            key = None
        found = self._known.get(key) if key is not None else None
        if found is not None:
            return found.made(args)
        self.evaluated += 1
        value = compute(node.target, *args, **kwargs)
        if key is not None and (result := _Result.of(node.target, value, args, kwargs)) is not None:
            self._known[key] = result
        return value

    def _called(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        # A graph has one fake mode.
        mode = self._mode = self._mode or operators.fake_mode((args, kwargs))
        # A comparison of symbolic sizes must not become a guard: the model was traced without it.
        with mode, without_guards(mode.shape_env):
            return function(*args, **kwargs)

    def keep(self, node: fx.Node) -> None:
        """Call this after an argument of ``node`` was replaced. Marks ``node`` as up to date if a new evaluation
        gives the sizes, strides, offset, dtype and device of the old value.

        A view gets the new value, because it shares memory with its argument. Views of this view get new values, too.
        If one of these views cannot be evaluated here, all are left to Inductor.

        An unmarked node gets a new value with another storage from Inductor. Inductor then evaluates every node that
        depends on it.
        """
        pending = [node]
        views: list[tuple[fx.Node, Any]] = []
        while pending:
            reader = pending.pop()
            old = reader.meta.get("val")
            anew = self._as_before(reader)
            if anew is None:
                for view, before in views:
                    view.meta["val"] = before
                    view.meta.pop(_MARK, None)
                return
            if anew is old:
                continue
            reader.meta["val"] = anew
            views.append((reader, old))
            memory = _memory(old)
            # Inductor does not evaluate the graph's output either.
            views_of_it = (u for u in reader.users if memory in map(_memory, _strided(u.meta.get("val"))))
            pending += [u for u in views_of_it if u.op != "output"]

    def _as_before(self, node: fx.Node) -> FakeTensor | None:
        """The value of ``node`` for its present arguments: the stored value or, for a view, a new one. Marks the node.
        Returns ``None``, without a mark, if the node cannot be evaluated here, or if layout, dtype or device change."""
        value = node.meta.get("val")
        if operators.operator(node) is None or operators.is_mutable(node) or not isinstance(value, FakeTensor):
            return None
        lies = _lies(value)
        if lies is None or any("val" not in n.meta for n in node.all_input_nodes):
            return None
        inputs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        anew = self.evaluate(node, "")
        if not isinstance(anew, FakeTensor) or _lies(anew) != lies:
            del node.meta[_MARK]
            return None
        if _is_new(anew, inputs):
            return value
        if _memory(anew) in set(map(_memory, _strided(inputs))):
            return anew
        del node.meta[_MARK]
        return None


def evaluated(node: fx.Node) -> Any:
    """The result of ``node`` for the values of its arguments, without a new guard. Does not mark the node."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return computed(node.target, *args, **kwargs)


def computed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of ``function``, computed without adding a guard."""
    sizes = [v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.SymInt)]
    if not operators.tensors_in((args, kwargs)):
        with without_guards(sizes[0].node.shape_env if sizes else None):
            return function(*args, **kwargs)
    mode = operators.fake_mode((args, kwargs))
    # Some operators, such as ``constant_pad_nd``, take symbolic sizes only in Python.
    with mode, enable_python_dispatcher(), without_guards(mode.shape_env):
        return function(*args, **kwargs)


def mark(node: fx.Node) -> None:
    node.meta[_MARK] = (node.args, node.kwargs)


def up_to_date(node: fx.Node) -> bool:
    """Whether the node still has the arguments for which it was marked. Identity suffices: a node's arguments are
    replaced, never changed in place."""
    args, kwargs = node.meta.get(_MARK, (None, None))
    return args is node.args and kwargs is node.kwargs


def _memory(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata


def _strided(values: Any) -> list[torch.Tensor]:
    return [t for t in operators.tensors_in(values) if t.layout is torch.strided]


def _lies(value: FakeTensor) -> tuple[Any, ...] | None:
    """Sizes, strides, offset, dtype and device of ``value``. ``None`` if a number is symbolic or ``value`` is not
    strided."""
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if value.layout is not torch.strided or any(type(n) is not int for n in sizes):
        return None
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device


class _NotAKey(Exception):
    """An argument is neither a constant nor a strided fake tensor, or one of its sizes is symbolic, or its values are
    stored negated or conjugated."""


def _key(value: Any, site: str) -> Any:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
            raise _NotAKey
        if value.is_conj() or value.is_neg():
            raise _NotAKey
        return (torch.Tensor, _key(value.shape, site), _key(value.stride(), site), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(_key(v, site) for v in value)
    if isinstance(value, dict):
        return tuple((name, _key(v, site)) for name, v in value.items())
    if value == site if isinstance(value, str) else value is None:
        return None
    if isinstance(value, (str, bool, int, float, torch.dtype, torch.device, torch.memory_format)):
        # The key includes the type, because 1, 1.0 and True are equal but promote differently.
        return (type(value), value)
    raise _NotAKey


@dataclass(frozen=True)
class _Result:
    """The value of a node that was evaluated: a new tensor, or a view of the first argument.

    Attributes:
        offset: a view's offset minus that of the first argument; ``None`` for a new tensor.
    """

    mode: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int | None

    @classmethod
    def of(cls, target: Any, value: Any, args: tuple[Any, ...], kwargs: Any) -> _Result | None:
        """``None`` if the value of an equal node cannot be made from sizes, strides and offset."""
        if type(value) is not FakeTensor or value.requires_grad:
            return None
        if _is_new(value, (args, kwargs)):
            offset = None
        elif _is_view(target, value, args, kwargs):
            offset = value.storage_offset() - args[0].storage_offset()
        else:
            return None
        return cls(value.fake_mode, tuple(value.shape), value.stride(), value.dtype, value.device, offset)

    def made(self, args: tuple[Any, ...]) -> FakeTensor:
        """The result for other arguments that have the same sizes and strides."""
        with no_dispatch():
            tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            if self.offset is not None:
                offset = args[0].storage_offset() + self.offset
                tensor.set_(args[0].untyped_storage(), offset, self.shape, self.stride)
            return FakeTensor(self.mode, tensor, self.device)


def _is_new(value: Any, given: Any) -> bool:
    """Whether ``value`` is a plain tensor of known size that shares no memory with a tensor in ``given``."""
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.storage_offset():
        return False
    if value.is_conj() or value.is_neg():
        return False
    memory = _memory(value)
    bases = (t for t in operators.tensors_in(given) if _memory(t) == memory)
    return next(bases, None) is None and all(type(n) is int for n in (*value.shape, *value.stride()))


def _is_view(target: Any, value: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether ``value`` shares memory with the first argument only, and its offset is relative to that argument's."""
    base = args[0] if args else None
    if target is torch.ops.aten.as_strided.default or value is base or not isinstance(base, FakeTensor):
        return False
    if _lies(value) is None or type(base.storage_offset()) is not int or value.dtype != base.dtype:
        return False
    if value.is_conj() or value.is_neg():
        return False
    memory = _memory(value)
    sharing = [t for t in operators.tensors_in((args, kwargs)) if _memory(t) == memory]
    return len(sharing) == 1 and sharing[0] is base
