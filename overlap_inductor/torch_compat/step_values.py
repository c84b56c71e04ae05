"""The values (``meta["val"]``) of nodes that a rewrite writes: computed once for all nodes that are alike, and not again behind the pass.

A layer's steps are those of the layer before: the same operators on tensors of the same sizes. What a fake function says of such a tensor is remembered, and the next node gets a new
fake tensor of that size without asking. (32 layers have 64 sites and 5500 steps; asking took most of the pass.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from overlap_inductor.torch_compat import operators
from overlap_inductor.torch_compat.guards import without_guards

_MARK = "overlap_inductor_valued"


class StepValues:
    """Evaluates the steps of one graph. ``evaluated``: how many nodes were computed by their fake functions."""

    def __init__(self) -> None:
        self.evaluated = 0
        self._known: dict[Any, tuple[Any, ...] | None] = {}

    def evaluate(self, node: fx.Node, site: str) -> Any:
        """What ``node`` returns, as a fake tensor of its own; ``site`` is an argument that no value rests on. A size that is a symbol is never looked up."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        node.meta[_MARK] = (node.args, node.kwargs)
        mode = operators.fake_mode((args, kwargs))
        try:
            key: Any = (node.target, id(mode), _key(args, site), _key(kwargs, site))
        except _NotAKey:
            key = None
        found = self._known.get(key) if key is not None else None
        if found is not None:
            return _fresh(mode, *found)
        self.evaluated += 1
        # Whatever a fake function asks about symbolic sizes here must not become a guard: the model was traced without them.
        with mode, without_guards(mode.shape_env):
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        if key is not None and _is_new(value, (args, kwargs)):
            self._known[key] = (tuple(value.shape), value.stride(), value.dtype, value.device)
        return value


def up_to_date(node: fx.Node) -> bool:
    """Whether the node's value was computed by ``StepValues`` from the arguments that it has now. (A node's arguments are replaced, never changed.)"""
    args, kwargs = node.meta.get(_MARK, (None, None))
    return args is node.args and kwargs is node.kwargs


class _NotAKey(Exception):
    """An argument is no constant."""


def _key(value: Any, site: str) -> Any:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
            raise _NotAKey
        return (torch.Tensor, _key(value.shape, site), _key(value.stride(), site), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(_key(v, site) for v in value)
    if isinstance(value, dict):
        return tuple((name, _key(v, site)) for name, v in value.items())
    if value == site if isinstance(value, str) else value is None:
        return None
    if isinstance(value, (str, bool, int, float, torch.dtype, torch.device, torch.memory_format)):
        # (1, 1.0 and True are equal, and promote differently.)
        return (type(value), value)
    raise _NotAKey


def _is_new(value: Any, given: Any) -> bool:
    """Whether ``value`` is one plain tensor of known size that shares no memory with what was ``given``: a view has to be made of its base."""
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.storage_offset() or value.is_conj() or value.is_neg():
        return False
    memory = value.untyped_storage()._cdata
    bases = (t for t in operators.tensors_in(given) if t.untyped_storage()._cdata == memory)
    return next(bases, None) is None and all(type(n) is int for n in (*value.shape, *value.stride()))


def _fresh(mode: Any, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> FakeTensor:
    with no_dispatch():
        return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)
