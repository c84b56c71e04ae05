"""Ask about the sizes of rewritten nodes without tying the compiled graph to its first token count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_guards(shape_env: Any | None) -> Iterator[None]:
    """What fake functions ask inside is answered as for sizes of which nothing is known, and adds no guard.

    Suppressing guards alone would not do: a chunk of ``s // 8`` rows is one row at the first call with 8 tokens, and a
    fake function that hears "yes, one" writes a 1 into the shape that all later calls then have.
    """
    if shape_env is None:
        yield
        return
    from torch.fx.experimental import _config

    with shape_env.suppress_guards(), _config.patch(backed_size_oblivious=True):
        yield


def same_expression(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are the same when products are multiplied out, as those of pieces that are joined are; no
    question is asked of the shapes."""
    import sympy

    one, other = (n.node.expr if isinstance(n, torch.SymInt) else n for n in (a, b))
    return bool(sympy.expand(one - other) == 0)
