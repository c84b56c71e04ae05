"""Named layers of models, the patterns, and one case of them: a pattern of a layer at one size."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layer:
    """A column-parallel and a row-parallel layer of a model, over all ranks.

    Attributes:
        hidden: K of the column-parallel matmul, N of the row-parallel one.
        wide: N of the column-parallel matmul (one projection up; q, k and v together).
        narrow: K of the row-parallel matmul (the projection down; o).
    """

    hidden: int
    wide: int
    narrow: int


SHAPES = {
    "llama3-8b-mlp": Layer(4096, 14336, 14336),
    "llama3-8b-attention": Layer(4096, 6144, 4096),
    "llama3-70b-mlp": Layer(8192, 28672, 28672),
    "llama3-70b-attention": Layer(8192, 10240, 8192),
    # (For processes on a CPU.)
    "tiny": Layer(64, 128, 128),
}
PATTERNS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
    "fp8": torch.float8_e4m3fn, "fp8_rows": torch.float8_e4m3fn,
}  # fmt: skip
"""What a matmul's operands may be. Of fp8 the result is bf16: one scale an operand, or (``fp8_rows``) one a row of the
left and a column of the right one."""


@dataclass(frozen=True)
class Case:
    """``tokens`` rows of all ranks together; ``operands``: one of ``DTYPES``."""

    shape: str
    pattern: str
    tokens: int
    world_size: int
    operands: str

    def __str__(self) -> str:
        return f"{self.shape} {self.pattern} {self.tokens}"

    @property
    def gathers(self) -> bool:
        return self.pattern == "all_gather_matmul"

    @property
    def dtype(self) -> torch.dtype:
        """Of the operands."""
        return DTYPES[self.operands]

    @property
    def scaled(self) -> bool:
        return self.operands.startswith("fp8")

    @property
    def scale_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the left and the right operand's scales."""
        if not self.scaled:
            return ()
        return ((self.tokens, 1), (1, self.columns)) if self.operands == "fp8_rows" else ((), ())

    @property
    def result(self) -> torch.dtype:
        return torch.bfloat16 if self.scaled else self.dtype

    @property
    def sent(self) -> torch.dtype:
        """What the collective carries."""
        return self.dtype if self.gathers else self.result

    @property
    def inner(self) -> int:
        """K of a rank's matmul."""
        layer = SHAPES[self.shape]
        return layer.hidden if self.gathers else layer.narrow // self.world_size

    @property
    def columns(self) -> int:
        """N of a rank's matmul."""
        layer = SHAPES[self.shape]
        return layer.wide // self.world_size if self.gathers else layer.hidden

    @property
    def shard_rows(self) -> int:
        return -(-self.tokens // self.world_size)

    def why_not(self) -> str | None:
        """Why there is no such case, or ``None``."""
        layer = SHAPES[self.shape]
        if self.pattern != "matmul_all_reduce" and self.tokens % self.world_size:
            return f"{self.tokens} tokens do not fall into {self.world_size} equal shards"
        width = layer.wide if self.gathers else layer.narrow
        return f"{width} features do not fall into {self.world_size} equal shards" if width % self.world_size else None
