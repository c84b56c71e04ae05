# SPDX-License-Identifier: Apache-2.0
"""``SiteFacts`` describes a site in values that can be written as JSON.

Sizes are those of the rank's own matmul: an ``int``, or the text of an expression in the graph's symbols (``"2*s0"``).
"""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

Size = int | str


@dataclass(frozen=True)
class Collective:
    """A collective of the graph.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all; ``fused`` for an op of Inductor's async TP; else
            made from the operator's name.
        ranks: global ranks of the group; empty if this process does not know the group.
        dtype: dtype of the result, without ``torch.``; empty if there are several results.
        mesh_dim: the group's description (the name of its ``DeviceMesh`` dim), or ``None``.
        dim: the dim that is gathered or scattered in these cases, else ``None``:

            - All-gather before the matmuls: the gathered dim of the tensor before it is flattened for the matmul.
            - Reduce-scatter or all-to-all after the matmuls: the scattered dim of the first matmul's result.
            - All-to-all before the matmuls: the dim of its result whose index says which rank sent an element.
            - All-to-all beside lookups or experts: 0.
            - All-gather before attention: the dim of the tensor of keys along which the keys are counted.

        role: the role (M, N, K or B) of the gathered or scattered dim in the first matmul, or ``None``.
        reduce_op: ``sum``, ``avg``, ... or ``None``.
        bytes: bytes of the full tensor (after a gather, before a scatter). For ``fused``, bytes of the op's first
            result.
    """

    kind: str
    ranks: tuple[int, ...]
    group_name: str
    dtype: str
    mesh_dim: str | None = None
    dim: int | None = None
    role: str | None = None
    reduce_op: str | None = None
    bytes: Size = 0

    @property
    def world_size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Matmul:
    """One matmul of a site.

    Attributes:
        kind: mm | addmm | bmm | baddbmm | scaled_mm | int_mm | grouped_mm. In place of a matmul: embedding |
            embedding_bag | embedding_gradient | attention.
        m, n, k, batch: sizes in elements. The batch of a grouped_mm is its number of experts. For attention, m is
            the number of queries, n the width of a value, and k the number of keys. For a lookup, m is the number of
            bags, n the width of a row, and k the number of rows of the table. For embedding_gradient, m and k are
            swapped.
        dtype: dtype of the left operand.
        role: the role (M, N, K or B) of the gathered or scattered dim in this matmul.
    """

    kind: str
    m: Size
    n: Size
    k: Size
    dtype: str
    batch: Size = 1
    role: str | None = None


@dataclass(frozen=True)
class SiteFacts:
    """A matmul-collective site.

    Attributes:
        id: equal on every rank and in every run.
        module: the path of the user's module; the first matmul's node name if the path is unknown.
        derived_from: the id of the stretch whose rewrite made the collective, or ``None``.
    """

    id: str
    pattern: str
    module: str
    collective: Collective
    matmuls: tuple[Matmul, ...]
    derived_from: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The part of ``sites.json`` that describes the site."""
        collective = asdict(self.collective)
        collective["ranks"] = list(self.collective.ranks)
        return {
            "id": self.id,
            "pattern": self.pattern,
            "module": self.module,
            "derived_from": self.derived_from,
            "collective": collective,
            "matmuls": [asdict(m) for m in self.matmuls],
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> SiteFacts:
        collective = {**value["collective"], "ranks": tuple(value["collective"]["ranks"])}
        return cls(
            id=value["id"],
            pattern=value["pattern"],
            module=value["module"],
            derived_from=value["derived_from"],
            collective=Collective(**collective),
            matmuls=tuple(Matmul(**m) for m in value["matmuls"]),
        )
