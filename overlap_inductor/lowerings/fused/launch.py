# SPDX-License-Identifier: Apache-2.0
"""What all launches of matmuls in schedule ``fused`` share: epilogues (``Tail``), checks, the key of a prepared
kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.facts.limits import MOST_EXTRAS
from overlap_inductor.kernels.epilogue import function_of
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.one_op.operands import check_operands
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.sites.epilogue_program import Epilogue

EXTRAS = tuple(f"extra{i}" for i in range(MOST_EXTRAS))
"""The kernels' parameters for the extra tensors that epilogues read."""


class Tail(NamedTuple):
    """The pointwise ops that follow a launch's matmuls or reduction.

    Attributes:
        epilogues: an epilogue or ``None`` for each result.
        extras: the contiguous tensors that the epilogues read besides the results, in the order of the epilogues.
    """

    epilogues: tuple[Epilogue | None, ...] = ()
    extras: Sequence[torch.Tensor] = ()

    @property
    def function(self) -> Any:
        """The epilogues as one Triton function, or ``None`` if there are none."""
        return (
            function_of(tuple(None if e is None else (e.extras, e.ops) for e in self.epilogues))
            if any(self.epilogues)
            else None
        )

    def check(self, results: Sequence[torch.Tensor]) -> None:
        """Raises ``UnsupportedError`` if the epilogues do not match ``results``, or the extra tensors do not match the
        epilogues. Each extra tensor must be contiguous and floating point, and there may be at most ``MOST_EXTRAS``."""
        kinds = [(k, r) for e, r in zip(self.epilogues, results) if e is not None for k in e.extras]
        shapes = [
            {"full": r.shape, "row": r.shape[1:], "column": r.shape[:1], "scalar": torch.Size([1])}[k] for k, r in kinds
        ]
        if (
            len(self.epilogues) not in (0, len(results))
            or len(shapes) > MOST_EXTRAS
            or shapes != [e.shape for e in self.extras]
        ):
            raise UnsupportedError(
                f"the extra tensors of the epilogues have shapes {[list(e.shape) for e in self.extras]}; expected"
                f" {[list(s) for s in shapes]}, at most {MOST_EXTRAS} tensors"
            )
        if not all(e.is_contiguous() and e.is_floating_point() for e in self.extras):
            raise UnsupportedError("an extra tensor of an epilogue is not contiguous, or not floating point")

    @property
    def operands(self) -> list[torch.Tensor | None]:
        """The extra tensors, padded with ``None`` to ``MOST_EXTRAS``."""
        return [*self.extras, *[None] * (MOST_EXTRAS - len(self.extras))]


NO_TAIL = Tail()


def check(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, need: tuple[int, int], launch: Launch) -> None:
    """Raises ``UnsupportedError`` if the kernels do not support an operand, or if ``launch.slot`` is smaller than
    ``need``: ``(bytes, signals)``. The slot is the call's part of the workspace."""
    check_operands(a, b, bias)
    launch.check_room(*need)


def key_of(
    pattern: str,
    a: torch.Tensor,
    rhs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    tail: Tail,
    parameters: FusedParameters,
    flag: bool,
) -> tuple[object, ...]:
    """Everything on which a call's prepared kernel depends. ``flag``: the call's only flag. Its name is ``keep``,
    ``average`` or ``by_columns``, depending on the pattern.

    Raises ``UnsupportedError`` if ``a`` is not contiguous, or if an operand of a matmul is not aligned to 16 bytes.
    """
    if not a.is_contiguous() or a.data_ptr() % 16:
        raise UnsupportedError(
            f"the left operand has shape {list(a.shape)} and strides {list(a.stride())}; expected it contiguous and"
            " aligned to 16 bytes"
        )
    key: list[object] = [
        pattern,
        a.shape,
        a.dtype,
        parameters,
        flag,
        tail.epilogues,
        *((e.dtype, e.data_ptr() % 16 == 0) for e in tail.extras),
    ]
    for b, bias in zip(rhs, biases, strict=True):
        if b.data_ptr() % 16:
            raise UnsupportedError(f"the right operand of shape {list(b.shape)} is not aligned to 16 bytes")
        key += [b.shape, b.stride(), b.dtype, None if bias is None else bias.data_ptr() % 16 == 0]
    return tuple(key)
