# SPDX-License-Identifier: Apache-2.0
"""The cases of the benchmarks. A case is one pattern of a model's layer at one size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from overlap_inductor.passes.pattern import Example
from overlap_inductor.passes.patterns import pattern_named


@dataclass(frozen=True)
class Layer:
    """A column-parallel and a row-parallel layer of a model. Sizes are those before the layers are cut between ranks.

    Attributes:
        hidden: K of the column-parallel matmul, and N of the row-parallel matmul.
        wide: N of the column-parallel matmul (one up-projection, or q, k and v together).
        narrow: K of the row-parallel matmul (the down-projection, or o).
    """

    hidden: int
    wide: int
    narrow: int


SHAPES = {
    "llama3-8b-mlp": Layer(4096, 14336, 14336),
    "llama3-8b-attention": Layer(4096, 6144, 4096),
    "llama3-70b-mlp": Layer(8192, 28672, 28672),
    "llama3-70b-attention": Layer(8192, 10240, 8192),
    "tiny": Layer(64, 128, 128),
}
DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
    "fp8": torch.float8_e4m3fn, "fp8_rows": torch.float8_e4m3fn,
}  # fmt: skip
"""Dtypes of a matmul's operands, by name. The result of fp8 operands is bf16. ``fp8``: one scale for each operand.
``fp8_rows``: a scale for each row of the left operand and each column of the right one."""


@dataclass(frozen=True)
class Case:
    """One pattern of a layer at one size.

    Attributes:
        shape: the layer, a name in ``SHAPES``.
        tokens: rows of a rank's matmul.
        operands: the operands' dtype, a name in ``DTYPES``.
    """

    shape: str
    pattern: str
    tokens: int
    world_size: int
    operands: str

    def __str__(self) -> str:
        return f"{self.shape} {self.pattern} {self.tokens}"

    @property
    def example(self) -> Example:
        """The pattern as a model writes it. Raises ``ValueError`` if the pattern has no linear layer."""
        found = pattern_named(self.pattern).example
        if found is None:
            raise ValueError(f"pattern {self.pattern} has no linear layer to time")
        return found

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.operands]

    @property
    def scaled(self) -> bool:
        return self.operands.startswith("fp8")

    @property
    def scale_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the scales of the left and of the right operand. Empty if the operands are not fp8."""
        if not self.scaled:
            return ()
        return ((self.tokens, 1), (1, self.columns)) if self.operands == "fp8_rows" else ((), ())

    @property
    def result(self) -> torch.dtype:
        return torch.bfloat16 if self.scaled else self.dtype

    @property
    def sent(self) -> torch.dtype:
        """The dtype that the collective moves."""
        return self.dtype if self.example.first else self.result

    @property
    def inner(self) -> int:
        """K of a rank's matmul."""
        layer = SHAPES[self.shape]
        return layer.hidden if self.example.column_parallel else layer.narrow // self.world_size

    @property
    def columns(self) -> int:
        """N of a rank's matmul."""
        layer = SHAPES[self.shape]
        return layer.wide // self.world_size if self.example.column_parallel else layer.hidden

    @property
    def rows(self) -> int:
        """Rows of a rank's left operand. If the pattern begins with a collective: the rows before this collective."""
        return self.shard_rows if self.example.first and self.example.shards_tokens else self.tokens

    @property
    def shard_rows(self) -> int:
        return -(-self.tokens // self.world_size)

    def why_not(self) -> str | None:
        """Why the tokens or the layer cannot be cut into equal shards. ``None`` if they can."""
        layer = SHAPES[self.shape]
        if self.example.shards_tokens and self.tokens % self.world_size:
            return f"{self.tokens} tokens cannot be cut in {self.world_size} equal shards"
        width = layer.wide if self.example.column_parallel else layer.narrow
        return f"{width} features cannot be cut in {self.world_size} equal shards" if width % self.world_size else None
