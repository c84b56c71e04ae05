# SPDX-License-Identifier: Apache-2.0
"""``Decision`` holds what was decided for a site: ``PlanPiece`` objects and ``Reason`` objects."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from typing import Any


@dataclass(frozen=True)
class Reason:
    """Why a site or a collective is not overlapped, or a stretch not rewritten. ``code`` is stable between versions."""

    code: str
    text: str


@dataclass(frozen=True)
class PlanPiece:
    """One schedule for a range of token counts.

    Attributes:
        schedule: name of the schedule, or ``keep``.
        transport: name of the transport; ``None`` for ``keep``. Several names joined by "or" if the op chooses one at
            each call.
        tokens: first and last token count that the piece serves, in rows of the rank's own matmul. ``None``: no upper
            bound.
        parameters: parameters of the schedule (``sub_chunks``, ``route``, ``unrolled``...).
        estimate_us: estimated microseconds of each schedule that was compared, of ``keep``, and of the parts of
            ``keep``: ``matmul`` and ``collective``.
        overlaps: whether the transfer runs at the same time as the matmul. Schedule ``small_message`` transfers after
            the matmul.
    """

    schedule: str
    transport: str | None = None
    tokens: tuple[int, int | None] = (0, None)
    parameters: dict[str, Any] = field(default_factory=dict)
    estimate_us: dict[str, float] = field(default_factory=dict)
    overlaps: bool = True


@dataclass
class Decision:
    """What happens to a site. ``report.words`` explains the values of ``status`` and ``source``.

    Attributes:
        status: overlapped | kept | refused | failed.
        source: analytic (not forced by a switch) | forced (by a switch).
    """

    status: str
    source: str
    plan: list[PlanPiece] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)

    @property
    def moving(self) -> PlanPiece:
        """The first piece whose schedule is not ``keep``, or the last piece if all are ``keep``."""
        return next((p for p in self.plan if p.schedule != "keep"), self.plan[-1])

    def to_dict(self) -> dict[str, Any]:
        value = asdict(self)
        for piece in value["plan"]:
            piece["tokens"] = list(piece["tokens"])
        return value

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Decision:
        plan = [PlanPiece(**{**p, "tokens": tuple(p["tokens"])}) for p in value["plan"]]
        return cls(value["status"], value["source"], plan, [Reason(**r) for r in value["reasons"]])
