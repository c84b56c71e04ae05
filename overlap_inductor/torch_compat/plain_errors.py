# SPDX-License-Identifier: Apache-2.0
"""Lets the package's own errors pass through Dynamo and Inductor as they are.

Other exceptions of a backend become ``BackendCompilerFailed``, with some 40 lines of torch's frames and advice about
PyTorch bugs. An error of type ``ShortenTraceback`` is raised again as it is. Dynamo and Inductor ask it to drop their
frames.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from overlap_inductor.errors import OverlapError


@contextmanager
def shown_plainly() -> Iterator[None]:
    """An ``OverlapError`` that leaves the block keeps its type and message, and shows no frames of torch.
    ``TORCHDYNAMO_VERBOSE=1`` keeps the frames."""
    try:
        yield
    except OverlapError as error:
        raise _plain(error).with_traceback(error.__traceback__) from error.__cause__


def _plain(error: OverlapError) -> OverlapError:
    from torch._dynamo.exc import ShortenTraceback

    if isinstance(error, ShortenTraceback):
        return error
    kind: Any = type(error)
    return _plain_type(kind)(error)


@functools.cache
def _plain_type(kind: Any) -> Any:
    from torch._dynamo import config
    from torch._dynamo.exc import ShortenTraceback

    class Plain(kind, ShortenTraceback):
        def __init__(self, error: OverlapError) -> None:
            ShortenTraceback.__init__(self, str(error), first_useful_frame=None)
            self._error = error
            self.__dict__.update(vars(error))

        def remove_dynamo_frames(self) -> Any:
            # Dynamo has added advice to the message. Set the message back to the original error's.
            self.args = self._error.args
            return self if config.verbose else self.with_traceback(None)

        def __reduce__(self) -> Any:
            return self._error.__reduce__()

    # With these names, the last line of a traceback names the class of the original error.
    Plain.__module__, Plain.__name__, Plain.__qualname__ = kind.__module__, kind.__name__, kind.__qualname__
    return Plain
