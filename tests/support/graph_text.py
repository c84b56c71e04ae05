# SPDX-License-Identifier: Apache-2.0
"""Finds waste in the text of a rewritten graph: unused matmuls, and collectives of overlapped sites."""

from __future__ import annotations

import re

from overlap_inductor.report.report import OverlapReport


def waste(report: OverlapReport) -> list[str]:
    """The problems of a rewritten graph. A matmul whose result is not used is a problem. If all sites are overlapped,
    it is also a problem if the graph has more collectives than near misses."""
    lines = {line.split(":")[0].split(" = ")[0]: line for line in report.after.splitlines() if " = " in line}
    wanted: set[str] = set()
    pending = [
        line
        for line in report.after.splitlines()
        if line.startswith("return") or re.search(r"overlap_inductor\.(exchange_|reduce_tail)", line)
    ]
    while pending:
        line = pending.pop()
        for name in re.findall(r"\w+", line.split(" = ", 1)[-1]):
            if name in lines and name not in wanted:
                wanted.add(name)
                pending.append(lines[name])
    found = [
        f"the result of {n} is not used"
        for n, line in lines.items()
        if re.search(r"aten\.(?:mm|addmm|bmm|baddbmm|_grouped_mm)\.|\.grouped_mm_fallback\.", line) and n not in wanted
    ]
    kept = len(report.near_misses) + sum(s.decision.status != "overlapped" for s in report.sites)
    # Waits do not count, because a wait may belong to a collective of the forward graph.
    collective = re.compile(r"_c10d_functional\.(?!wait)|= control_deps\((?!.*subgraph_wait)")
    left = sum(bool(collective.search(line)) for line in lines.values())
    # If a sum of two all-reduces is kept, both stay in the graph, but ``kept`` counts one site. So the two
    # numbers are compared only if all sites are overlapped.
    if all(s.decision.status == "overlapped" for s in report.sites) and left > kept:
        found.append(f"{left} collectives are left, but only {kept} were kept")
    return found
