# SPDX-License-Identifier: Apache-2.0
"""Calls Inductor as ``torch.compile`` does, with the same modes and options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def option_names() -> list[str]:
    from torch._inductor import config

    return list(config._config)


def mode_names() -> list[str]:
    import torch._inductor

    return list(torch._inductor.list_mode_options())


def is_option(name: str) -> bool:
    """Whether Inductor has an option of this name, or (from torch 2.15 on) a device backend has one. Dashes count as
    underscores."""
    name = name.replace("-", "_")
    if name in option_names():
        return True
    try:
        from torch._inductor.codegen.common import get_compile_option_owner
        from torch._inductor.codegen.common import init_backend_registration
    except ImportError:  # torch before 2.15
        return False
    init_backend_registration()
    return get_compile_option_owner(name) is not None


def option_patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's settings for ``mode``, overridden by ``options``. If the mode or an option is unknown, raises what
    ``torch.compile`` raises."""
    return dict(torch._TorchCompileInductorWrapper(mode, options, None).config)


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: dict[str, Any],
    *,
    name: str | None = None,
    inner_compile: Any = None,
) -> Any:
    """Call Inductor's ``compile_fx`` under a patched configuration. Returns the compiled callable.

    Args:
        patches: settings of ``torch._inductor.config``.
        name: ``torch.compile``'s name of the region; ``None`` if torch gave the backend no name.
        inner_compile: replaces ``compile_fx_inner``.
    """
    from torch._inductor import compile_fx

    keywords: dict[str, Any] = {"config_patches": patches}
    if name is not None:
        keywords["compile_region_name"] = name
    if inner_compile is not None:
        keywords["inner_compile"] = inner_compile
    return compile_fx.compile_fx(gm, example_inputs, **keywords)
