# SPDX-License-Identifier: Apache-2.0
"""The backend of ``torch.compile(model, backend="overlap_inductor")``: Inductor with the pass in it.

A patch of Inductor's configuration adds the pass. The patch holds for the compile of one graph, and for the compile
of this graph's backward, which may come later.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

import torch

from overlap_inductor.config import OverlapConfig
from overlap_inductor.errors import ConfigError
from overlap_inductor.switch import install
from overlap_inductor.torch_compat.cuda_graphs import reset_trees
from overlap_inductor.torch_compat.plain_errors import shown_plainly


def overlap_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **extra: Any,
) -> Any:
    """Compile a graph with Inductor and this package's pass.

    Args:
        mode: Inductor's mode, as ``torch.compile`` takes it (``max-autotune``, ...).
        options: fields of ``OverlapConfig`` and options of Inductor. For a field that is not given, the switches in
            force hold.

    Raises:
        ConfigError: an option is neither a field nor an option of Inductor. Also raised if a field, or a variable of
            the environment, has a value that is not allowed.
        UnsupportedError: this torch is too old or too new.
    """
    with shown_plainly():
        install.require_supported_torch()
        ours, theirs = split_options(options or {})
        return compile_with(_config_with(ours), gm, example_inputs, mode, theirs, **extra)


def _config_with(ours: dict[str, Any]) -> OverlapConfig:
    """The switches in force, overridden by ``ours``."""
    current = install.effective()
    try:
        return dataclasses.replace(current, **ours) if current else OverlapConfig.from_environment(**ours)
    except ConfigError as error:
        if error.field not in ours:
            raise
        raise _bad_option(error, ours[error.field]) from None


def compile_with(
    config: OverlapConfig,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: dict[str, Any],
    **extra: Any,
) -> Any:
    from overlap_inductor.inductor import compile_graph as inductor
    from overlap_inductor.inductor import pass_slot
    from overlap_inductor.passes.pipeline import passes_in

    install.install_hooks()
    patches = inductor.option_patches(mode, options)
    for slot, setting in pass_slot.SETTINGS.items():
        value = patches.get(setting, pass_slot.read(slot))
        if config.mode == "off":
            patches[setting] = pass_slot.without_pass(value)
        elif passes_in(slot):
            patches[setting] = pass_slot.with_pass(value, pass_slot.OverlapPass(lambda: config, slot))
    return inductor.compile_graph(gm, example_inputs, patches, **extra)


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``torch.compile``'s options into fields of ``OverlapConfig`` and Inductor's options. Raises ``ConfigError``
    if an option belongs to neither; the message names similar options."""
    from overlap_inductor.inductor import compile_graph as inductor

    fields = {f.name for f in dataclasses.fields(OverlapConfig)}
    ours = {k: v for k, v in options.items() if k in fields}
    theirs = {k: v for k, v in options.items() if k not in fields}
    for key in theirs:
        if not inductor.is_option(key):
            near = difflib.get_close_matches(key, [*fields, *inductor.option_names()], n=3)
            raise ConfigError(
                f"options[{key!r}]: no such option of overlap_inductor or of Inductor. "
                + (f"Did you mean {' or '.join(near)}? " if near else "")
                + f"overlap_inductor's options are {', '.join(sorted(fields))}. For Inductor's options, see"
                " torch._inductor.list_options()."
            )
    return ours, theirs


def _bad_option(error: ConfigError, value: Any) -> ConfigError:
    """``error``, reworded for an option of ``torch.compile``."""
    from overlap_inductor.inductor import compile_graph as inductor

    text = f"options[{error.field!r}]={value!r} {error.problem}"
    if error.field == "mode" and value in inductor.mode_names():
        text += (
            f". options['mode'] is overlap_inductor's own switch, and {value!r} is a mode of Inductor."
            f" torch.compile takes a mode or options, not both. Either pass mode={value!r} to torch.compile and set"
            " overlap_inductor's switches by enable(), overlap() or the environment, or pass the mode's settings as"
            f" options: options={{**torch._inductor.list_mode_options({value!r}), 'schedule': 'auto'}}"
        )
    return ConfigError(text)


def _reset() -> None:
    """Called by ``torch.compiler.reset()``. Resets CUDA graph trees, as Inductor's own backend does."""
    reset_trees()


overlap_inductor.reset = _reset  # type: ignore[attr-defined]
