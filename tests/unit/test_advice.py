# SPDX-License-Identifier: Apache-2.0
"""Advice exists for every reason code of the package, and for no other code."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import overlap_inductor
from overlap_inductor.report.advice import ADVICE
from overlap_inductor.report.advice import advice_for
from overlap_inductor.report.text import render_text
from tests.support.fake_group import fake_group
from tests.unit import sample_reports as samples
from tests.unit.reasons import gather_site

PACKAGE = Path(overlap_inductor.__file__).parent


def reason_codes() -> set[str]:
    """The constant first arguments of ``Reason(...)`` and ``@check(...)`` in the package's sources."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name):
                code = node.args[0]
                if node.func.id in ("Reason", "check") and isinstance(code, ast.Constant):
                    found.add(code.value)
    return found


def test_every_reason_code_has_advice() -> None:
    codes = reason_codes()
    assert {"too_small", "hoist", "moving_pass"} <= codes, "codes of the planner, a check and a schedule must be found"
    assert codes == ADVICE.keys()


def test_advice_is_short_and_punctuated() -> None:
    for code, text in ADVICE.items():
        assert text[0].isupper() and text.endswith(".") and len(text) < 140, code


def test_advice_is_given_once_and_only_for_known_codes() -> None:
    assert [code for code, _ in advice_for(["layout", "of_somebody_else", "layout", "dtype"])] == ["layout", "dtype"]


def test_the_text_has_advice_for_sites_and_near_misses() -> None:
    text = render_text(samples.llama(3))
    section = text.split("what you can do\n---------------\n")[1].split("\n\n")[0]
    assert [line.split(":")[0] for line in section.splitlines() if not line.startswith(" ")] == [
        "other_users",
        "op_between",
    ]


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_the_advice_for_strides_helps(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The call that the advice names must return a tensor that the check accepts."""
    (call,) = re.findall(r"\.(\w+)\(\)", ADVICE["strides"])
    found = []
    for advised in (False, True):
        with fake_group(2):
            made = gather_site()
            with made.mode:
                value = make(torch.ones(4, 16))
                next(iter(made.graph.nodes)).meta["val"] = getattr(value, call)() if advised else value
            found.append([reason.code for site in made.run().sites for reason in site.decision.reasons])
    assert found == [["strides"], []]
