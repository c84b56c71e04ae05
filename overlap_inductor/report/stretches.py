# SPDX-License-Identifier: Apache-2.0
"""Describes the stretches of the sequence-parallel rewrite in short texts, for ``report.txt`` and ``index.html``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.stretch import StretchFacts
from overlap_inductor.report import words

TITLE = "sequence-parallel rewrite: stretches of all-reduces and token-wise work"


@dataclass(frozen=True)
class Row:
    """One stretch, or several refused stretches that have the same ranks and the same reason codes. The quoted texts
    are examples.

    Attributes:
        place: ``sequence_parallel-1a2b3c4d``, or the number of stretches if there are several.
        written: ``5 all-reduces of 4096 tokens x 8192 bf16 over 8 ranks``.
        outcome: ``rewritten: 5 reduce-scatters, 5 all-gathers; 34 nodes on each rank's rows``, or ``kept: too_small``.
        times: ``estimated 12.10 ms as written, 9.90 ms rewritten (...)``; empty without an estimate.
        reasons: why the stretch is not rewritten.
        needs: ``all rows are gathered for: aten.mm.default (5)``; empty if nothing is gathered.
    """

    place: str
    module: str
    written: str
    outcome: str
    times: str
    reasons: tuple[Reason, ...]
    needs: str


def rows(stretches: Sequence[StretchFacts]) -> list[Row]:
    """One row for each stretch, or for all refused stretches with the same ranks and reason codes."""
    alike: dict[object, list[StretchFacts]] = {}
    for stretch in stretches:
        small = stretch.status == "refused"
        codes = tuple(r.code for r in stretch.reasons)
        alike.setdefault((stretch.ranks, codes) if small else stretch.id, []).append(stretch)
    return [_row(members) for members in alike.values()]


def _row(members: list[StretchFacts]) -> Row:
    first = members[0]
    several = len(members) > 1
    number = sum(s.all_reduces for s in members)
    size = "" if several else f" of {first.tokens} tokens x {first.features} {words.dtype(first.dtype)}"
    return Row(
        place=words.count(len(members), "stretch").replace("stretchs", "stretches") if several else first.id,
        module=first.module if not several else f"{first.module} and others",
        written=f"{words.count(number, 'all-reduce')}{size} over {words.count(len(first.ranks), 'rank')}",
        outcome=_outcome(first),
        times=_times(first),
        reasons=first.reasons,
        needs=_needs(first),
    )


def _outcome(stretch: StretchFacts) -> str:
    if stretch.status != "rewritten":
        return f"{stretch.status}: {', '.join(dict.fromkeys(r.code for r in stretch.reasons))}"
    parts = [words.count(stretch.scatters, "reduce-scatter"), words.count(stretch.gathers, "all-gather")]
    if stretch.sums:
        parts.append(words.count(stretch.sums, "all-reduce") + " of sums or extrema over tokens")
    text = f"rewritten: {', '.join(parts)}; {words.count(stretch.nodes, 'node')} on each rank's rows"
    if stretch.gathered_again:
        verb, tensors = ("is", "tensor") if stretch.gathered_again == 1 else ("are", "tensors")
        text += (
            f"; {stretch.gathered_again} of the all-gathers {verb} repeated in the backward, so each rank saves only"
            f" its own rows of the gathered {tensors}"
        )
    return text


def _times(stretch: StretchFacts) -> str:
    if not {"keep", "rewritten"} <= stretch.estimate_us.keys():
        return ""
    keep, rewritten = stretch.estimate_us["keep"], stretch.estimate_us["rewritten"]
    longest = max(keep, rewritten)
    return (
        f"estimated {words.microseconds(keep, longest)} as written, {words.microseconds(rewritten, longest)} rewritten"
        " (matmuls beside the collectives, exposed parts of the collectives, token-wise work)"
    )


def _needs(stretch: StretchFacts) -> str:
    if stretch.status != "rewritten" or not stretch.gathered_for:
        return ""
    ordered = sorted(stretch.gathered_for.items(), key=lambda item: (-item[1], item[0]))
    return "all rows are gathered for: " + ", ".join(f"{name} ({number})" for name, number in ordered)
