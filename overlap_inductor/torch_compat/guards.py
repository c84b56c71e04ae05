"""Ask about the sizes of rewritten nodes without tying the compiled graph to its first token count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_guards(shape_env: Any | None) -> Iterator[None]:
    """What fake functions ask inside is answered as for sizes of which nothing is known, and adds no guard.

    Suppressing guards alone would not do: a chunk of ``s // 8`` rows is one row at the first call with 8 tokens, and a fake function that
    hears "yes, one" writes a 1 into the shape that all later calls then have.
    """
    if shape_env is None:
        yield
        return
    from torch.fx.experimental import _config

    with shape_env.suppress_guards(), _config.patch(backed_size_oblivious=True):
        yield
