# SPDX-License-Identifier: Apache-2.0
"""Computes pieces of gated experts' rows with two launches and no other work of the host.

A ``RowProgram`` is *gated* if it consists of these two ops, as ``merged_program`` writes most models' experts::

    h = chunked_gated_grouped_mm(r0, w, v, ends)
    result = chunked_grouped_mm(h, u, ends)

``RowProgram.run`` takes the host 30 to 50 us for such a piece besides the launches (H200 machines).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from overlap_inductor.lowerings.chunked.grouped_ops import prepared
from overlap_inductor.lowerings.chunked.merged_program import GATED
from overlap_inductor.lowerings.chunked.merged_program import GROUPED
from overlap_inductor.lowerings.chunked.merged_program import NO_WORK
from overlap_inductor.lowerings.chunked.merged_program import merged_from_text
from overlap_inductor.sites.row_program import RowProgram
from overlap_inductor.torch_compat.triton_launch import PreparedKernel

MOST_OPS = 5
"""Ops of a gated program before they are merged: three products, ``silu`` and ``mul``."""


class Weights(NamedTuple):
    """The numbers of a gated program's weights among its whole tensors: ``silu(x @ gate) * (x @ value) @ down``."""

    gate: int
    value: int
    down: int


def weights_of(program: RowProgram) -> Weights | None:
    """The weights of a merged program, if it is gated and takes and returns no other rows."""
    if program.handed_out or len(program.ops) > MOST_OPS:
        return None
    # The program's only rows have number 0, so op ``i`` computes value ``i + 1``.
    ops = [(number, op) for number, op in enumerate(program.ops, 1) if op != NO_WORK]
    if [name for _, (name, _, _) in ops] != [GATED, GROUPED]:
        return None
    (middle, (_, (x, gate, value, _), _)), (last, (_, (h, down, _), _)) = ops
    if (x, h, program.result) != ({"row": 0}, {"row": middle}, last):
        return None
    return Weights(gate["whole"], value["whole"], down["whole"])


@functools.cache
def weights_of_text(text: str, given: int) -> Weights | None:
    """``weights_of`` for ``merged_from_text(text, given)``."""
    return weights_of(merged_from_text(text, given))


class GatedPieces:
    """Computes pieces of at most ``len(h)`` rows.

    Attributes:
        h: ``[rows, inner]``, written by every piece.
    """

    def __init__(
        self, first: PreparedKernel, second: PreparedKernel, weights: Sequence[torch.Tensor], h: torch.Tensor
    ) -> None:
        self._first, self._second, self.h = first, second, h
        self._gate, self._value, self._down = weights

    def __call__(self, x: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
        """Store the results of the first ``ends[-1]`` rows of ``x`` in ``out``."""
        h = self.h
        self._first(x, self._gate, self._value, h, h, ends)
        self._second(h, self._down, None, out, out, ends)


def gated_pieces(
    found: Weights, whole: Sequence[torch.Tensor], x: torch.Tensor, out: torch.Tensor, ends: torch.Tensor, rows: int
) -> GatedPieces | None:
    """For pieces of at most ``rows`` rows, in layouts like ``x``, ``out`` and ``ends``, none of them empty. ``None`` if
    the kernels do not support them."""
    gate, value, down = (whole[number] for number in found)
    h = x.new_empty(max(rows, 1), gate.shape[2])
    first, second = prepared(x, [gate, value], h, ends), prepared(h, [down], out, ends)
    return None if first is None or second is None else GatedPieces(first, second, (gate, value, down), h)
