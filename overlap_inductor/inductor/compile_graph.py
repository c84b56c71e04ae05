"""Calling Inductor as ``torch.compile`` calls it: its modes, its options, its entry point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def option_names() -> list[str]:
    """The names of Inductor's options."""
    from torch._inductor import config

    return list(config._config)  # type: ignore[attr-defined]


def is_option(name: str) -> bool:
    """Whether Inductor has an option of this name (dashes stand for underscores; from 2.15 devices add their own)."""
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
    """What ``torch.compile(backend="inductor", mode=..., options=...)`` would patch into Inductor's configuration."""
    return dict(torch._TorchCompileInductorWrapper(mode, options, None).config)


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: dict[str, Any],
    *,
    name: str | None = None,
    inner_compile: Any = None,
) -> Any:
    """Inductor's ``compile_fx`` under a patched configuration. ``name``: ``torch.compile``'s, where torch has that."""
    from torch._inductor import compile_fx

    keywords: dict[str, Any] = {"config_patches": patches}
    if name is not None:
        keywords["compile_region_name"] = name
    if inner_compile is not None:
        keywords["inner_compile"] = inner_compile
    return compile_fx.compile_fx(gm, example_inputs, **keywords)
