# SPDX-License-Identifier: Apache-2.0
"""The demo's results as text: sites, differences and times of each part. A *part* of the demo runs one model. A *form*
of a part is the part's model, compiled with overlap by ``auto`` or by one forced schedule."""

from __future__ import annotations

from typing import Any

TITLES = {
    "llama": 'Hugging Face Llama, tp_plan="auto", inference',
    "block": "DTensor sequence-parallel block, forward and backward",
}
FASTER, SLOWER = 1.02, 0.98
"""If the ratio of two times lies between these numbers, the times count as equal."""
MEDIAN = 1
"""Index of the median in times, which are ``[first quartile, median, third quartile]``."""


def overlapped(form: dict[str, Any]) -> int:
    """Number of sites that a compiled form overlaps."""
    return sum(graph["overlapped"] for graph in form["graphs"])


def passed(result: dict[str, Any]) -> bool:
    """Whether all forms agree with plain ``torch.compile``, and at least one form overlaps a site."""
    checks = [check for form in result["forms"] for check in form["checks"]]
    return any(map(overlapped, result["forms"])) and all(check["passed"] for check in checks)


def part(result: dict[str, Any], shared_cpu: bool) -> str:
    """The text of one part. ``shared_cpu``: the ranks are processes on one CPU, without a slow link between them."""
    forms = result["forms"]
    lines = ["", TITLES[result["part"]]]
    shown = next((form for form in forms if overlapped(form)), None)
    if shown is None:
        lines.append("  FAIL: no schedule overlapped any site")
    for graph in (shown or forms[0])["graphs"]:
        lines.append(f"  graph {graph['graph']} {graph['phase']}, schedule {(shown or forms[0])['name']}:")
        lines += [f"    {line}" for line in (graph["headline"], *_aligned(graph["rows"]))]
    lines.append("  largest difference from plain torch.compile (in brackets: between plain torch.compile and eager)")
    lines += [f"    {line}" for line in _checks(result)]
    lines.append("  median times (in brackets: the range of the middle half of the calls)")
    lines += [f"    {line}" for line in _times(result)]
    lines.append(f"  {verdict(result, shared_cpu)}")
    return "\n".join(lines)


def _checks(result: dict[str, Any]) -> list[str]:
    """For each output, a line for every form that differs too much from plain ``torch.compile``. If no form does, one
    line for the form that differs most."""
    lines = []
    for index, noise in enumerate(result["plain_against_eager"]):
        found = [(form["name"], form["checks"][index]) for form in result["forms"]]
        worst = max(found, key=lambda pair: pair[1]["difference"])
        for name, check in [pair for pair in found if not pair[1]["passed"]] or [worst]:
            outcome = "ok" if check["passed"] else "FAIL"
            lines.append(
                f"{check['name']:28} {check['difference']:.2e} ({name})  [{noise['difference']:.2e}]  allowed"
                f" {check['tolerance']:.2e}, largest value {check['largest']:.2e}  {outcome}"
            )
    return lines


def _times(result: dict[str, Any]) -> list[str]:
    plain = result["plain_ms"]
    rows = [["plain", *_time(plain), "", ""]]
    for form in result["forms"]:
        sites = f"{overlapped(form)} of {sum(graph['found'] for graph in form['graphs'])} sites overlapped"
        if form["ms"] is None:
            reason = next((graph["reason"] for graph in form["graphs"] if graph["reason"]), "")
            rows.append([form["name"], "as plain", "", "", f"{sites}: {reason}" if reason else sites])
        else:
            rows.append([form["name"], *_time(form["ms"]), f"{plain[MEDIAN] / form['ms'][MEDIAN]:.2f}x", sites])
    return _aligned(rows)


def verdict(result: dict[str, Any], shared_cpu: bool) -> str:
    """A sentence that says how fast ``auto`` is. If a schedule is clearly faster than ``auto`` and plain
    ``torch.compile``, a second sentence names the fastest one."""
    auto = next(form for form in result["forms"] if form["name"] == "auto")
    plain = result["plain_ms"]
    text = _of_auto(auto, plain, shared_cpu)
    timed = [form for form in result["forms"] if form["ms"]]
    fastest = min(timed, key=lambda form: form["ms"][MEDIAN], default=auto)
    if fastest is auto or compared(plain, fastest["ms"]) <= 1 or compared(auto["ms"] or plain, fastest["ms"]) <= 1:
        return text
    return f"{text} {fastest['name']}, forced, is {plain[MEDIAN] / fastest['ms'][MEDIAN]:.2f}x faster than plain."


def compared(plain: list[float], other: list[float]) -> float:
    """How many times as fast ``other`` is as ``plain``, by the medians. 1.0 if the ranges between the quartiles
    overlap, or the medians differ by less than 2 %."""
    ratio = plain[MEDIAN] / other[MEDIAN]
    apart = other[-1] < plain[0] or plain[-1] < other[0]
    return ratio if apart and not SLOWER < ratio < FASTER else 1.0


def _time(quartiles: list[float]) -> list[str]:
    return [f"{quartiles[MEDIAN]:.2f} ms", f"({quartiles[0]:.1f} to {quartiles[-1]:.1f})"]


def _of_auto(auto: dict[str, Any], plain: list[float], shared_cpu: bool) -> str:
    if auto["ms"] is None:
        return "auto overlaps no site, so the model runs as with plain torch.compile."
    ratio = compared(plain, auto["ms"])
    if ratio > 1:
        return f"auto is {ratio:.2f}x faster than plain torch.compile here."
    if ratio == 1:
        return "auto and plain torch.compile show no clear difference here."
    why = (
        "expected: between processes of one CPU a transfer takes the cores that the matmuls need"
        if shared_cpu
        else "its estimate was wrong; `overlap-inductor bugreport FOLDER` packs what is needed to report it"
    )
    return f"auto is {1 / ratio:.2f}x SLOWER than plain torch.compile here ({why})."


def _aligned(rows: list[list[Any]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))] if cells else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
