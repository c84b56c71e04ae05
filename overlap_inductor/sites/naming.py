# SPDX-License-Identifier: Apache-2.0
"""Name sites: module names as the user writes them, and ids that are equal on all ranks and in every run."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from torch import fx

# Dynamo names a module by the variable that holds it: `self`, or `args[0]` if a decorator wraps `forward`.
_ROOT = r"^(L\['self'\]|L\['args'\]\[0\]|L__self__|self)\.?"
_WRAPPERS = re.compile(_ROOT + r"|\._orig_mod|_orig_mod\.?|_checkpoint_wrapped_module\.?")


_ADDRESS = re.compile(r"_(0x[0-9a-f]{8,}|\d{9,})(?=$|[.\]'_])")
"""The address of an object in a name. Dynamo writes it into names of some globals. It differs between processes."""


def _clean(path: str) -> str:
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path) if not path.startswith("L[") else path
    path = _ADDRESS.sub("", _WRAPPERS.sub("", path))
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return path.strip(".")


def module_of(node: fx.Node) -> str:
    """The module in which ``node`` was traced, as the user names it (``model.layers.0.mlp.down_proj``), or ``""``."""
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stack: dict[str, Any] = node.meta.get(key) or {}
        if stack:
            path = list(stack.values())[-1][0]
            name = _clean(path)
            if name:
                return name
    return ""


def site_id(pattern: str, module: str, phase: str, ordinal: int, moves: str) -> str:
    """``<pattern>-<8 hex digits of a SHA-256>``, from values that are the same on all ranks of the site's group.

    Args:
        module: path of the user's module, or ``""``.
        phase: ``inference``, ``forward``, ``backward``, or ``joint`` for a stretch.
        ordinal: index of the site's collective among those of the graph.
        moves: the collective's reduce op, and dtype and last dim's size of the tensor that the collective moves.
    """
    digest = hashlib.sha256(f"{pattern}|{module}|{phase}|{ordinal}|{moves}".encode()).hexdigest()[:8]
    return f"{pattern}-{digest}"
