"""The library ``overlap_inductor::``: how its ops are defined."""

from __future__ import annotations

import torch

from overlap_inductor.torch_compat.telemetry import in_range

NAMESPACE = "overlap_inductor"
library = torch.library.Library(NAMESPACE, "DEF")


def define(
    schema: str, implementation: object, fake: object, layout: torch.Tag = torch.Tag.needs_fixed_stride_order
) -> None:
    """Define one op with its only implementation (all devices) and its fake function; ``layout`` is what its inputs are
    held to. An op with an argument ``site`` shows it in profiler traces."""
    name, arguments = schema.split(" ->")[0].rstrip(")").split("(", 1)
    names = [argument.split(" ")[-1].split("=")[0] for argument in arguments.split(", ")]
    if "site" in names:
        implementation = in_range(name, names.index("site"), implementation)  # type: ignore[arg-type]
    library.define(schema, tags=(layout,))
    library.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[arg-type]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)  # type: ignore[arg-type]


FLEXIBLE = torch.Tag.flexible_layout
"""Of ops whose lowerings read any layout: what their inputs are held to would be compared, and a comparison of symbolic
strides is a guard."""
