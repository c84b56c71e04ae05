# SPDX-License-Identifier: Apache-2.0
"""Define the ops of the torch library ``overlap_inductor::``."""

from __future__ import annotations

import torch

from overlap_inductor.torch_compat.telemetry import in_range

NAMESPACE = "overlap_inductor"
library = torch.library.Library(NAMESPACE, "DEF")


def define(
    schema: str, implementation: object, fake: object, layout: torch.Tag = torch.Tag.needs_fixed_stride_order
) -> None:
    """Define an op with one implementation for all devices, and its fake function.

    If the op has an argument ``site``, profiler traces show the site.

    Args:
        schema: name, arguments and results, without the namespace.
        fake: computes the results' shapes and dtypes, as ``torch.library.register_fake`` expects.
        layout: the tag that says which layouts Inductor may give the op's inputs.
    """
    name, arguments = schema.split(" ->")[0].rstrip(")").split("(", 1)
    names = [argument.split(" ")[-1].split("=")[0] for argument in arguments.split(", ")]
    if "site" in names:
        implementation = in_range(name, names.index("site"), implementation)  # type: ignore[arg-type]
    library.define(schema, tags=(layout,))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)


FLEXIBLE = torch.Tag.flexible_layout
"""The tag of ops that accept inputs of any layout. They do not have the default tag, because it can add guards. Under
``needs_fixed_stride_order``, Inductor compares the inputs' strides, and comparing symbolic strides adds a guard."""
